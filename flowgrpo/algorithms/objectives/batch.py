"""Input and output of an objective: the contract of `flowgrpo.algorithms.objectives`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(kw_only=True, frozen=True)
class StepBatch:
    """One stochastic step of B samples of one group, under the current and the sampling weights.

    `...` is the pipeline's own latent layout. Tensors under the current weights carry gradients.
    """

    advantages: Tensor
    """(B,) advantage of each sample over its group."""
    log_prob: Tensor
    """(B,) log-prob of `next_latents` under the current weights, mean over latent dimensions."""
    old_log_prob: Tensor
    """(B,) the same under the sampling weights."""
    latents: Tensor
    """(B, ...) latents before the step."""
    next_latents: Tensor
    """(B, ...) latents after the step, as drawn in the rollout."""
    mean: Tensor
    """(B, ...) float32 mean of the step's Gaussian under the current weights."""
    old_mean: Tensor
    """(B, ...) the same under the sampling weights."""
    reference_mean: Tensor | None
    """(B, ...) the same under the reference; None unless the objective's settings need it."""
    std: float
    """Standard deviation of the step's Gaussian, sqrt(dt) included."""
    velocity: Tensor
    """(B, ...) guided prediction eps - x0 under the current weights, in flow coordinates."""
    sigma: float
    """Noise fraction in [0, 1] before the step."""
    sigma_next: float
    """Noise fraction after the step."""


class StepLoss(NamedTuple):
    """The loss of one step."""

    loss: Tensor
    """(B,) loss per sample, to be averaged over all transitions of an update and minimized."""
    metrics: dict[str, Tensor]
    """Values (B,) by name; their means over an epoch's transitions are logged in metrics.jsonl."""


Objective = Callable[..., StepLoss]
"""objective(batch, **settings) -> StepLoss: pure; settings are the fields of its config class."""
