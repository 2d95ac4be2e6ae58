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
from flowgrpo.policy.tape import Tape
from flowgrpo.scoring.reward import Reward
from flowgrpo.scoring.scorer import Scorer


@dataclass(kw_only=True)
class RolloutGroup:
    """The K samples of one group: rollouts in order, and rewards (K,) float64 by name."""

    group: Group
    rollouts: list[Rollout]
    rewards: dict[str, Tensor]
    num_flat: int
    """Number of samples in which each frame has a single colour."""

    @property
    def samples(self) -> list[Sample]:
        return [sample for rollout in self.rollouts for sample in rollout.samples]

    def drop_samples(self) -> None:
        """Frees the images or videos, which fill memory once they are scored."""
        for rollout in self.rollouts:
            rollout.samples.clear()

    def to_message(self) -> dict[str, Any]:
        """Message to the other processes, as JSON."""
        steps = [step for rollout in self.rollouts for step in rollout.tape.window_steps]
        norms = torch.cat([s.velocity_rms for s in steps if s.velocity_rms is not None])
        return {
            "rewards": {name: values.tolist() for name, values in self.rewards.items()},
            "num_flat": self.num_flat,
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
    """Rolls out every group; scoring overlaps with sampling for rewards that allow it.

    Args:
        should_stop: checked before each micro-batch and at the end; if it returns True, sampling
            stops and the result is empty.
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
                    futures.append(scorer.submit(rollout.samples, [group.row] * len(samples)))
            pending.append((group, rollouts, futures))
        with clock("scoring"):
            sampled = [
                RolloutGroup(
                    group=group,
                    rollouts=rollouts,
                    rewards={reward.name: _joined(futures, reward.name) for reward in rewards},
                    num_flat=sum(_is_flat(s) for rollout in rollouts for s in rollout.samples),
                )
                for group, rollouts, futures in pending
            ]
    return [] if should_stop() else sampled


def roll_out(policy: Policy, plan: Plan, group: Group, samples: range) -> Rollout:
    """Samples one micro-batch of a group."""
    config = plan.config

    def noise(step: int, stream: int, shape: torch.Size) -> Tensor:
        keys = [group.noise_key(sample, step, stream) for sample in samples]
        return torch.stack([normal(shape[1:], config.seed, *key) for key in keys])

    sampling = config.sampling
    tape = Tape(sde=sampling.sde, noise_level=sampling.noise_level, window=group.window)
    seeds = [group.seeds[sample] for sample in samples]
    return policy.rollout(group.row, seeds, config.sampling_call, tape, noise)


def _joined(futures: Sequence[dict[str, Future[Tensor]]], name: str) -> Tensor:
    """Scores of a group's micro-batches in order, (K,)."""
    return torch.cat([future[name].result() for future in futures])


def _is_flat(sample: Sample) -> bool:
    """Whether each frame has a single colour."""
    colours = [frame.convert("RGB").getcolors(maxcolors=1) for frame in frames_of(sample)]
    return None not in colours
