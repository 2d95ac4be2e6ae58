"""Stock diffusers pipelines from outside: open one, find its parts, check a call's arguments."""

import difflib
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from flowgrpo.config import ConfigError
from flowgrpo.tape import swapped


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


def modules_of(pipe: Any) -> dict[str, nn.Module]:
    """Every module a pipeline holds, optional ones too."""
    return {name: part for name, part in vars(pipe).items() if isinstance(part, nn.Module)}


def find_denoisers(pipe: Any) -> dict[str, nn.Module]:
    """The modules that predict in the loop: diffusers models that its LoRA loader knows."""
    loadable = getattr(pipe, "_lora_loadable_modules", [])
    found: dict[str, nn.Module] = {
        name: module
        for name, module in modules_of(pipe).items()
        if name in loadable and isinstance(module, ModelMixin)
    }
    if not found:
        raise ValueError(
            f"{type(pipe).__name__} has no denoiser that takes a LoRA; use a pipeline with "
            "load_lora_weights."
        )
    return found


def check_call(pipe: Any, section: str, call: dict[str, Any]) -> None:
    """Refuses arguments that the pipeline's call does not take.

    Raises:
        ConfigError: names the argument and the nearest one.
    """
    known = [name for name in inspect.signature(type(pipe).__call__).parameters if name != "self"]
    for name in call.keys() - set(known):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f' did you mean "{close[0]}"?' if close else f" It takes {', '.join(known)}."
        raise ConfigError(f"{section}.{name} is no argument of {type(pipe).__name__};{hint}")


@contextmanager
def quiet(pipe: Any) -> Iterator[None]:
    """No progress bar of the pipeline's own."""
    with swapped(pipe, "_progress_bar_config", {"disable": True}):
        yield
