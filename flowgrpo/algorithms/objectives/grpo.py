"""The clipped policy objective, as a pure function of log-probs."""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_ADVANTAGE = 5.0
"""Advantages are clipped to plus or minus this, as in Flow-GRPO's code."""


class Loss(NamedTuple):
    """`values` (B,) to be averaged and minimised; the rest (B,) is for the log."""

    values: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def clipped(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    clip_range: tuple[float, float],
) -> Loss:
    """PPO's clipped surrogate (arXiv 1707.06347 eq. 7) with separate bounds (arXiv 2503.14476).

    Args:
        log_prob, old_log_prob: (B,) of one step under the current and the sampling weights, mean
            over latent dimensions, so that `clip_range` is in units of the ratio to the power 1/D.
        advantages: (B,).
        clip_range: (low, high): the ratio counts between 1 - low and 1 + high.

    Returns:
        max(-A r, -A clip(r)), and where the bound was active: low for A < 0, high for A > 0.
    """
    low, high = clip_range
    advantages = advantages.clamp(-MAX_ADVANTAGE, MAX_ADVANTAGE)
    ratio = torch.exp(log_prob - old_log_prob)
    values = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    with torch.no_grad():
        return Loss(
            values,
            ratio.detach(),
            (ratio < 1 - low) & (advantages < 0),
            (ratio > 1 + high) & (advantages > 0),
        )
