"""Advantages of groups: how much better an image is than the others of its prompt.

Pure functions of rewards, computed in float64. A group holds the K images of one prompt; if all its
rewards are equal, or K is 1, its advantages are exactly 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


def is_tied(rewards: Tensor) -> bool:
    """Whether all rewards (K,) of a group are equal, so that nothing can be learned from it."""
    return bool((rewards == rewards[0]).all())


def centred(rewards: Tensor) -> Tensor:
    """Returns r - mean (K,) of one group, exactly 0 if the group is tied."""
    rewards = rewards.double()
    # Not left to the subtraction: the mean of equal numbers may differ from them by rounding, and
    # dividing by a tiny std would blow that up.
    return torch.zeros_like(rewards) if is_tied(rewards) else rewards - rewards.mean()


def group_normalised(groups: Sequence[Tensor]) -> list[Tensor]:
    """Returns (r - mean) / population std of each group, (K,) each (GRPO, arXiv 2402.03300)."""
    return [centred(r) / (r.double().std(correction=0) + EPSILON) for r in groups]


def batch_normalised(groups: Sequence[Tensor]) -> list[Tensor]:
    """Returns (r - mean of its group) / root mean square of all these differences, (K,) per group.

    Keeps the proportions between groups: small differences within a group are not blown up.
    """
    differences = [centred(r) for r in groups]
    scale = math.sqrt(torch.cat(differences).square().mean()) + EPSILON
    return [d / scale for d in differences]


def mean_only(groups: Sequence[Tensor]) -> list[Tensor]:
    """Returns r - mean of each group, (K,) each, in the reward's units (arXiv 2503.20783)."""
    return [centred(r) for r in groups]


NORMALISATIONS: dict[str, Callable[[Sequence[Tensor]], list[Tensor]]] = {
    "group": group_normalised,
    "batch": batch_normalised,
    "none": mean_only,
}
"""Functions from the rewards of all groups to their advantages, by the name in the config."""


def advantages(
    rewards: Mapping[str, Sequence[Tensor]], weights: Mapping[str, float], normalisation: str
) -> list[Tensor]:
    """Returns the advantages of every group, from one or several rewards.

    Args:
        rewards: for each reward by name, the rewards (K,) of every group.
        weights: weight of each reward by name.
        normalisation: `group`, `batch` or `none` normalise the weighted sum of rewards; `gdpo`
            (arXiv 2601.05242) normalises each reward in its group, then sums them with the weights
            and normalises over the batch, so that the scale of a reward does not matter.

    Returns:
        One float64 tensor (K,) per group.
    """
    if normalisation == "gdpo":
        parts = {name: group_normalised(groups) for name, groups in rewards.items()}
        return batch_normalised(weighted_sum(parts, weights))
    return NORMALISATIONS[normalisation](weighted_sum(rewards, weights))


def weighted_sum(
    rewards: Mapping[str, Sequence[Tensor]], weights: Mapping[str, float]
) -> list[Tensor]:
    """Returns the weighted sum of the rewards of each group, (K,) each, float64."""
    factors = [weights[name] for name in rewards]
    return [
        torch.stack([w * r.double() for w, r in zip(factors, group, strict=True)]).sum(0)
        for group in zip(*rewards.values(), strict=True)
    ]
