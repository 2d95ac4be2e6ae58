"""All that a user chooses, as validated pydantic models; what follows from it is in `plan`."""

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)


class ConfigError(ValueError):
    """A setting that cannot work, in one sentence."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """A question with the known name that is nearest; `otherwise` where none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f'did you mean "{close[0]}"?' if close else otherwise


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )


class ModelConfig(Section):
    path: str | None = None
    """Pipeline folder or hub name."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the frozen weights; the adapter is always float32."""
    device: str = "auto"
    """`auto` is the GPU if there is one."""
    scheduler: str | None = None
    """A scheduler class of diffusers in place of the pipeline's own, as DDIMScheduler."""
    scheduler_kwargs: dict[str, Any] = {}
    """Changes of the scheduler's configuration, as shift: 3."""
    vae_slicing: bool = False
    """Decodes one sample at a time: less memory."""
    vae_tiling: bool = False
    """Decodes a sample in tiles: less memory, and seams where tiles meet are possible."""
    offload: bool = False
    """Text encoders, VAE and the models of rewards wait on the CPU while others work: less memory
    of a GPU."""
    attention_backend: str | None = None
    """Of the denoisers, by diffusers' names (native, xformers, flash, sage, ...); default: what
    diffusers takes."""
    compile: bool = False
    """torch.compile of the denoisers' repeated blocks."""


class PromptsConfig(Section):
    train: str | None = None
    """File of training prompts: .txt (one a line), .jsonl or .csv (with a `prompt` column)."""
    test: str | None = None
    """File of held-out prompts."""


