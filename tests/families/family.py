"""The description of a pipeline family for tests, and arguments that many calls share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from diffusers import DiffusionPipeline


@dataclass(frozen=True, kw_only=True)
class Family:
    """A pipeline class with tiny random weights, and two calls of it."""

    label: str
    """The row in assets/supported.md: the model's official name, and in brackets its variant."""
    build: Callable[[], DiffusionPipeline]
    """Builds it in float32 on the CPU, with weights from torch's global generator; tests call
    `built`, which seeds it."""
    call: dict[str, Any] = field(default_factory=dict)
    """Arguments of the smallest call with guidance off, except prompt, steps, seeds and output
    type."""
    guided: dict[str, Any] | None = None
    """Arguments added to `call` to switch guidance on; None if the call has no such argument."""
    last_step: int | None = None
    """Last of four steps that can be trained, if the loop is shorter, for example because of
    `strength`; None for the default."""
    float32: tuple[str, ...] = ()
    """Names of the parts that stay in float32 in any dtype, as the model's authors recommend."""


SIZE = {"height": 16, "width": 16}
LARGER = {"height": 64, "width": 64}
"""For pipelines that assume 8 x 8 image pixels per latent pixel, whatever their VAE does."""
SHORT = {**SIZE, "max_sequence_length": 16}
"""A prompt of at most 16 letters: each letter is a token."""
UNGUIDED = {"guidance_scale": 1.0}
NEGATIVE = {"negative_prompt": "a blurred ball"}
GUIDED = {**NEGATIVE, "guidance_scale": 4.5}
TRUE_CFG = {**NEGATIVE, "true_cfg_scale": 4.0}
"""For pipelines whose `guidance_scale` is an input of the model."""
