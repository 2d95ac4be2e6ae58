"""Numbers of an epoch for metrics.jsonl."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(kw_only=True)
class MetricSums:
    """Sums over the transitions of an epoch, as tensors, so that nothing waits for a GPU."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    num_transitions: int = 0

    def add(self, **values: Tensor) -> None:
        """Adds the (B,) values of one step."""
        for name, value in values.items():
            total = value.detach().double().sum()
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        self.num_transitions += len(next(iter(values.values())))

    def to_message(self) -> dict[str, Any]:
        """The sums as JSON, for the other processes."""
        sums = {name: float(total) for name, total in self.sums.items()}
        return {"sums": sums, "num_transitions": self.num_transitions}


def means_of(messages: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the transitions of all processes, from each one's `MetricSums.to_message`."""
    count = sum(message["num_transitions"] for message in messages)
    names = dict.fromkeys(name for message in messages for name in message["sums"])
    return {
        name: sum(message["sums"].get(name, 0.0) for message in messages) / count for name in names
    }


def reward_metrics(
    rewards: Mapping[str, Sequence[Tensor]], totals: Sequence[Tensor]
) -> dict[str, Any]:
    """Statistics of each reward over an epoch, and the mean standard deviation within groups.

    Args:
        rewards: by name, one (K,) tensor per group.
        totals: the weighted sums, one (K,) tensor per group.
    """
    statistics = {
        name: summary_statistics(torch.stack(list(groups))) for name, groups in rewards.items()
    }
    stacked = torch.stack(list(totals))
    return {
        "rewards": statistics,
        "total": summary_statistics(stacked),
        "mean_group_std": float(stacked.std(dim=1, correction=0).mean()),
    }


def summary_statistics(values: Tensor) -> dict[str, float]:
    """Mean, population standard deviation, minimum and maximum."""
    return {
        "mean": float(values.mean()),
        "std": float(values.std(correction=0)),
        "min": float(values.min()),
        "max": float(values.max()),
    }
