"""Selects the kernel with which denoisers compute attention, by its name in diffusers."""

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
"""Names of all backends of diffusers."""

PACKAGES = {
    "_hub": "kernels",
    "flash": "flash-attn",
    "sage": "sageattention",
    "xformers": "xformers",
    "npu": "torch_npu",
    "xla": "torch_xla",
}
"""Package that a backend needs, by a part of the backend's name; the first match counts."""


def set_attention_backend(
    denoisers: Mapping[str, Any], backend: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Makes the denoisers compute attention with a backend of diffusers.

    Raises:
        ConfigError: the backend is unknown, lacks its package, does not work on the device in the
            dtype, or has no gradients; or a denoiser's attention has no selectable backend.
    """
    if backend not in NAMES:
        hint = f"{did_you_mean(backend, NAMES)} Usable here: {_usable(device, dtype)}."
        raise ConfigError(f"model.attention_backend is {backend}, but is unknown; {hint.lstrip()}")
    for name, denoiser in denoisers.items():
        if not _has_selectable_backend(denoiser):
            raise ConfigError(
                f"model.attention_backend is {backend}, but the attention of {name} "
                f"({type(denoiser).__name__}) has no selectable backend; leave it out."
            )
    if reason := _failure(backend, device, dtype):
        raise ConfigError(
            f"model.attention_backend is {backend}, but cannot train on {device.type} in {dtype} "
            f"({reason}); {_install_hint(backend)}use one of {_usable(device, dtype)}."
        )
    for denoiser in denoisers.values():
        # Diffusers also sets the backend for every other model of the process; the context manager
        # undoes that.
        with attention_backend(AttentionBackendName(backend)):
            denoiser.set_attention_backend(backend)


def _failure(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Returns why self-attention with gradients fails with a backend; "" if it works."""
    # (1 sample, 16 tokens, 2 heads, 64 channels)
    tokens = torch.ones(1, 16, 2, 64, device=device, dtype=dtype, requires_grad=True)
    try:
        # Explicit, because gradients are what is tested, and the caller may run under no_grad.
        with torch.enable_grad(), attention_backend(AttentionBackendName(backend)):
            output = dispatch_attention_fn(tokens, tokens, tokens)
            if not output.requires_grad:
                return "it has no gradients"
            output.sum().backward()
    except Exception as error:  # kernels of many packages, each with its own exceptions
        return f"{type(error).__name__}: {error}".strip().splitlines()[0].rstrip(".")
    return ""


def _usable(device: torch.device, dtype: torch.dtype) -> str:
    """Returns the names of the backends that can train here, except those of the hub, which would
    have to be downloaded first."""
    names = [name for name in NAMES if not name.endswith("_hub")]
    return ", ".join(name for name in names if not _failure(name, device, dtype))


def _install_hint(backend: str) -> str:
    """Returns the command that installs a backend's package, if it needs one."""
    package = next((package for part, package in PACKAGES.items() if part in backend), None)
    # `native_flash` and the like are torch's own, except on these devices.
    native = backend.startswith(("native", "_native")) and package not in ("torch_npu", "torch_xla")
    return "" if package is None or native else f"pip install {package}, or "


def _has_selectable_backend(denoiser: Any) -> bool:
    processors = (getattr(module, "processor", None) for module in denoiser.modules())
    return any(hasattr(processor, "_attention_backend") for processor in processors)
