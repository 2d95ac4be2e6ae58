"""The parts of a pipeline: its modules, models and denoisers."""

from collections.abc import Sequence
from typing import Any

from diffusers import DiffusionPipeline
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from flowgrpo.core.errors import ConfigError

DENOISER_NAMES = ("transformer", "unet")
"""How the parts of a diffusers pipeline that denoise are called: these, or transformer_2, say."""


def modules_of(pipe: Any) -> dict[str, nn.Module]:
    """Every module a pipeline holds, optional ones and those of its sub-pipelines too."""
    found: dict[str, nn.Module] = {}
    for name, part in vars(pipe).items():
        if isinstance(part, nn.Module):
            found[name] = part
        elif isinstance(part, DiffusionPipeline):
            found |= {f"{name}.{inner}": module for inner, module in modules_of(part).items()}
    return found


def find_models(pipe: Any) -> dict[str, nn.Module]:
    """Diffusers models that may predict in the loop: all but those that only encode and decode."""
    return {
        name: module
        for name, module in modules_of(pipe).items()
        if isinstance(module, ModelMixin) and not hasattr(module, "decode")
    }


def find_denoisers(pipe: Any, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The models that can be trained: those with diffusers' names for a denoiser, and where the
    pipeline has a LoRA loader, known to it.

    Args:
        names: only these.

    Raises:
        ValueError: there is none, or not one of such a name.
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
