"""Config section of the objective: one class per objective, discriminated by `name`."""

from typing import Any, Literal

from pydantic import Field, field_validator

from flowgrpo.core.errors import ConfigError
from flowgrpo.core.sections import Section


class GRPOObjective(Section):
    """Flow-GRPO (arXiv 2505.05470): PPO's clipped surrogate, plus a KL penalty to the reference."""

    name: Literal["grpo"] = "grpo"
    """Name of the objective."""
    clip_range: tuple[float, float] = (1e-4, 1e-4)
    """How far the likelihood ratio may fall below and rise above 1 before it is clipped; a single
    number sets both. Useful values are 1e-5 to 1e-3, because log-probabilities are means over
    latent dimensions."""
    kl_weight: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference, which is the model before training. 0 saves the
    forward pass of the reference."""
    max_advantage: float = Field(default=5.0, gt=0)
    """Largest absolute value of an advantage; larger ones are clipped."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the objective's function."""
        return self.model_dump(exclude={"name"})

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs the reference's mean, which costs one more forward pass."""
        return self.kl_weight > 0

    @property
    def replay_tolerance(self) -> float:
        """Largest allowed deviation from 1 of a ratio that is replayed before any update."""
        return min(self.clip_range) / 10

    @field_validator("clip_range", mode="before")
    @classmethod
    def _set_both_sides(cls, value: Any) -> Any:
        return (value, value) if isinstance(value, (int, float, str)) else value

    @field_validator("clip_range")
    @classmethod
    def _check_bounds(cls, value: tuple[float, float]) -> tuple[float, float]:
        if min(value) <= 0 or value[0] >= 1:
            raise ConfigError(
                f"objective.clip_range is {value}, but must be above 0 and below 1; try 1e-4."
            )
        return value
