"""Statistics of paired evaluations."""

import torch
from torch import Tensor

BOOTSTRAP_SAMPLES = 10_000
"""Number of resampled sets of prompts."""


def paired_bootstrap(base: Tensor, tuned: Tensor, seed: int = 0) -> tuple[float, float]:
    """Returns the 95 % percentile bootstrap interval (low, high) of the mean gain.

    Prompts are resampled, each with all its seeds, since those are not independent.

    Args:
        base, tuned: scores (prompts, seeds) of the same prompts and noise.
        seed: seed of the resampling.
    """
    gains = (tuned - base).mean(dim=1)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(len(gains), (BOOTSTRAP_SAMPLES, len(gains)), generator=generator)
    low, high = gains[draws].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=gains.dtype))
    return float(low), float(high)
