"""Config sections of the model, the prompts and the rewards, and the base class of all sections."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of all config sections: immutable, refuses unknown keys and non-finite numbers.

    The string below a field is its description, which configs/README.md is generated from.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class ModelConfig(Section):
    """The pipeline, and how it uses memory and time."""

    path: str | None = None
    """Folder or Hugging Face Hub name of the pipeline. Required, unless a pipeline is passed in
    Python."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the frozen weights; trained weights are always float32. `bfloat16` is for CPUs
    and for GPUs from Ampere on; `float16` is for older GPUs, scales the loss, and may overflow with
    models that were trained in bfloat16."""
    device: str = "auto"
    """Device of the pipeline, for example `cuda`, `cuda:1` or `cpu`; `auto` takes the GPU if there
    is one."""
    scheduler: str | None = None
    """Class name of a diffusers scheduler that replaces the pipeline's own, for example
    `DDIMScheduler`. By default the pipeline's own is used."""
    scheduler_kwargs: dict[str, Any] = {}
    """Changes to the scheduler's configuration, for example `{shift: 3}`."""
    vae_slicing: bool = False
    """Decodes one image or video at a time, which takes less memory."""
    vae_tiling: bool = False
    """Decodes each image or video in tiles, which takes less memory; seams may show where tiles
    meet."""
    offload: bool = False
    """Keeps text encoders, the VAE and the rewards' models on the CPU while they are not in use,
    which takes less GPU memory. Needs a GPU."""
    attention_backend: str | None = None
    """Attention kernel of the denoisers by its name in diffusers: `native`, `xformers`, `flash`,
    `sage`, ... By default diffusers chooses. A backend without gradients is refused."""
    compile: bool = False
    """Compiles the repeated blocks of the denoisers with `torch.compile`, which saves time. Cannot
    be combined with `train.shard`."""


class PromptsConfig(Section):
    """Where prompts come from: files or data sets.

    A file is .txt (one prompt per line), .jsonl or .csv (with a `prompt` column). A data set is the
    Hub name (`owner/name`), the folder or the .parquet file of a data set of the `datasets`
    library, followed by `:split` if it has several splits. Other columns are passed to the rewards,
    and to the pipeline if its call has an argument of that name (`negative_prompt`, `image`, ...).
    Images and videos are given as paths relative to the file.
    """

    train: str | None = None
    """File or data set of the training prompts. Required, unless prompts are passed in Python."""
    test: str | None = None
    """File or data set of the test prompts, which are evaluated but never trained on. By default
    there are none."""


class RewardConfig(Section):
    """One reward. A name alone, such as `ocr`, stands for `{reward: ocr}`."""

    reward: str
    """Name of a built-in reward, `file.py:function` or `package.module:function`."""
    weight: float = 1.0
    """Factor of the reward in the weighted sum of all rewards; a negative one makes it a
    penalty. Without effect on held-out rewards."""
    params: dict[str, Any] = {}
    """Keyword arguments of the reward function."""
    name: str | None = None
    """Unique name in logs and scores. By default the function's name, followed by its `params` in
    parentheses if there are any."""
