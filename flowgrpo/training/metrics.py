"""Metrics of an epoch: sums over transitions, and summary statistics of rewards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def reward_metrics(
    rewards: Mapping[str, Sequence[Tensor]], totals: Sequence[Tensor]
) -> dict[str, Any]:
    """Spread of each reward over all images of an epoch, and the mean spread within groups (K,)."""
    return {
        "rewards": {
            name: summary_statistics(torch.stack(list(groups))) for name, groups in rewards.items()
        },
        "total": summary_statistics(torch.stack(list(totals))),
        "mean_group_std": float(torch.stack(list(totals)).std(dim=1, correction=0).mean()),
    }


def summary_statistics(rewards: Tensor) -> dict[str, float]:
    """Mean, standard deviation, least and greatest of all rewards of an epoch."""
    return {
        "mean": float(rewards.mean()),
        "std": float(rewards.std(correction=0)),
        "min": float(rewards.min()),
        "max": float(rewards.max()),
    }


@dataclass(kw_only=True)
class MetricSums:
    """Sums over the (image, step) pairs of an epoch, as tensors: nothing waits for a device."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    count: int = 0

    def add(self, **values: Tensor) -> None:
        """Adds (B,) values of one step."""
        for name, value in values.items():
            total = value.detach().double().sum()
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        self.count += len(next(iter(values.values())))

    def totals(self) -> tuple[dict[str, float], int]:
        return {name: float(total) for name, total in self.sums.items()}, self.count
