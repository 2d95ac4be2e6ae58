"""The seams: record a stock pipeline's denoising loop, and play it again with gradients.

The pipeline is the policy and stays as it is. For the duration of one call two methods are replaced
on its *instances*, the scheduler's `step` and each denoiser's `forward`, and put back afterwards:

- recording: outside the stochastic window the scheduler's own step decides (bit-equal to the stock
  pipeline); inside it, one Gaussian step is drawn and written down. Denoiser outputs are kept.
- playing: the whole loop runs again on the taped latents. In the window the denoiser really runs,
  with gradients, and the Gaussian of that step goes to the caller; elsewhere the taped output
  stands in.
  The call is left after the last window step, since nothing later is trained.

So guidance, embeddings, packing and loop counters are the pipeline's own code in training too.
Letters in shapes: B images of a micro-batch, `...` the pipeline's own latent layout.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from flowgrpo.algorithms.sde import SDE_STEPS, Gaussian
from flowgrpo.core.devices import moved
from flowgrpo.pipelines.scheduler import Position, flow_coordinates, second_sigma

NoiseFunction = Callable[[int, int, torch.Size], Tensor]
"""(step, stream, shape of the latents) -> standard normal noise, float32."""


StepFunction = Callable[["Step", Gaussian], None]
"""Called in play for each window step, with the taped step and the current weights' Gaussian; where
several latents are stepped together, both hold them all (B, D)."""


@dataclass(kw_only=True)
class Step:
    """What happened in one step of the loop, for one stream of latents."""

    index: int
    """Iteration of the loop, from 0."""
    stream: int
    """Which latents, where a pipeline steps several together; 0 for its own scheduler's."""
    position: Position
    latents: Tensor
    """(B, ...) what the step started from."""
    next_latents: Tensor
    """(B, ...) what it gave, in the pipeline's dtype."""
    mean: Tensor | None = None
    """(B, ...) float32 centre of the Gaussian; None outside the window."""
    std: float = 0.0
    velocity_rms: Tensor | None = None
    """(B,) root mean square of the velocity, in the window."""

    def to(self, device: torch.device) -> "Step":
        return replace(self, **moved(vars(self), device))

    @property
    def key(self) -> tuple[int, int]:
        return self.index, self.stream


@dataclass(kw_only=True)
class Tape:
    """A recorded run of one pipeline call over B images of one prompt."""

    sde: str
    noise_level: float
    window: Collection[int]
    """Steps that are stochastic, and trained; empty for a run of the stock sampler."""
    steps: dict[tuple[int, int], Step] = field(default_factory=dict)
    """By (iteration, stream); stream 0 is the pipeline's own scheduler."""
    outputs: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    """Denoiser outputs by (module name, iteration), in order of call."""

    iterations: int = 0
    """Of the pipeline's loop."""
    recorded_forwards: int = 0
    replayed_forwards: int = 0
    """Denoiser calls that really ran, over all plays."""

    def to(self, device: torch.device | str) -> "Tape":
        """The same tape with its tensors on `device`; what is there already is shared."""
        place = torch.device(device)
        steps = {key: step.to(place) for key, step in self.steps.items()}
        return replace(self, steps=steps, outputs=moved(self.outputs, place))

    @property
    def window_steps(self) -> list[Step]:
        return [step for (index, _), step in sorted(self.steps.items()) if index in self.window]


def step_gaussian(tape: Tape, taped: Step, scheduler: Any, model_output: Tensor) -> Gaussian:
    at = taped.position
    x, velocity = flow_coordinates(scheduler, model_output, taped.latents, at)
    mean, std = SDE_STEPS[tape.sde](
        x, velocity, at.sigma, at.sigma_next, second_sigma(scheduler), tape.noise_level
    )
    return Gaussian(mean * at.scale_next, std * at.scale_next)


def previous_sample(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result.prev_sample


def with_previous_sample(result: Any, latents: Tensor) -> Any:
    if isinstance(result, tuple):
        return (latents, *result[1:])
    result.prev_sample = latents
    return result


def detached_copy(output: Any) -> Any:
    return tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, output
    )
