"""Advantages of groups: how much better an image is than the others of its prompt.

Pure functions on rewards, computed in float64. K images a group; a group whose rewards are all the
same, or that has a single image, gets advantages of exactly 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to a standard deviation before division."""


def is_tied(rewards: Tensor) -> bool:
    """All rewards of a group (K,) are equal: it can teach nothing."""
    return bool((rewards == rewards[0]).all())


def centred(rewards: Tensor) -> Tensor:
    """r - mean of the group (K,), exactly 0 where the group is tied."""
    rewards = rewards.double()
    return torch.zeros_like(rewards) if is_tied(rewards) else rewards - rewards.mean()


def group_normalised(groups: Sequence[Tensor]) -> list[Tensor]:
    """(r - mean) / std, both of the group (GRPO, arXiv 2402.03300, eq. 4; population std)."""
    return [centred(r) / (r.double().std(correction=0) + EPSILON) for r in groups]


def batch_normalised(groups: Sequence[Tensor]) -> list[Tensor]:
    """(r - mean of the group) / root mean square of these differences over the batch.

    Keeps the proportions between groups: one with hardly any spread is not blown up.
    """
    differences = [centred(r) for r in groups]
    every = torch.cat(differences)
    return [d / (math.sqrt(every.square().mean()) + EPSILON) for d in differences]


def mean_only(groups: Sequence[Tensor]) -> list[Tensor]:
    """r - mean of the group, in the rewards' own units (Dr. GRPO, arXiv 2503.20783)."""
    return [centred(r) for r in groups]


NORMALISATIONS: dict[str, Callable[[Sequence[Tensor]], list[Tensor]]] = {
    "group": group_normalised,
    "batch": batch_normalised,
    "none": mean_only,
}


def advantages(
    rewards: Mapping[str, Sequence[Tensor]], weights: Mapping[str, float], kind: str
) -> list[Tensor]:
    """Advantages of every group, from one or several rewards.

    Args:
        rewards: by reward name, the groups' rewards, each (K,).
        weights: by reward name.
        kind: `group`, `batch` or `none` normalise the weighted sum of rewards; `gdpo`
            (arXiv 2601.05242) normalises each reward in its group, then sums with the weights and
            whitens over the batch, so that the scale of a reward does not matter.

    Returns:
        One float64 tensor (K,) a group.
    """
    if kind == "gdpo":
        parts = {name: group_normalised(groups) for name, groups in rewards.items()}
        return batch_normalised(weighted_sum(parts, weights))
    return NORMALISATIONS[kind](weighted_sum(rewards, weights))


def weighted_sum(
    rewards: Mapping[str, Sequence[Tensor]], weights: Mapping[str, float]
) -> list[Tensor]:
    """The groups' total rewards, each (K,), float64."""
    per_group = zip(*(rewards[name] for name in rewards), strict=True)
    scale = [weights[name] for name in rewards]
    return [
        torch.stack([w * r.double() for w, r in zip(scale, parts, strict=True)]).sum(0)
        for parts in per_group
    ]
