"""Flow-GRPO's objective: PPO's clipped surrogate per step, and the KL to the reference."""

import torch
from torch import Tensor

from flowgrpo.algorithms.objectives.batch import StepBatch, StepLoss
from flowgrpo.algorithms.sde import kl_divergence


def grpo(
    batch: StepBatch,
    *,
    clip_range: tuple[float, float],
    kl_weight: float,
    max_advantage: float,
) -> StepLoss:
    """max(-A r, -A clip(r)) + kl_weight * KL (arXiv 2505.05470, eq. 5; arXiv 1707.06347, eq. 7).

    Args:
        clip_range: (low, high): the ratio r is clipped to [1 - low, 1 + high], with separate bounds
            as in DAPO (arXiv 2503.14476). A log-prob is a mean over D latent dimensions, so r is
            the likelihood ratio to the power 1/D.
        kl_weight: weight of the KL to the reference; 0 leaves it out.
        max_advantage: advantages A are clipped to [-max_advantage, max_advantage].

    Returns:
        The loss (B,), and as metrics |r - 1|, whether each bound was active (low if A < 0, high if
        A > 0), and the KL if its weight is not 0.
    """
    low, high = clip_range
    advantages = batch.advantages.clamp(-max_advantage, max_advantage)
    ratio = torch.exp(batch.log_prob - batch.old_log_prob)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    metrics: dict[str, Tensor] = {
        "ratio_deviation": (ratio.detach() - 1).abs(),
        "clip_fraction_low": (ratio < 1 - low) & (advantages < 0),
        "clip_fraction_high": (ratio > 1 + high) & (advantages > 0),
    }
    if kl_weight:
        assert batch.reference_mean is not None
        metrics["kl"] = kl = kl_divergence(batch.mean, batch.reference_mean, batch.std)
        loss = loss + kl_weight * kl
    return StepLoss(loss, metrics)
