"""The tape: a denoising loop, recorded step by step so that it can be replayed with gradients.

`record.record` writes it while a stock pipeline samples, and `replay.play` reads it.
Shapes: B samples of a micro-batch, `...` the pipeline's own latent layout.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowgrpo.algorithms.sde import SDE_STEPS
from flowgrpo.core.devices import move_tensors
from flowgrpo.pipelines.scheduler import Position, flow_coordinates

NoiseFunction = Callable[[int, int, torch.Size], Tensor]
"""(step, stream, shape of the latents) -> standard normal noise, float32."""

StepFunction = Callable[["Step", "Transition"], None]
"""Called in a replay for each window step, with the taped step and the transition under the current
weights. If several latents are stepped together, both hold all of them, (B, D)."""


class Transition(NamedTuple):
    """The Gaussian of one stochastic step, and the prediction it comes from."""

    mean: Tensor
    """(B, ...) float32 mean of the next latents."""
    std: float
    """Standard deviation, sqrt(dt) included."""
    velocity: Tensor
    """(B, ...) guided prediction, eps - x0, in flow coordinates."""


@dataclass(kw_only=True)
class Step:
    """One recorded step of the loop, for one stream of latents."""

    index: int
    """Iteration of the loop, from 0."""
    stream: int
    """Index of the latents if a pipeline steps several together; 0 is its own scheduler's."""
    position: Position
    """Start and end of the step, in flow coordinates."""
    latents: Tensor
    """(B, ...) latents before the step."""
    next_latents: Tensor
    """(B, ...) latents after the step, in the pipeline's dtype."""
    mean: Tensor | None = None
    """(B, ...) float32 mean of the Gaussian; None outside the window."""
    std: float = 0.0
    """Standard deviation of the Gaussian; 0 outside the window."""
    velocity_rms: Tensor | None = None
    """(B,) root mean square of the velocity; None outside the window."""

    def to(self, device: torch.device) -> "Step":
        """Returns the same step with its tensors on `device`."""
        return replace(self, **move_tensors(vars(self), device))

    @property
    def key(self) -> tuple[int, int]:
        """(iteration, stream), the key of the step on its tape."""
        return self.index, self.stream


@dataclass(kw_only=True)
class Tape:
    """A recorded call of a pipeline for B samples of one row."""

    sde: str
    """Name of the stochastic step in `algorithms.sde.SDE_STEPS`."""
    noise_level: float
    """Noise level of the stochastic step; 0 empties the window."""
    window: Collection[int]
    """Indices of the steps that are stochastic and trained; empty for the stock sampler."""
    steps: dict[tuple[int, int], Step] = field(default_factory=dict)
    """Steps by (iteration, stream); stream 0 is the pipeline's own scheduler."""
    outputs: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    """Denoiser outputs by (module name, iteration), in the order of the calls; None for a call that
    a replay runs again, or never reaches."""
    iterations: int = 0
    """Number of steps of the pipeline's loop."""
    recorded_forwards: int = 0
    """Number of denoiser calls of the rollout."""
    replayed_forwards: int = 0
    """Number of denoiser calls of all replays, without those whose output came from the tape."""

    def __post_init__(self) -> None:
        if self.noise_level == 0:  # a step without noise has no density, so it cannot be trained
            self.window = range(0)

    def to(self, device: torch.device | str) -> "Tape":
        """Returns the same tape with its tensors on `device`; those already there are shared."""
        target = torch.device(device)
        steps = {key: step.to(target) for key, step in self.steps.items()}
        return replace(self, steps=steps, outputs=move_tensors(self.outputs, target))

    @property
    def window_steps(self) -> list[Step]:
        """The stochastic steps, in the order of the loop."""
        return [step for (index, _), step in sorted(self.steps.items()) if index in self.window]

    def transition(self, step: Step, scheduler: Any, model_output: Tensor) -> Transition:
        """Returns the Gaussian of a window step, in the scheduler's own scale."""
        at = step.position
        x, velocity = flow_coordinates(scheduler, model_output, step.latents, at)
        mean, std = SDE_STEPS[self.sde](x, velocity, at.sigma, at.sigma_next, self.noise_level)
        return Transition(mean * at.scale_next, std * at.scale_next, velocity)
