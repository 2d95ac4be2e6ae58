"""The parts of a pipeline: its modules, models and denoisers."""

from collections.abc import Sequence
from typing import Any

from diffusers import DiffusionPipeline
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from flowgrpo.core.errors import ConfigError

DENOISER_NAMES = ("transformer", "unet")
"""Beginnings of the names of denoisers in diffusers pipelines; transformer_2 is one, too."""


def modules_of(pipe: Any) -> dict[str, nn.Module]:
    """Returns every module of a pipeline by name, including optional ones and sub-pipelines'."""
    found: dict[str, nn.Module] = {}
    for name, part in vars(pipe).items():
        if isinstance(part, nn.Module):
            found[name] = part
        elif isinstance(part, DiffusionPipeline):
            found |= {f"{name}.{inner}": module for inner, module in modules_of(part).items()}
    return found


def find_models(pipe: Any) -> dict[str, nn.Module]:
    """Returns the diffusers models that may run in the loop: all but those that can decode."""
    return {
        name: module
        for name, module in modules_of(pipe).items()
        if isinstance(module, ModelMixin) and not hasattr(module, "decode")
    }


def find_denoisers(pipe: Any, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Returns the models that can be trained, by name: those with a denoiser's name in diffusers
    that are known to the pipeline's LoRA loader, if it has one.

    Args:
        names: the denoisers to return; default: all.

    Raises:
        ValueError: the pipeline has no denoiser.
        ConfigError: it has no denoiser of one of these names.
    """
    models = find_models(pipe)
    loadable = [name for name in getattr(pipe, "_lora_loadable_modules", []) if name in models]
    by_name = [name for name in models if name.startswith(DENOISER_NAMES)]
    found = {name: models[name] for name in by_name if name in loadable or not loadable}
    if not found:
        raise ValueError(
            f"{type(pipe).__name__} has no denoiser of diffusers' model classes; use a pipeline "
            "with a transformer or a unet."
        )
    for name in names or []:
        if name not in found:
            raise ConfigError(
                f"train.modules names {name}, but the denoisers of {type(pipe).__name__} are "
                f"{', '.join(found)}."
            )
    return {name: module for name, module in found.items() if names is None or name in names}
