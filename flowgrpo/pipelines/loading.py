"""Stock diffusers pipelines from outside: open one, find its parts."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from torch import nn

from flowgrpo.core.devices import CPU, wake
from flowgrpo.core.errors import ConfigError, did_you_mean
from flowgrpo.core.sections import ModelConfig
from flowgrpo.pipelines.attention import set_attention_backend
from flowgrpo.pipelines.offload import offload
from flowgrpo.pipelines.parts import find_denoisers, find_models, modules_of


def open_pipeline(config: ModelConfig, *, shard: bool = False) -> Any:
    """Opens the pipeline of a config, with the scheduler, the VAE, the attention and the places of
    its parts as the config wants them.

    Args:
        shard: denoisers stay on the CPU, for `fsdp.shard` to spread them over GPUs.

    Raises:
        ConfigError: there is no path, or a setting that does not work with the pipeline or here.
        ValueError: the folder is missing or does not hold a diffusers pipeline.
    """
    if config.path is None:
        raise ConfigError("model.path is missing; name a pipeline folder or a hub name.")
    device, dtype = device_of(config), getattr(torch, config.dtype)
    pipe = load_pipeline(config.path, dtype, CPU if config.offload or shard else device)
    kept = find_denoisers(pipe).values() if shard else ()
    if config.offload:
        place_parts(pipe, device, kept)
    elif shard:
        for module in modules_of(pipe).values():
            if not any(module is denoiser for denoiser in kept):
                module.to(device)
    if config.attention_backend:
        set_attention_backend(find_denoisers(pipe), config.attention_backend, device, dtype)
    if config.scheduler or config.scheduler_kwargs:
        pipe.scheduler = configured_scheduler(pipe, config)
    vae = getattr(pipe, "vae", None)
    for flag, method in (
        (config.vae_slicing, "enable_slicing"),
        (config.vae_tiling, "enable_tiling"),
    ):
        if flag:
            if not hasattr(vae, method):
                raise ConfigError(
                    f"model.vae_{method.removeprefix('enable_')} is true, but the pipeline's VAE "
                    f"({type(vae).__name__}) has no {method}; leave it out."
                )
            getattr(vae, method)()
    return pipe


def device_of(config: ModelConfig) -> torch.device:
    """The device that a config means.

    Raises:
        ConfigError: the CPU cannot do what the config asks for.
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


def place_parts(pipe: Any, device: str | torch.device, kept: Iterable[nn.Module] = ()) -> None:
    """Encoders and decoders wait on the CPU from now on, and are on the device while they work;
    the models of the loop stay there, but for those `kept` where they are."""
    models = find_models(pipe)
    workers = {id(model) for model in models.values()}
    for model in models.values():
        if not any(model is other for other in kept):
            wake(model, torch.device(device))
    others = {id(part): part for part in modules_of(pipe).values() if id(part) not in workers}
    offload(pipe, others.values(), models.values(), torch.device(device))


def load_pipeline(path: str, dtype: torch.dtype, device: str | torch.device) -> Any:
    """Opens a pipeline from a folder or a hub name; parts that it was saved without stay away.

    Raises:
        ValueError: the folder is missing or does not hold a diffusers pipeline.
    """
    path = str(Path(path).expanduser()) if path.startswith("~") else path
    folder = Path(path)
    # A hub name is owner/name; anything else, and what lies in a folder that exists, is a path.
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
    except Exception as error:  # the loaders of three libraries raise what they like
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise ValueError(
            f'model.path is "{path}", but it cannot be opened ({reason}); '
            "give a whole pipeline folder, or check the hub name and your access."
        ) from error
    return pipe.to(device)


def absent_parts(path: str) -> list[str]:
    """Parts that a pipeline folder was saved without; `from_pretrained` wants to be told."""
    index = Path(path) / DiffusionPipeline.config_name
    if not index.is_file():
        return []
    return [name for name, value in json.loads(index.read_text()).items() if value == [None, None]]


def configured_scheduler(pipe: Any, config: ModelConfig) -> Any:
    """The pipeline's scheduler, or one of the class that the config names, by its configuration."""
    cls: Any = type(pipe.scheduler)
    if config.scheduler:
        cls = getattr(diffusers, config.scheduler, None)
        if not hasattr(cls, "set_timesteps"):
            known = [name for name in dir(diffusers) if name.endswith("Scheduler")]
            hint = did_you_mean(config.scheduler, known, "use DDIMScheduler, say.")
            raise ConfigError(f"model.scheduler is {config.scheduler}, but is unknown; {hint}")
    return cls.from_config(pipe.scheduler.config, **config.scheduler_kwargs)
