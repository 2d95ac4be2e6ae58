"""Makes a denoiser trainable: a LoRA or all weights, and its gradients."""

from typing import Any

from torch import nn

from flowgrpo.core.errors import ConfigError


def enable_gradients_in_eval(module: nn.Module) -> None:
    """Parts that run without gradients in evaluation mode are put in training mode, they alone.

    Some have a faster method for inference under `no_grad` (routed experts, say): correct values,
    and gradients that are silently wrong. That the values stay the same is what a check proves.
    """
    for part in module.modules():
        forward = getattr(type(part).forward, "__code__", None)
        branches = forward is not None and "training" in forward.co_names
        methods = [m for cls in type(part).__mro__ for n, m in vars(cls).items() if n != "forward"]
        if branches and any(map(_is_without_gradients, methods)):
            part.training = True


def _is_without_gradients(method: Any) -> bool:
    """Whether a function is decorated with `torch.no_grad` or `torch.inference_mode`."""
    home = getattr(method, "__globals__", {}).get("__name__")
    return home == "torch.utils._contextlib" and hasattr(method, "__wrapped__")


def enable_gradient_checkpointing(denoisers: dict[str, Any]) -> None:
    for name, denoiser in denoisers.items():
        if not getattr(denoiser, "_supports_gradient_checkpointing", False):
            raise ConfigError(
                f"train.gradient_checkpointing is true, but {name} ({type(denoiser).__name__}) has "
                "none; leave it out."
            )
        denoiser.enable_gradient_checkpointing()
