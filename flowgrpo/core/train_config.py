"""Config sections of training: what is optimized, how, and what stops a run."""

from typing import Annotated, Literal

from pydantic import Field

from flowgrpo.core.sections import Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class LoraSettings(Section):
    """The LoRA that is trained, in float32."""

    rank: int = Field(default=32, ge=1)
    """Rank of the LoRA's matrices."""
    alpha: int = Field(default=64, ge=1)
    """Scale of the LoRA: its output is multiplied by alpha / rank."""
    targets: list[str] | None = Field(default=None, min_length=1)
    """Name endings of the linear layers that get a LoRA, for example `[to_q, to_v]`. By default the
    attention projections."""
    start: str | None = None
    """Folder of an existing LoRA of the same rank and alpha to continue from; it is then the
    reference. By default a new one is made."""


class TrainConfig(Section):
    """What is trained, and how."""

    epochs: int = Field(default=100, ge=0)
    """Number of epochs; one epoch samples `sampling.groups_per_epoch` groups and trains on them."""
    lr: float = Field(default=3e-4, gt=0)
    """Learning rate, constant over the run."""
    updates_per_epoch: int = Field(default=2, ge=1)
    """Number of optimizer steps per epoch; the groups of an epoch are divided among them."""
    inner_epochs: int = Field(default=1, ge=1)
    """Number of times that each image is trained on; `updates_per_epoch` counts the optimizer steps
    of all inner epochs and must be a multiple of it."""
    advantage: Literal["group", "batch", "none", "gdpo"] = "group"
    """How the deviation of a reward from its group's mean is normalised: by the group's standard
    deviation (`group`, GRPO), by the root mean square of all deviations of the epoch (`batch`), or
    not at all (`none`, Dr. GRPO). `gdpo` normalises each reward on its own before they are summed,
    so that rewards of different scales count alike (arXiv 2601.05242)."""
    lora: LoraSettings | None = LoraSettings()
    """The LoRA to train. `null` trains all weights of the denoiser instead, which needs
    `model.dtype: float32` and keeps a copy of them as the reference."""
    modules: list[str] | None = Field(default=None, min_length=1)
    """Names of the denoisers to train if the pipeline has several, for example `[transformer_2]`.
    By default all."""
    gradient_checkpointing: bool = False
    """Recomputes activations in the backward pass, which takes less memory and one more forward
    pass."""
    shard: bool = False
    """Shards the denoisers over all processes (FSDP2), for models that do not fit on one GPU."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps its moments in 8 bits, a quarter of the memory; it needs bitsandbytes and
    cannot be combined with `shard`."""
    ema: float | None = Field(default=None, gt=0, lt=1)
    """Decay, per optimizer step, of an exponential moving average of the trained weights, which is
    then what is evaluated and saved. By default there is no average."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Norm to which larger gradients are clipped."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""


Action = Literal["stop", "warn", "off"]


class GuardsConfig(Section):
    """What ends a run that goes wrong. Each guard stops the run (`stop`), prints a warning (`warn`)
    or does nothing (`off`). Latents, rewards, losses and gradients that are not finite always stop
    a run, before the weights are updated."""

    constant_images: Action = "stop"
    """Every image of an epoch has a single colour."""
    dead_rewards: Action = "stop"
    """In each group of the last `dead_epochs` epochs all rewards were equal, so that there is
    nothing to learn from."""
    dead_epochs: int = Field(default=5, ge=1)
    """Number of epochs in a row after which `dead_rewards` acts."""
    kl: Action = "stop"
    """The mean KL divergence to the reference is above `max_kl`."""
    max_kl: float | None = Field(default=None, gt=0)
    """Bound of `kl`; needs `objective.kl_weight` above 0, without which no KL is measured. By
    default there is no bound."""
    velocity: Action = "stop"
    """The root mean square of the predicted velocity is above `max_velocity_growth` times that of
    epoch 1."""
    max_velocity_growth: float | None = Field(default=None, gt=1)
    """Bound of `velocity`, as a factor. By default there is no bound."""
    replay: Action = "stop"
    """Before the first update of an epoch, the likelihood ratio of a replayed step deviates from 1
    by more than a tenth of `objective.clip_range`."""
    rollbacks: int = Field(default=0, ge=0)
    """Number of times that a run, instead of stopping, goes back to an earlier checkpoint and
    continues with a lower learning rate."""
    rollback_lr: float = Field(default=0.5, gt=0, lt=1)
    """Factor of the learning rate at each rollback."""
