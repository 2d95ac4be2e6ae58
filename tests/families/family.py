"""What a test needs to know about a family of pipelines, and arguments that many calls share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from diffusers import DiffusionPipeline


@dataclass(frozen=True, kw_only=True)
class Family:
    """A pipeline class with tiny random weights, and two calls of it."""

    label: str
    """As in the README's table: a model's name as its makers write it, then what is special."""
    build: Callable[[], DiffusionPipeline]
    """In float32 on the CPU, with the weights of torch's seed; tests call `built`."""
    call: dict[str, Any] = field(default_factory=dict)
    """The smallest call, guidance off, without prompt, steps, seeds and output type."""
    guided: dict[str, Any] | None = None
    """What is added to `call` to switch guidance on; None where the pipeline has none."""
    last_step: int | None = None
    """Last step that can be trained of four, where the loop is shorter, as with a `strength`."""
    float32: tuple[str, ...] = ()
    """Parts that stay in float32 in a pipeline of any other dtype, as its makers ask."""


SIZE = {"height": 16, "width": 16}
LARGER = {"height": 64, "width": 64}
"""For pipelines that take a latent pixel to be 8 x 8 picture pixels, whatever their VAE does."""
SHORT = {**SIZE, "max_sequence_length": 16}
"""A token is a letter."""
UNGUIDED = {"guidance_scale": 1.0}
NEGATIVE = {"negative_prompt": "a blurred ball"}
GUIDED = {**NEGATIVE, "guidance_scale": 4.5}
TRUE_CFG = {**NEGATIVE, "true_cfg_scale": 4.0}
"""Of pipelines whose `guidance_scale` is an input of the model."""
