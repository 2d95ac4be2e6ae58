"""The config section of the objective: one class per objective, told apart by `name`."""

from typing import Any, Literal

from pydantic import Field, field_validator

from flowgrpo.core.errors import ConfigError
from flowgrpo.core.sections import Section


class GRPOObjective(Section):
    """Flow-GRPO: PPO's clipped surrogate, and the KL to the reference."""

    name: Literal["grpo"] = "grpo"
    clip_range: tuple[float, float] = (1e-4, 1e-4)
    """How far the ratio may fall and rise; a single number sets both. A log-prob is a mean over
    latent dimensions, so the useful range is 1e-5 to 1e-3."""
    kl_weight: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference; 0 computes no reference."""
    max_advantage: float = Field(default=5.0, gt=0)
    """Advantages are clipped to plus or minus this."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the objective's function."""
        return self.model_dump(exclude={"name"})

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the reference's mean, at the cost of one more forward."""
        return self.kl_weight > 0

    @property
    def replay_tolerance(self) -> float:
        """How far a replayed ratio may be from its rollout's before any update."""
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
