"""LoRA on a denoiser: adding it, its strength, and removing it again."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.loaders import PeftAdapterMixin
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

ADAPTER = "default"
"""Name of the trained adapter: peft's default, which diffusers' savers look for."""

ATTENTION_PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0", "to_out", "to_qkv_mlp_proj")
"""Last parts of the names of attention projections in diffusers denoisers. If none matches, every
linear layer within attention is taken. Separate projections of text tokens (add_q_proj, ...) are
left out, because in a last block some of them lead nowhere."""


def add_lora(
    module: Any, *, rank: int, alpha: int, targets: Sequence[str] | None, seed: int
) -> None:
    """Adds a trainable float32 LoRA to the linear layers of `module` that `targets` select.

    Args:
        rank: rank of the update of each layer.
        alpha: strength; the update is scaled by alpha / rank.
        targets: endings of the layers' names; None selects the attention projections.
        seed: seed of the initial weights; the global random state is left alone.

    Raises:
        ValueError: there is an adapter already, or a target matches no layer.
    """
    if getattr(module, "peft_config", None):
        raise ValueError(
            f"{type(module).__name__} already has the adapters {sorted(module.peft_config)}, but "
            "training adds its own; unload them first (pipe.unload_lora_weights())."
        )
    layers = target_layers(module, targets)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=layers, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(module, PeftAdapterMixin):
            module.add_adapter(config, ADAPTER)
        else:
            inject_adapter_in_model(config, module, ADAPTER)
            # As diffusers' own classes have it, so that both are saved and checked alike.
            module.peft_config = {ADAPTER: config}
    train_in_float32(module)


def train_in_float32(module: nn.Module) -> None:
    """Makes the adapter trainable, in float32 over a base of any dtype, and freezes the base."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    module.eval()


def target_layers(module: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """Returns the full names of the linear layers that get a LoRA.

    Raises:
        ValueError: a target matches none; lists candidates.
    """
    linears = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    if targets is None:
        layers = _ending_in(linears, ATTENTION_PROJECTIONS)
        layers = layers or [name for name in linears if "attn" in name or "attention" in name]
        unmatched = list(ATTENTION_PROJECTIONS) if not layers else []
    else:
        layers = _ending_in(linears, targets)
        unmatched = [target for target in targets if not _ending_in(linears, [target])]
    if unmatched:
        endings = sorted({name.rsplit(".", 1)[-1] for name in linears if not name[-1].isdigit()})
        raise ValueError(
            f"train.lora.targets has {', '.join(unmatched)}, but no linear layer of "
            f"{type(module).__name__} has a name that ends like this; candidates: "
            f"{', '.join(endings)}."
        )
    return layers


def inference_dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """Returns the dtype that each adapter tensor has once diffusers has loaded it, by name: the
    dtype of its layer."""
    layers: dict[str, Any] = dict(module.named_modules())
    return {
        name: layers[name.partition(".lora_")[0]].get_base_layer().weight.dtype
        for name, _ in module.named_parameters()
        if ".lora_" in name
    }


def set_scale(pipe: Any, names: Sequence[str], scale: float) -> None:
    """Sets the strength of every adapter on the named modules; 1 is as trained."""
    for name in names:
        for layer in getattr(pipe, name).modules():
            if isinstance(layer, LoraLayer):
                for adapter in layer.active_adapters:
                    layer.set_scale(adapter, scale)


def unload_lora(pipe: Any, names: Sequence[str]) -> None:
    """Removes every adapter from the named modules; the base weights are as before."""
    for name in names:
        module = getattr(pipe, name)
        if isinstance(module, PeftAdapterMixin):
            module.unload_lora()
            continue
        for path, layer in list(module.named_modules()):
            if isinstance(layer, LoraLayer):
                module.set_submodule(path, layer.get_base_layer())
        if hasattr(module, "peft_config"):
            del module.peft_config
        module._hf_peft_config_loaded = False


def _ending_in(names: Sequence[str], endings: Sequence[str]) -> list[str]:
    return [name for name in names if any(f".{name}".endswith(f".{e}") for e in endings)]
