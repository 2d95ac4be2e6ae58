"""Config sections for sampling: rollouts and evaluation."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from flowgrpo.core.errors import ConfigError
from flowgrpo.core.sections import Section


class Window(Section):
    """Which steps are stochastic and trained. The last step of a schedule never is."""

    size: int | None = Field(default=None, ge=1)
    """Number of consecutive steps; default: all from `first` to `last`."""
    first: int = Field(default=0, ge=0)
    last: int | None = Field(default=None, ge=0)
    """Last step that may be in the window, itself included; default: the last but one of the
    schedule. Where there is room, each group draws its window's start."""


def _window(value: Any) -> Any:
    if value == "all":
        return {}
    if isinstance(value, int) and not isinstance(value, bool):
        return {"size": value}
    return value


class SamplingConfig(Section):
    num_inference_steps: int = Field(default=10, ge=2)
    group_size: int = Field(default=16, ge=2)
    """K, images per prompt."""
    groups_per_epoch: int = Field(default=8, ge=1)
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Images per denoiser call; default: the whole group."""
    sde: Literal["ode", "flow_sde", "cps", "dance_sde", "exact_sde", "ddim"] = "flow_sde"
    noise_level: float = Field(default=0.7, ge=0)
    window: Annotated[Window, BeforeValidator(_window)] = Window()
    shared_noise: bool = False
    """All images of a group start from the same noise and differ by the window's noise only."""
    tape_on_cpu: bool = False
    """Rollouts wait on the CPU until they are trained on: less memory of a GPU."""
    call: dict[str, Any] = Field(default_factory=dict)
    """The pipeline's own arguments, untouched: guidance_scale, height, width, ..."""

    @model_validator(mode="after")
    def _consistent(self) -> "SamplingConfig":
        if self.sde in ("cps", "ddim") and self.noise_level > 1:
            raise ConfigError(
                f"sampling.noise_level is {self.noise_level}, but must be at most 1 for "
                f"{self.sde}; 1 replaces all of the old noise."
            )
        last = self.num_inference_steps - 2
        window = self.window
        stop = last if window.last is None else window.last
        if stop > last:
            raise ConfigError(
                f"sampling.window.last is {stop}, but must be at most {last} with "
                f"{self.num_inference_steps} steps; the last step is always deterministic."
            )
        if window.first > stop or (window.size or 1) > stop - window.first + 1:
            raise ConfigError(
                f"sampling.window takes {window.size or 1} of the steps {window.first} to "
                f"{stop}, but there are {max(0, stop - window.first + 1)}; "
                "use a smaller window or more steps."
            )
        reject_sampler_arguments("sampling.call", self.call)
        return self


class EvaluationConfig(Section):
    every: int = Field(default=0, ge=0)
    """Epochs between evaluations; 0: only the base model and the result."""
    num_inference_steps: int | None = Field(default=None, ge=1)
    """Default: as in sampling."""
    call: dict[str, Any] | None = None
    """The pipeline's arguments; default: as in sampling."""
    seeds: list[int] = Field(default=[0], min_length=1)
    """Images per prompt, one a seed; a number n stands for 0 to n - 1."""
    max_prompts: int | None = Field(default=None, ge=1)
    """At most so many of each prompt file, evenly spaced."""

    @field_validator("seeds", mode="before")
    @classmethod
    def _count(cls, value: Any) -> Any:
        return list(range(value)) if isinstance(value, int) else value

    @model_validator(mode="after")
    def _own_arguments(self) -> "EvaluationConfig":
        reject_sampler_arguments("evaluation.call", self.call or {})
        return self


SAMPLER_ARGUMENTS = {
    "num_inference_steps",
    "sigmas",
    "timesteps",
    "num_images_per_prompt",
    "num_videos_per_prompt",
    "generator",
    "latents",
    "prompt",
    "output_type",
    "return_dict",
}
"""Arguments of a pipeline's call that sampling sets, or that would change what it returns."""


def require_stochastic_steps(sampling: SamplingConfig) -> None:
    """Raises ConfigError where no step would be random."""
    if sampling.sde == "ode" or sampling.noise_level == 0:
        raise ConfigError(
            f"sampling.sde is {sampling.sde} with noise_level {sampling.noise_level}, but "
            "training needs random steps; use flow_sde with 0.7, say."
        )


def reject_sampler_arguments(section: str, call: dict[str, Any]) -> None:
    for name in sorted(call.keys() & SAMPLER_ARGUMENTS):
        raise ConfigError(f"{section}.{name} is set, but is the sampler's own; remove it.")
