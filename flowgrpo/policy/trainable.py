"""Makes the denoisers of a pipeline trainable: a new LoRA, an existing one, or all weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowgrpo.core.errors import ConfigError
from flowgrpo.core.train_config import LoraSettings, TrainConfig
from flowgrpo.pipelines.lora import ADAPTER, add_lora, train_in_float32
from flowgrpo.pipelines.lora_files import load_lora
from flowgrpo.pipelines.parts import find_denoisers


def make_trainable(
    pipe: Any, denoisers: Mapping[str, Any], train: TrainConfig, lora_seed: int
) -> None:
    """Makes the weights that `train` selects trainable; expects the whole pipeline to be frozen.

    Args:
        denoisers: the modules to train, by name.
        lora_seed: seed of a new LoRA's initial weights.

    Raises:
        ConfigError: the weights have the wrong dtype, the LoRA to start from does not fit, or a
            denoiser has no gradient checkpointing.
        ValueError: no layer matches `train.lora.targets`.
    """
    if train.lora is None:
        _train_all_weights(denoisers)
    elif train.lora.start is not None:
        _load_start(pipe, denoisers, Path(train.lora.start).expanduser(), train.lora)
    else:
        for module in denoisers.values():
            add_lora(
                module,
                rank=train.lora.rank,
                alpha=train.lora.alpha,
                targets=train.lora.targets,
                seed=lora_seed,
            )
    for module in denoisers.values():
        _enable_gradients_in_eval(module)
    if train.gradient_checkpointing:
        _enable_gradient_checkpointing(denoisers)


def _train_all_weights(denoisers: Mapping[str, Any]) -> None:
    weights = (p for denoiser in denoisers.values() for p in denoiser.parameters())
    if others := {p.dtype for p in weights} - {torch.float32}:
        raise ConfigError(
            f"train.lora is null and weights are in {others.pop()}, but all weights are trained "
            "in float32; set model.dtype to float32, or train a LoRA."
        )
    for module in denoisers.values():
        module.requires_grad_(True)


def _load_start(pipe: Any, denoisers: Mapping[str, Any], folder: Path, lora: LoraSettings) -> None:
    """Loads the LoRA in `folder`, from which training continues."""
    loaded = load_lora(pipe, folder)
    for module in find_denoisers(pipe).values():
        module.requires_grad_(False)
    if others := set(loaded) - {*denoisers}:
        raise ConfigError(
            f"train.lora.start is {folder}, which has weights for {', '.join(sorted(others))}, but "
            f"only {', '.join(denoisers)} is trained; remove the others from the file."
        )
    for name, module in denoisers.items():
        config = getattr(module, "peft_config", {}).get(ADAPTER)
        if config is None:
            raise ConfigError(
                f"train.lora.start is {folder}, but has no weights for {name}, only for "
                f"{', '.join(loaded) or 'none'}; choose another folder."
            )
        if (config.r, config.lora_alpha) != (lora.rank, lora.alpha):
            raise ConfigError(
                f"train.lora has rank {lora.rank} and alpha {lora.alpha}, but {folder} has "
                f"rank {config.r} and alpha {config.lora_alpha}; set these."
            )
        train_in_float32(module)


def _enable_gradients_in_eval(module: nn.Module) -> None:
    """Puts those submodules in training mode whose evaluation mode lets no gradient through.

    Some, such as routed experts, call a faster method under `no_grad` in evaluation mode: values
    are correct, but gradients silently wrong. `check` proves that the values stay the same.
    """
    for part in module.modules():
        # Recognised by their code, not by a list of classes: the forward reads `self.training`, and
        # the class has a method under no_grad.
        forward = getattr(type(part).forward, "__code__", None)
        branches = forward is not None and "training" in forward.co_names
        methods = [m for cls in type(part).__mro__ for n, m in vars(cls).items() if n != "forward"]
        if branches and any(map(_is_without_gradients, methods)):
            part.training = True


def _is_without_gradients(method: Any) -> bool:
    """Whether a function is decorated with `torch.no_grad` or `torch.inference_mode`."""
    home = getattr(method, "__globals__", {}).get("__name__")
    return home == "torch.utils._contextlib" and hasattr(method, "__wrapped__")


def _enable_gradient_checkpointing(denoisers: Mapping[str, Any]) -> None:
    for name, denoiser in denoisers.items():
        if not getattr(denoiser, "_supports_gradient_checkpointing", False):
            raise ConfigError(
                f"train.gradient_checkpointing is true, but {name} ({type(denoiser).__name__}) "
                "does not support it; leave it out."
            )
        denoiser.enable_gradient_checkpointing()
