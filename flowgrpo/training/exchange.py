"""Exchange of rewards and metrics between processes, and the division of replays among them.

Every process samples complete groups. Rewards are then gathered by all, so that advantages are the
same numbers on any number of processes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo.core.errors import RunStopped
from flowgrpo.distributed.processes import Processes
from flowgrpo.policy.policy import Policy
from flowgrpo.runs.state import TrainerState
from flowgrpo.training.metrics import MetricSums, means_of
from flowgrpo.training.rollouts import RolloutGroup


def exchange_rollouts(
    own: Sequence[RolloutGroup],
    problem: RunStopped | None,
    num_groups: int,
    epoch: int,
    processes: Processes,
) -> list[dict[str, Any]]:
    """`RolloutGroup.to_message` of every group of the epoch, in order.

    Args:
        own: the groups that this process sampled.
        problem: what stopped this process from sampling them.
        num_groups: number of groups in the epoch, over all processes.
        epoch: the epoch whose weights sampled; it is blamed for a problem.

    Returns:
        Empty if a signal interrupted sampling on some process.

    Raises:
        RunStopped: on every process, if any has a problem.
    """
    failure = problem and [problem.reason, str(problem)]
    messages = processes.all_gather(
        {"failure": failure, "groups": [group.to_message() for group in own]}
    )
    for message in messages:
        if message["failure"]:
            raise RunStopped(*message["failure"], on_all_processes=True, blamed_epoch=epoch)
    shards = [message["groups"] for message in messages]
    if sum(map(len, shards)) < num_groups:
        return []
    return processes.unshard(shards, num_groups)


def rewards_of(
    groups: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, list[Tensor]]:
    """Rewards by name, one float64 tensor (K,) per group, from the groups' messages."""
    return {
        name: [torch.tensor(group["rewards"][name], dtype=torch.float64) for group in groups]
        for name in names
    }


def rollout_metrics(groups: Sequence[Mapping[str, Any]], num_images: int) -> dict[str, float]:
    """Share of samples of a single colour, if there are any, and the mean velocity."""
    flat = sum(group["num_flat"] for group in groups) / num_images
    velocity_rms = sum(group["velocity_rms"] for group in groups) / len(groups)
    return {**({"flat_images": flat} if flat else {}), "velocity_rms": velocity_rms}


def gather_training_metrics(
    sums: MetricSums, policy: Policy, state: TrainerState, processes: Processes
) -> dict[str, float]:
    """Returns means over the transitions of all processes; adds their denoiser calls to `state`."""
    messages = processes.all_gather({**sums.to_message(), "calls": policy.pop_denoiser_calls()})
    for name in state.denoiser_calls:
        state.denoiser_calls[name] += sum(message["calls"][name] for message in messages)
    return means_of(messages)


def groups_to_replay(
    indices: range, has_gradient: Sequence[bool], processes: Processes, *, is_sharded: bool
) -> list[int]:
    """Indices of an update's groups that this process replays.

    Args:
        indices: indices of the update's groups within the epoch.
        has_gradient: whether the loss of a group has a gradient, by its index in the epoch.
        is_sharded: whether the denoiser is. It then runs on all processes or on none, so if any of
            them has a group with a gradient, all replay theirs.
    """
    rank, world_size = processes.rank, processes.world_size
    if not is_sharded:
        return [index for index in indices if index % world_size == rank and has_gradient[index]]
    rounds = [indices[start : start + world_size] for start in range(0, len(indices), world_size)]
    return [turn[rank] for turn in rounds if any(has_gradient[index] for index in turn)]
