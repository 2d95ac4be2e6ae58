"""What a test needs to know about a family of pipelines."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from diffusers import DiffusionPipeline


@dataclass(frozen=True, kw_only=True)
class Family:
    """A pipeline class with tiny random weights, and two calls of it."""

    label: str
    """As in the README's table: `Wan 2.2, two experts`."""
    build: Callable[[], DiffusionPipeline]
    """The same weights each time, float32, in evaluation mode, on the CPU."""
    call: dict[str, Any] = field(default_factory=dict)
    """The smallest call, guidance off, without prompt, steps, seeds and output type."""
    guided: dict[str, Any] | None = None
    """What is added to `call` to switch guidance on; None where the pipeline has none."""
    last_step: int | None = None
    """Last step that can be trained of four, where the loop is shorter, as with a `strength`."""
