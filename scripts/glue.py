"""Pipeline code outside the denoiser, in milliseconds a replayed step: python scripts/glue.py.

Tiny pipelines of the tests, 10 steps, 2 samples, one thread. Of a step in the window its denoiser
call and backward are left out; a step before it replays its kept output.
"""

import sys
import time
from pathlib import Path

import torch

from flowgrpo.algorithms.sde import log_prob
from flowgrpo.core.seeds import normal
from flowgrpo.data.prompts import Row
from flowgrpo.policy.policy import Policy
from flowgrpo.policy.tape import Tape

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from benchmark import StopWatches
from families import FAMILIES, built

STEPS, SEEDS, REPEATS = 10, (1, 2), 20


def rollout(policy: Policy, name: str, window: range):
    def noise(step: int, stream: int, shape: torch.Size) -> torch.Tensor:
        return torch.stack([normal(shape[1:], seed, step, stream) for seed in SEEDS])

    call = {**FAMILIES[name].call, "num_inference_steps": STEPS, "output_type": "latent"}
    row = Row(prompt="a red cube", source="glue")
    tape = Tape(sde="flow_sde", noise_level=0.7, window=window)
    return policy.rollout(row, SEEDS, call, tape, noise)


def seconds_outside(name: str, window: range) -> float:
    """Of one replay, least of the repeats, without denoiser and backward."""
    policy = Policy(built(name))
    watches, least = StopWatches(), float("inf")
    module = policy.pipe.transformer
    vars(module)["forward"] = watches.timed("denoiser", module.forward)
    taken = rollout(policy, name, window)

    def on_step(step, now):
        with watches("backward"):
            log_prob(step.next_latents, now.mean, now.std).sum().backward()

    for _ in range(REPEATS):
        watches.seconds.clear()
        started = time.perf_counter()
        policy.replay(taken, on_step)
        least = min(least, time.perf_counter() - started - sum(watches.seconds.values()))
    return least


def main() -> None:
    torch.set_num_threads(1)
    for name in ("sd3", "flux"):
        early, late = seconds_outside(name, range(2)), seconds_outside(name, range(7, 9))
        everything = seconds_outside(name, range(STEPS - 1))
        print(
            f"{name}: {1e3 * (everything - early) / (STEPS - 3):.2f} ms a step in the window, "
            f"{1e3 * (late - early) / 7:.2f} ms a step before it, "
            f"{1e3 * early:.1f} ms a replay of two steps"
        )


if __name__ == "__main__":
    main()
