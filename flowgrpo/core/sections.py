"""Config sections that name things: the model, prompts and rewards."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


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
