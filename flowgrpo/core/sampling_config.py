"""Config sections of sampling: rollouts and evaluation."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from flowgrpo.core.errors import ConfigError
from flowgrpo.core.sections import Section


class Window(Section):
    """The stochastic steps of a rollout, which are the ones that are trained; the others are
    deterministic. `all` stands for every step but the last, a number n for `{size: n}`."""

    size: int | None = Field(default=None, ge=1)
    """Number of consecutive steps. By default all steps from `first` to `last`; if it is smaller
    than that, the first step of the window is drawn at random for each group."""
    first: int = Field(default=0, ge=0)
    """Index of the first step that may be in the window."""
    last: int | None = Field(default=None, ge=0)
    """Index of the last step that may be in the window. By default the schedule's last but one: its
    last step is always deterministic."""


def _expand_window(value: Any) -> Any:
    if value == "all":
        return {}
    if isinstance(value, int) and not isinstance(value, bool):
        return {"size": value}
    return value


class SamplingConfig(Section):
    """How rollouts are sampled."""

    num_inference_steps: int = Field(default=10, ge=2)
    """Number of denoising steps of a rollout."""
    group_size: int = Field(default=16, ge=2)
    """Number of images (or videos) per prompt, whose rewards are compared with one another."""
    groups_per_epoch: int = Field(default=8, ge=1)
    """Number of prompts per epoch, over all processes, each with one group of images."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Number of images per denoiser call, in sampling and in training; a smaller one takes less
    memory. By default the entire group."""
    sde: Literal["flow_sde", "cps", "dance_sde", "exact_sde", "ddim"] = "flow_sde"
    """How noise enters a stochastic step, for any parametrisation of the model: `flow_sde`
    (Flow-GRPO, arXiv 2505.05470), `cps` (coefficients-preserving, arXiv 2509.05952), `dance_sde`
    (DanceGRPO, arXiv 2505.07818), `exact_sde` (`flow_sde` integrated exactly over a step), `ddim`
    (arXiv 2010.02502)."""
    noise_level: float = Field(default=0.7, ge=0)
    """Strength of that noise: the papers' a or eta. At most 1 for `cps` and `ddim`; must be above 0
    for training."""
    window: Annotated[Window, BeforeValidator(_expand_window)] = Window()
    """Steps that are stochastic and trained: `all`, a number, or a mapping."""
    shared_noise: bool = False
    """Starts all images of a group from the same initial noise, so that they differ only by the
    noise of the window's steps."""
    tape_on_cpu: bool = False
    """Keeps rollouts on the CPU until they are trained on, which takes less GPU memory."""
    call: dict[str, Any] = Field(default_factory=dict)
    """The pipeline's own arguments, passed on as they are: `guidance_scale`, `height`, `width`,
    ..."""

    @model_validator(mode="after")
    def _check_steps(self) -> "SamplingConfig":
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
    """Evaluation with the pipeline's own sampler and the same initial noise each time."""

    every: int = Field(default=0, ge=0)
    """Number of epochs between evaluations. 0 evaluates only the model before and after
    training."""
    num_inference_steps: int | None = Field(default=None, ge=1)
    """Number of denoising steps. By default `sampling.num_inference_steps`."""
    call: dict[str, Any] | None = None
    """The pipeline's own arguments, in place of `sampling.call`. By default the same."""
    seeds: list[int] = Field(default=[0], min_length=1)
    """Seeds of the initial noise, one image per prompt and seed. A number n stands for 0 to
    n - 1."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Largest number of prompts evaluated per prompt file, taken at even intervals. By default
    all."""

    @field_validator("seeds", mode="before")
    @classmethod
    def _expand_count(cls, value: Any) -> Any:
        return list(range(value)) if isinstance(value, int) else value

    @model_validator(mode="after")
    def _check_call(self) -> "EvaluationConfig":
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
"""Arguments of a pipeline's call that the sampler sets, or that would change what it returns."""


def require_stochastic_steps(sampling: SamplingConfig) -> None:
    """Raises ConfigError if no step would be random."""
    if sampling.noise_level == 0:
        raise ConfigError(
            "sampling.noise_level is 0, but training needs random steps; use 0.7, for example."
        )


def reject_sampler_arguments(section: str, call: dict[str, Any]) -> None:
    """Raises ConfigError if `call`, the setting named `section`, has one of SAMPLER_ARGUMENTS."""
    for name in sorted(call.keys() & SAMPLER_ARGUMENTS):
        raise ConfigError(f"{section}.{name} is set, but the sampler sets it; remove it.")
