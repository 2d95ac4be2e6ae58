"""The kernel that denoisers compute attention with, by diffusers' names, where it can train."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    attention_backend,
    dispatch_attention_fn,
)

from flowgrpo.core.errors import ConfigError, did_you_mean

NAMES = [backend.value for backend in AttentionBackendName]


PACKAGES = {
    "_hub": "kernels",
    "flash": "flash-attn",
    "sage": "sageattention",
    "xformers": "xformers",
    "npu": "torch_npu",
    "xla": "torch_xla",
}
"""What a backend needs, by a part of its name, the first that fits."""


def set_attention_backend(
    denoisers: Mapping[str, Any], backend: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Lets the denoisers compute attention with a backend of diffusers.

    Raises:
        ConfigError: the backend is unknown, lacks its package, does not work on the device in the
            dtype, or has no gradients; or a denoiser does not heed it.
    """
    if backend not in NAMES:
        hint = f"{did_you_mean(backend, NAMES)} Usable here: {_usable(device, dtype)}."
        raise ConfigError(f"model.attention_backend is {backend}, but is unknown; {hint.lstrip()}")
    for name, denoiser in denoisers.items():
        if not _heeds(denoiser):
            raise ConfigError(
                f"model.attention_backend is {backend}, but the attention of {name} "
                f"({type(denoiser).__name__}) does not heed it; leave it out."
            )
    if reason := _failure(backend, device, dtype):
        raise ConfigError(
            f"model.attention_backend is {backend}, but cannot train on {device.type} in {dtype} "
            f"({reason}); {_install(backend)}use one of {_usable(device, dtype)}."
        )
    for denoiser in denoisers.values():
        # Diffusers also sets it for every model of the process; the block takes that back.
        with attention_backend(AttentionBackendName(backend)):
            denoiser.set_attention_backend(backend)


def _failure(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Why attention over itself of (1 sample, 16 tokens, 2 heads, 64 channels) does not work with
    gradients; "" where it does."""
    tokens = torch.ones(1, 16, 2, 64, device=device, dtype=dtype, requires_grad=True)
    try:
        # Not left to the caller's mode: gradients are what is asked for.
        with torch.enable_grad(), attention_backend(AttentionBackendName(backend)):
            output = dispatch_attention_fn(tokens, tokens, tokens)
            if not output.requires_grad:
                return "it has no gradients"
            output.sum().backward()
    except Exception as error:  # kernels of many packages raise what they like
        return f"{type(error).__name__}: {error}".strip().splitlines()[0].rstrip(".")
    return ""


def _usable(device: torch.device, dtype: torch.dtype) -> str:
    """The backends that work here; those of the hub would have to be downloaded first."""
    names = [name for name in NAMES if not name.endswith("_hub")]
    return ", ".join(name for name in names if not _failure(name, device, dtype))


def _install(backend: str) -> str:
    package = next((package for part, package in PACKAGES.items() if part in backend), None)
    native = backend.startswith(("native", "_native")) and package not in ("torch_npu", "torch_xla")
    return "" if package is None or native else f"pip install {package}, or "


def _heeds(denoiser: Any) -> bool:
    processors = (getattr(part, "processor", None) for part in denoiser.modules())
    return any(hasattr(processor, "_attention_backend") for processor in processors)
