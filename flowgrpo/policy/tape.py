"""The tape: what a denoising loop did, step by step, so that it can be replayed with gradients.

`record.record` writes it while a stock pipeline samples, `replay.play` reads it.
Letters in shapes: B samples of a micro-batch, `...` the pipeline's own latent layout.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowgrpo.algorithms.sde import SDE_STEPS
from flowgrpo.core.devices import moved
from flowgrpo.pipelines.scheduler import Position, flow_coordinates

NoiseFunction = Callable[[int, int, torch.Size], Tensor]
"""(step, stream, shape of the latents) -> standard normal noise, float32."""

StepFunction = Callable[["Step", "Transition"], None]
"""Called in a replay for each window step, with the taped step and the transition under the current
weights. If several latents are stepped together, both hold all of them, (B, D)."""


class Transition(NamedTuple):
    """The Gaussian of one stochastic step, and the prediction it comes from."""

    mean: Tensor
    """(B, ...) float32."""
    std: float
    velocity: Tensor
    """(B, ...) guided prediction, eps - x0, in flow coordinates."""


@dataclass(kw_only=True)
class Step:
    """What happened in one step of the loop, for one stream of latents."""

    index: int
    """Iteration of the loop, from 0."""
    stream: int
    """Which latents, if a pipeline steps several together; 0 are its own scheduler's."""
    position: Position
    latents: Tensor
    """(B, ...) before the step."""
    next_latents: Tensor
    """(B, ...) after the step, in the pipeline's dtype."""
    mean: Tensor | None = None
    """(B, ...) float32 mean of the Gaussian; None outside the window."""
    std: float = 0.0
    velocity_rms: Tensor | None = None
    """(B,) root mean square of the velocity; None outside the window."""

    def to(self, device: torch.device) -> "Step":
        return replace(self, **moved(vars(self), device))

    @property
    def key(self) -> tuple[int, int]:
        return self.index, self.stream


@dataclass(kw_only=True)
class Tape:
    """A recorded call of a pipeline for B samples of one row."""

    sde: str
    """Name of the stochastic step, of `algorithms.sde.SDE_STEPS`."""
    noise_level: float
    window: Collection[int]
    """Steps that are stochastic, and trained; empty for the stock sampler, and with noise level 0,
    since a step without noise has no density."""
    steps: dict[tuple[int, int], Step] = field(default_factory=dict)
    """By (iteration, stream); stream 0 is the pipeline's own scheduler."""
    outputs: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    """Denoiser outputs by (module name, iteration), in order of call."""

    iterations: int = 0
    """Length of the pipeline's loop."""
    recorded_forwards: int = 0
    replayed_forwards: int = 0
    """Denoiser calls that really ran, over all replays."""

    def __post_init__(self) -> None:
        if self.noise_level == 0:
            self.window = range(0)

    def to(self, device: torch.device | str) -> "Tape":
        """The same tape with its tensors on `device`; what is there already is shared."""
        target = torch.device(device)
        steps = {key: step.to(target) for key, step in self.steps.items()}
        return replace(self, steps=steps, outputs=moved(self.outputs, target))

    @property
    def window_steps(self) -> list[Step]:
        return [step for (index, _), step in sorted(self.steps.items()) if index in self.window]

    def transition(self, step: Step, scheduler: Any, model_output: Tensor) -> Transition:
        """The Gaussian of a window step, in the scheduler's own scale."""
        at = step.position
        x, velocity = flow_coordinates(scheduler, model_output, step.latents, at)
        gaussian = SDE_STEPS[self.sde](x, velocity, at.sigma, at.sigma_next, self.noise_level)
        scale = at.scale_next
        return Transition(gaussian.mean * scale, gaussian.std * scale, velocity)
