"""Proves that a replay reproduces its rollout: every run starts with `check_replay`."""

import inspect
import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flowgrpo.algorithms.sde import log_prob
from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.errors import ReplayError
from flowgrpo.core.seeds import normal
from flowgrpo.data.plan import Plan
from flowgrpo.data.row import Row
from flowgrpo.distributed.fsdp import placed_like
from flowgrpo.pipelines.batching import Batchings
from flowgrpo.policy.policy import Policy, Rollout
from flowgrpo.policy.tape import Step, Tape, Transition
from flowgrpo.policy.weights import trained_values

SEEDS = (1, 2)
"""Seeds of the initial noise in a check: two different ones, so that swapped samples show."""

NUDGE = 0.02
"""Standard deviation of the noise that `nudged_weights` adds."""


def check_replay(policy: Policy, row: Row, settings: GRPOConfig) -> Rollout:
    """Replays a rollout over all steps that can be trained, and returns the rollout.

    Meanwhile the weights are nudged, since a fresh LoRA would change nothing. Afterwards weights
    and call counts are as before, and there are no gradients.

    Raises:
        ReplayError: the replay differs from the rollout, so that training would be biased.
    """
    plan = Plan(config=settings, rows=[row])
    call, (first, last) = settings.sampling_call, plan.window_bounds
    policy.batchings.of_micro_batch(row, call, plan.micro_batch_size)
    calls_before = dict(policy.denoiser_calls)
    with trained_values(policy, nudged_weights(policy)):
        rollout = check_rollout(policy, row, call, settings, range(first, last + 1))
        found = replay_differences(policy, rollout)
    policy.denoiser_calls.update(calls_before)
    for parameter in policy.parameters.values():
        parameter.grad = None
    difference, worst = nan_max(found.values()), max(found, key=lambda index: found[index])
    allowed = settings.objective.replay_tolerance
    if not difference <= allowed and settings.guards.replay != "off":
        error = ReplayError(
            f"{type(policy.pipe).__name__} step {worst} replays {difference:.1e} away from its "
            f"rollout (allowed {allowed:.0e}, a tenth of objective.clip_range); run flowgrpo check "
            "to see what differs, or widen the clip range."
        )
        if settings.guards.replay == "stop" or math.isnan(difference):
            raise error
        print(f"warning: {error}", file=sys.stderr)
    return rollout


def replay_differences(policy: Policy, rollout: Rollout) -> dict[int, float]:
    """Largest |log-prob at replay - log-prob at rollout| over the samples, by window step.

    Runs backward from every step's log-probs and leaves the gradients in the weights.

    Raises:
        ReplayError: a denoiser keeps state between steps.
    """
    found = {}

    def on_step(step: Step, now: Transition) -> None:
        assert step.mean is not None
        before = log_prob(step.next_latents, step.mean, step.std)
        replayed = log_prob(step.next_latents, now.mean, now.std)
        found[step.index] = float((replayed.detach() - before).abs().max())
        if replayed.requires_grad:
            replayed.sum().backward()

    try:
        policy.replay(rollout, on_step)
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise ReplayError(
            f"{type(policy.pipe).__name__} step {len(found)} depends on the weights through an "
            f"earlier step, so a denoiser keeps state between steps; {_cache_hint(policy.pipe)}."
        ) from error
    return found


def _cache_hint(pipe: Any) -> str:
    names = [n for n in inspect.signature(type(pipe).__call__).parameters if "cache" in n]
    return f"set {names[0]} to false" if names else "switch its cache off, if it has one"


def check_seeds(batchings: Batchings, row: Row, call: dict[str, Any]) -> tuple[int, ...]:
    """Seeds of the samples of a check: two if the pipeline can make two per call, otherwise one."""
    return SEEDS[:1] if batchings.of(row, call).one_per_call else SEEDS


def check_rollout(
    policy: Policy, row: Row, call: dict[str, Any], settings: GRPOConfig, window: range
) -> Rollout:
    """A rollout of `check_seeds`, with all steps of `window` stochastic."""
    seeds = check_seeds(policy.batchings, row, call)

    def noise(step: int, stream: int, shape: torch.Size) -> Tensor:
        return torch.stack([normal(shape[1:], "check", seed, step, stream) for seed in seeds])

    sampling = settings.sampling
    tape = Tape(sde=sampling.sde, noise_level=sampling.noise_level, window=window)
    return policy.rollout(row, seeds, call, tape, noise)


def nudged_weights(policy: Policy) -> dict[str, Tensor]:
    """The trained weights plus a little noise: a fresh LoRA changes nothing, and half of it gets no
    gradient."""
    return {
        name: parameter.detach()
        + NUDGE * placed_like(normal(parameter.shape, "nudge", name), parameter)
        for name, parameter in policy.parameters.items()
    }


def nan_max(values: Iterable[float]) -> float:
    """The maximum, or NaN if any value is NaN, which `max` might hide."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())
