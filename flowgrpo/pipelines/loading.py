"""Opens a stock diffusers pipeline as a config describes it."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from torch import nn

from flowgrpo.core.devices import CPU, to_device
from flowgrpo.core.errors import ConfigError, did_you_mean
from flowgrpo.core.sections import ModelConfig
from flowgrpo.pipelines.attention import set_attention_backend
from flowgrpo.pipelines.offload import offload
from flowgrpo.pipelines.parts import find_denoisers, find_models, modules_of


def open_pipeline(config: ModelConfig, *, shard: bool = False) -> Any:
    """Opens the pipeline of a config, with its scheduler, attention backend and VAE options set,
    and its parts on the devices that the config describes.

    Args:
        shard: whether denoisers stay on the CPU, because `fsdp.shard` will distribute them.

    Raises:
        ConfigError: there is no path, or a setting does not work with the pipeline or here.
        ValueError: the folder is missing or does not hold a diffusers pipeline.
    """
    if config.path is None:
        raise ConfigError("model.path is missing; name a pipeline folder or a hub name.")
    device, dtype = device_of(config), getattr(torch, config.dtype)
    pipe = load_pipeline(config.path, dtype, CPU if config.offload or shard else device)
    kept = find_denoisers(pipe).values() if shard else ()
    if config.offload:
        offload_parts(pipe, device, kept)
    elif shard:
        for module in modules_of(pipe).values():
            if module not in kept:
                module.to(device)
    if config.attention_backend:
        set_attention_backend(find_denoisers(pipe), config.attention_backend, device, dtype)
    if config.scheduler or config.scheduler_kwargs:
        pipe.scheduler = configured_scheduler(pipe, config)
    if config.vae_slicing:
        _enable_vae_option(pipe, "slicing")
    if config.vae_tiling:
        _enable_vae_option(pipe, "tiling")
    return pipe


def device_of(config: ModelConfig) -> torch.device:
    """Returns the device that the pipeline runs on; `auto` is a GPU if there is one.

    Raises:
        ConfigError: offloading is on, but the pipeline runs on the CPU.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if config.offload and device == CPU:
        raise ConfigError(
            "model.offload is true, but the pipeline runs on the CPU, where there is nothing to "
            "move off; leave it out."
        )
    return device


def offload_parts(pipe: Any, device: str | torch.device, kept: Collection[nn.Module] = ()) -> None:
    """Moves the models of the loop to the device, and offloads encoders and decoders to the CPU
    except while they run.

    Args:
        kept: models of the loop that stay where they are.
    """
    models = find_models(pipe).values()
    for model in models:
        if model not in kept:
            to_device(model, torch.device(device))
    # A part may be held under several names, and must be offloaded once.
    others = dict.fromkeys(part for part in modules_of(pipe).values() if part not in models)
    offload(pipe, others, models, torch.device(device))


def load_pipeline(path: str, dtype: torch.dtype, device: str | torch.device) -> Any:
    """Opens a pipeline from a folder or a hub name; parts that it was saved without stay None.

    Raises:
        ValueError: the folder is missing or does not hold a diffusers pipeline.
    """
    path = str(Path(path).expanduser()) if path.startswith("~") else path
    folder = Path(path)
    # A hub name is owner/name. Anything else is a path, and so is a name in an existing folder.
    is_path = path.startswith((".", "/")) or len(folder.parts) != 2 or folder.parent.is_dir()
    if is_path and not (folder / DiffusionPipeline.config_name).is_file():
        state = "that folder is no pipeline" if folder.exists() else "there is no such folder"
        raise ValueError(
            f'model.path is "{path}", but {state}; give a folder written by a pipeline\'s '
            "save_pretrained, or a hub name."
        )
    try:
        absent = dict.fromkeys(absent_parts(path))
        pipe: Any = DiffusionPipeline.from_pretrained(path, dtype=dtype, **absent)
    except Exception as error:  # the loaders of three libraries, each with its own exceptions
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise ValueError(
            f'model.path is "{path}", but it cannot be opened ({reason}); '
            "give a complete pipeline folder, or check the hub name and your access."
        ) from error
    return pipe.to(device)


def absent_parts(path: str) -> list[str]:
    """Returns the names of the parts that a pipeline folder was saved without.

    `from_pretrained` refuses such a folder unless these are passed as None.
    """
    index = Path(path) / DiffusionPipeline.config_name
    if not index.is_file():
        return []
    return [name for name, value in json.loads(index.read_text()).items() if value == [None, None]]


def configured_scheduler(pipe: Any, config: ModelConfig) -> Any:
    """Returns a new scheduler with the configuration of the pipeline's, changed as the config says:
    its class to `model.scheduler`, and its arguments by `model.scheduler_kwargs`.

    Raises:
        ConfigError: diffusers has no scheduler of that name.
    """
    cls: Any = type(pipe.scheduler)
    if config.scheduler:
        cls = getattr(diffusers, config.scheduler, None)
        if not hasattr(cls, "set_timesteps"):
            known = [name for name in dir(diffusers) if name.endswith("Scheduler")]
            hint = did_you_mean(config.scheduler, known, "use DDIMScheduler, for example.")
            raise ConfigError(f"model.scheduler is {config.scheduler}, but is unknown; {hint}")
    return cls.from_config(pipe.scheduler.config, **config.scheduler_kwargs)


def _enable_vae_option(pipe: Any, option: str) -> None:
    """Turns on `slicing` or `tiling` of the VAE."""
    vae = getattr(pipe, "vae", None)
    method = f"enable_{option}"
    if not hasattr(vae, method):
        raise ConfigError(
            f"model.vae_{option} is true, but the pipeline's VAE ({type(vae).__name__}) has no "
            f"{method}; leave it out."
        )
    getattr(vae, method)()
