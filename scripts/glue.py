"""Measures pipeline code outside the denoiser per replayed step: python scripts/glue.py.

Runs tiny pipelines of the tests with 10 steps, 2 samples and one thread. For steps in the window,
the denoiser's forward and backward are not counted; steps before it replay taped outputs.
"""

import sys
import time
from pathlib import Path

import torch

from flowgrpo.algorithms.sde import log_prob
from flowgrpo.core.seeds import normal
from flowgrpo.data.row import Row
from flowgrpo.policy.policy import Policy, Rollout
from flowgrpo.policy.tape import Step, Tape, Transition

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from benchmark import Stopwatches
from families import FAMILIES, built

STEPS, SEEDS, REPEATS = 10, (1, 2), 20


def rollout(policy: Policy, name: str, window: range) -> Rollout:
    def noise(step: int, stream: int, shape: torch.Size) -> torch.Tensor:
        return torch.stack([normal(shape[1:], seed, step, stream) for seed in SEEDS])

    call = {**FAMILIES[name].call, "num_inference_steps": STEPS, "output_type": "latent"}
    row = Row(prompt="a red cube", source="glue")
    tape = Tape(sde="flow_sde", noise_level=0.7, window=window)
    return policy.rollout(row, SEEDS, call, tape, noise)


def seconds_outside(name: str, window: range) -> float:
    """Returns the least seconds of several replays, without denoiser and backward."""
    policy = Policy(built(name))
    watches, least = Stopwatches(), float("inf")
    module = policy.pipe.transformer
    vars(module)["forward"] = watches.timed("denoiser", module.forward)
    taken = rollout(policy, name, window)

    def on_step(step: Step, new: Transition) -> None:
        with watches("backward"):
            log_prob(step.next_latents, new.mean, new.std).sum().backward()

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
            f"{name}: {1e3 * (everything - early) / (STEPS - 3):.2f} ms per step in the window, "
            f"{1e3 * (late - early) / 7:.2f} ms per step before it, "
            f"{1e3 * early:.1f} ms per replay of two steps"
        )


if __name__ == "__main__":
    main()
