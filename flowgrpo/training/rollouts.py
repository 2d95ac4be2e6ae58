"""Rolls out groups and scores them."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowgrpo.core.clock import Clock
from flowgrpo.core.seeds import normal
from flowgrpo.data.plan import Group, Plan
from flowgrpo.data.samples import Sample, frames_of
from flowgrpo.policy.policy import Policy, Rollout
from flowgrpo.reporting.sheets import SHEET_ROWS
from flowgrpo.scoring.reward import Reward
from flowgrpo.scoring.scorer import Scorer


@dataclass(kw_only=True)
class RolloutGroup:
    """One group after sampling: rollouts in order, and rewards (K,) float64 by name."""

    group: Group
    rollouts: list[Rollout]
    rewards: dict[str, Tensor]
    flat: int
    """Number of samples that are of one colour throughout."""

    def to_message(self) -> dict[str, Any]:
        """What other processes need to know, as JSON."""
        steps = [step for rollout in self.rollouts for step in rollout.tape.window_steps]
        norms = torch.cat([s.velocity_rms for s in steps if s.velocity_rms is not None])
        return {
            "rewards": {name: values.tolist() for name, values in self.rewards.items()},
            "flat": self.flat,
            "velocity_rms": float(norms.double().mean()),
        }


def sample_groups(
    policy: Policy,
    plan: Plan,
    rewards: Sequence[Reward],
    groups: Sequence[Group],
    clock: Clock | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[RolloutGroup]:
    """Rolls out every group; scoring overlaps with sampling where a reward allows it.

    Args:
        stopping: asked before each micro-batch and at the end; where it says so, groups are
            missing.
    """
    clock = clock or Clock()
    pending, keep_on_cpu = [], plan.config.sampling.tape_on_cpu
    with Scorer(rewards) as scorer:
        for group in groups:
            rollouts, futures = [], []
            for samples in plan.micro_batches:
                if should_stop():
                    return []
                rollout = roll_out(policy, plan, group, samples)
                rollouts.append(rollout.to("cpu") if keep_on_cpu else rollout)
                with clock("scoring"):
                    rows = [group.row] * len(samples)
                    futures.append(scorer.submit(rollout.samples, rows))
            pending.append((group, rollouts, futures))
        with clock("scoring"):
            sampled = [
                RolloutGroup(
                    group=group,
                    rollouts=rollouts,
                    rewards={reward.name: _joined(futures, reward.name) for reward in rewards},
                    flat=sum(_is_flat(s) for rollout in rollouts for s in rollout.samples),
                )
                for group, rollouts, futures in pending
            ]
    if should_stop():
        return []
    for rollout in (r for s in sampled[SHEET_ROWS:] for r in s.rollouts):
        rollout.samples.clear()  # scored, and not drawn; the frames of videos fill memory
    return sampled


def roll_out(policy: Policy, plan: Plan, group: Group, samples: range) -> Rollout:
    """One micro-batch of a group."""
    config = plan.config

    def noise(step: int, stream: int, shape: torch.Size) -> Tensor:
        keys = [group.noise_key(sample, step, stream) for sample in samples]
        return torch.stack([normal(shape[1:], config.seed, *key) for key in keys])

    return policy.rollout(
        group.row,
        [group.seeds[sample] for sample in samples],
        config.sampling_call,
        sde=config.sampling.sde,
        noise_level=config.sampling.noise_level,
        window=group.window,
        noise=noise,
    )


def samples_for_a_sheet(
    drawn: Sequence[tuple[RolloutGroup, Tensor]],
) -> list[tuple[str, list, list[float]]]:
    """(prompt, samples, total rewards) of groups with their totals (K,): those that are drawn."""
    return [
        (s.group.row.prompt, [sample for r in s.rollouts for sample in r.samples], total.tolist())
        for s, total in drawn[:SHEET_ROWS]
    ]


def _joined(futures: Sequence[dict[str, Future[Tensor]]], name: str) -> Tensor:
    """Scores of a group's micro-batches in order, (K,)."""
    return torch.cat([future[name].result() for future in futures])


def _is_flat(sample: Sample) -> bool:
    """Every pixel of every frame has the same colour."""
    colours = [frame.convert("RGB").getcolors(maxcolors=1) for frame in frames_of(sample)]
    return None not in colours
