"""Config sections for training: what is optimized, how, and what stops a run."""

from typing import Annotated, Literal

from pydantic import Field

from flowgrpo.core.sections import Section

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
    """Optimizer steps per epoch; the groups of an epoch are divided among them."""
    inner_epochs: int = Field(default=1, ge=1)
    """Times every image is trained on; the updates of an epoch are divided among these inner
    epochs."""
    advantage: Literal["group", "batch", "none", "gdpo"] = "group"
    lora: LoraSettings | None = LoraSettings()
    """`null` trains all weights of the denoiser instead: float32, with a copy as the reference."""
    modules: list[str] | None = Field(default=None, min_length=1)
    """Denoisers to train where a pipeline has several, as transformer_2; default: all."""
    gradient_checkpointing: bool = False
    """Recomputes activations in the backward pass: less memory, one more forward."""
    shard: bool = False
    """Spreads the denoisers over all processes (FSDP2), for those that fit on no single GPU."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps its moments in 8 bits and needs bitsandbytes."""
    ema: float | None = Field(default=None, gt=0, lt=1)
    """Decay per optimizer step of the averaged adapter, which is then evaluated and saved."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)


Action = Literal["stop", "warn", "off"]


class GuardsConfig(Section):
    """What ends a run that goes wrong: `stop`, `warn` or `off` for each. Latents, rewards, losses
    and gradients that are not finite always stop it, before the optimizer moves."""

    constant_images: Action = "stop"
    """Every image of an epoch is of one colour."""
    dead_rewards: Action = "stop"
    """No group had two different rewards for `dead_epochs` epochs: nothing can be learnt."""
    dead_epochs: int = Field(default=5, ge=1)
    kl: Action = "stop"
    """The mean KL to the reference is above `max_kl`; needs an objective.kl_weight above 0."""
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
