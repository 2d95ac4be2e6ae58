"""Statistics of paired evaluations."""

import torch
from torch import Tensor

BOOTSTRAP_SAMPLES = 10_000


def paired_bootstrap(base: Tensor, tuned: Tensor, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean gain, resampling prompts.

    Args:
        base, tuned: (prompts, seeds) scores with the same noise; a prompt's seeds stay together,
            since they are not independent.
    """
    gains = (tuned - base).mean(dim=1)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(len(gains), (BOOTSTRAP_SAMPLES, len(gains)), generator=generator)
    low, high = gains[draws].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=gains.dtype))
    return float(low), float(high)