class RewardConfig(Section):
    reward: str
    """A built-in reward, `file.py:function` or `package.module:function`."""
    weight: float = 1.0
    params: dict[str, Any] = {}
    """Keyword arguments of the function."""
    name: str | None = None
    """In the log; by default the function's name, with its params where that is not unique."""


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
    kind: Literal["ode", "flow_sde", "cps", "dance_sde", "exact", "ddim"] = "flow_sde"
    noise_level: float = Field(default=0.7, ge=0)
    window: Annotated[Window, BeforeValidator(_window)] = Window()
    shared_noise: bool = False
    """All images of a group start from the same noise and differ by the window's noise only."""
    tape_on_cpu: bool = False
    """Rollouts wait on the CPU until they are trained on: less memory of a GPU."""
    call: dict[str, Any] = {}
    """The pipeline's own arguments, untouched: guidance_scale, height, width, ..."""

    @model_validator(mode="after")
    def _consistent(self) -> "SamplingConfig":
        if self.kind in ("cps", "ddim") and self.noise_level > 1:
            raise ConfigError(
                f"sampling.noise_level is {self.noise_level}, but must be at most 1 for "
                f"{self.kind}; 1 replaces all of the old noise."
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
        refuse_own_arguments("sampling.call", self.call)
        return self


Beta = Annotated[float, Field(ge=0, lt=1)]


class LoraSettings(Section):
    rank: int = Field(default=32, ge=1)
    alpha: int = Field(default=64, ge=1)
    targets: list[str] | None = Field(default=None, min_length=1)
    """Endings of module names; default: the attention projections."""
    start: str | None = None
    """Folder of a LoRA to go on training, of the same rank; it is the reference then."""


class TrainConfig(Section):
    epochs: int = Field(default=100, ge=0)
    lr: float = Field(default=3e-4, gt=0)
    updates_per_epoch: int = Field(default=2, ge=1)
    """Optimiser steps per epoch; the groups of an epoch are divided among them."""
    passes: int = Field(default=1, ge=1)
    """Times every image is trained on; the updates of an epoch are divided among the passes."""
    clip_range: tuple[float, float] = (1e-4, 1e-4)
    """How far the ratio may fall and rise; one number stands for both."""
    kl_weight: float = Field(default=0.0, ge=0)
    advantage: Literal["group", "batch", "none", "gdpo"] = "group"
    lora: LoraSettings | None = LoraSettings()
    """`null` trains all weights of the denoiser instead: float32, with a copy as the reference."""
    modules: list[str] | None = Field(default=None, min_length=1)
    """Denoisers to train where a pipeline has several, as transformer_2; default: all."""
    gradient_checkpointing: bool = False
    """Recomputes activations in the backward pass: less memory, one more forward."""
    shard: bool = False
    """Spreads the denoisers over all processes (FSDP2), for those that fit on no single GPU."""
    optimiser: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps its moments in 8 bits and needs bitsandbytes."""
    ema: float | None = Field(default=None, gt=0, lt=1)
    """Decay per optimiser step of the averaged adapter, which is then evaluated and saved."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)

    @property
    def replay_tolerance(self) -> float:
        """How far a replayed log-prob may be from its rollout's: a tenth of the clip range."""
        return min(self.clip_range) / 10

    @field_validator("clip_range", mode="before")
    @classmethod
    def _both_sides(cls, value: Any) -> Any:
        if isinstance(value, (int, float, str)):
            return (value, value)
        return value

    @field_validator("clip_range")
    @classmethod
    def _positive(cls, value: tuple[float, float]) -> tuple[float, float]:
        if min(value) <= 0 or value[0] >= 1:
            raise ConfigError(
                f"train.clip_range is {value}, but must be above 0 and below 1; try 1e-4."
            )
        return value


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
        refuse_own_arguments("evaluation.call", self.call or {})
        return self


Action = Literal["stop", "warn", "off"]


class GuardsConfig(Section):
    """What ends a run that goes wrong: `stop`, `warn` or `off` for each. Latents, rewards, losses
    and gradients that are not finite always stop it, before the optimiser moves."""

    constant_images: Action = "stop"
    """Every image of an epoch is of one colour."""
    dead_rewards: Action = "stop"
    """No group had two different rewards for `dead_epochs` epochs: nothing can be learnt."""
    dead_epochs: int = Field(default=5, ge=1)
    kl: Action = "stop"
    """The mean KL to the reference is above `max_kl`; measured where train.kl_weight is above 0."""
    max_kl: float | None = Field(default=None, gt=0)
    velocity: Action = "stop"
    """The velocity's root mean square is above `max_velocity_growth` times that of epoch 1."""
    max_velocity_growth: float | None = Field(default=None, gt=1)
    replay: Action = "stop"
    """Before an epoch's first update, a ratio is further from 1 than a tenth of the clip range."""
    rollbacks: int = Field(default=0, ge=0)
    """Times that a run goes back to its newest checkpoint, with a lower lr, instead of stopping."""
    rollback_lr: float = Field(default=0.5, gt=0, lt=1)
    """Factor of the learning rate at each rollback."""


OWN_ARGUMENTS = {
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


def refuse_silence(sampling: SamplingConfig) -> None:
    """Raises ConfigError where no step would be random."""
    if sampling.kind == "ode" or sampling.noise_level == 0:
        raise ConfigError(
            f"sampling.kind is {sampling.kind} with noise_level {sampling.noise_level}, but "
            "training needs random steps; use flow_sde with 0.7, say."
        )


def refuse_own_arguments(section: str, call: dict[str, Any]) -> None:
    for name in sorted(call.keys() & OWN_ARGUMENTS):
        raise ConfigError(f"{section}.{name} is set, but is the sampler's own; remove it.")


class GRPOConfig(Section):
    """A whole run. Field by field in the classes of its sections."""

    seed: int = 0
    output_dir: str = "runs/flowgrpo"
    """The run folder itself."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Epochs."""
    checkpoint_keep: int = Field(default=5, ge=1)
    """Newest checkpoints that are kept, and the best evaluated one beside them."""
    trackers: list[str] = []
    """Where metrics go beside metrics.jsonl: tensorboard, wandb, trackio, ..., where installed."""
    fps: float = Field(default=16, gt=0)
    """Frames a second of saved videos; where the pipeline's call has a frame_rate, that."""
    model: ModelConfig = ModelConfig()
    prompts: PromptsConfig = PromptsConfig()
    rewards: list[RewardConfig] = []
    held_out: list[RewardConfig] = []
    """Scored at evaluation only; the first is the run's headline."""
    sampling: SamplingConfig = SamplingConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    guards: GuardsConfig = GuardsConfig()

    @property
    def sampling_call(self) -> dict[str, Any]:
        """The pipeline's arguments when sampling."""
        return {**self.sampling.call, "num_inference_steps": self.sampling.num_inference_steps}

    @property
    def evaluation_call(self) -> dict[str, Any]:
        """The pipeline's arguments at evaluation; where not set, those of sampling."""
        call = self.sampling.call if self.evaluation.call is None else self.evaluation.call
        steps = self.evaluation.num_inference_steps or self.sampling.num_inference_steps
        return {**call, "num_inference_steps": steps}

    @model_validator(mode="before")
    @classmethod
    def _lone_reward(cls, data: Any) -> Any:
        """`reward: ocr` stands for a list of one; a bare name stands for its mapping."""
        if isinstance(data, dict):
            data = dict(data)
            if "reward" in data:
                if data.get("rewards"):
                    raise ConfigError(
                        "reward and rewards are both set, but one of them is meant; keep rewards."
                    )
                data["rewards"] = data.pop("reward")
            for key in ("rewards", "held_out"):
                if isinstance(data.get(key), (str, dict)):
                    data[key] = [data[key]]
                if isinstance(data.get(key), list):
                    data[key] = [{"reward": r} if isinstance(r, str) else r for r in data[key]]
        return data

    @model_validator(mode="after")
    def _sharded(self) -> "GRPOConfig":
        if self.train.shard and self.model.compile:
            raise ConfigError(
                "model.compile is true with train.shard, but blocks are compiled whole; leave one "
                "of them out."
            )
        return self

    @model_validator(mode="after")
    def _measured(self) -> "GRPOConfig":
        if self.guards.max_kl is not None and self.train.kl_weight == 0:
            raise ConfigError(
                f"guards.max_kl is {self.guards.max_kl:g}, but KL is only measured with a "
                "train.kl_weight above 0; set it, to 1e-6 say, or leave the bound out."
            )
        return self

    @model_validator(mode="after")
    def _divisible(self) -> "GRPOConfig":
        train, groups = self.train, self.sampling.groups_per_epoch
        if train.updates_per_epoch % train.passes:
            raise ConfigError(
                f"train.updates_per_epoch is {train.updates_per_epoch}, but must be a multiple "
                f"of the {train.passes} passes; use "
                f"{train.passes * max(1, train.updates_per_epoch // train.passes)}."
            )
        per_pass = train.updates_per_epoch // train.passes
        if groups % per_pass:
            below = groups - groups % per_pass
            nearest = " or ".join(str(n) for n in (below, below + per_pass) if n)
            raise ConfigError(
                f"sampling.groups_per_epoch is {groups}, but must be a multiple of the "
                f"{per_pass} updates per pass; "
                f"use {nearest}."
            )
        return self
