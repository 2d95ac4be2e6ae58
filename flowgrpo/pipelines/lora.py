"""LoRA on a denoiser: where it goes, and the files that plain diffusers (or peft) loads again."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders import PeftAdapterMixin
from diffusers.loaders.lora_base import LoraBaseMixin
from diffusers.models.modeling_utils import ModelMixin
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from flowgrpo.distributed.fsdp import full_tensor

ADAPTER = "default"
"""peft's own name; diffusers' savers look for it."""


WEIGHTS = "pytorch_lora_weights.safetensors"


PEFT_WEIGHTS = "adapter_model.safetensors"


ATTENTION_PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0", "to_out", "to_qkv_mlp_proj")
"""Last parts of the attention projections' names in diffusers denoisers. Where there is none, every
linear layer within attention is taken. Separate projections of text tokens (add_q_proj, ...) are
left out: in a last block some of them lead nowhere."""


def add_lora(
    module: Any, *, rank: int, alpha: int, targets: Sequence[str] | None, seed: int
) -> None:
    """Adds a trainable float32 LoRA to the linear layers of `module` that `targets` choose.

    Args:
        targets: endings of their names; None: the attention projections.
        seed: of the initial weights; the caller's generator stays untouched.

    Raises:
        ValueError: there is an adapter already, or no layer matches.
    """
    if getattr(module, "peft_config", None):
        raise ValueError(
            f"{type(module).__name__} already has the adapters {sorted(module.peft_config)}, but "
            "training adds its own; unload them first (pipe.unload_lora_weights())."
        )
    chosen = target_layers(module, targets)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(module, PeftAdapterMixin):
            module.add_adapter(config, ADAPTER)
        else:
            inject_adapter_in_model(config, module, ADAPTER)
            module.peft_config = {ADAPTER: config}
    train_in_float32(module)


def train_in_float32(module: nn.Module) -> None:
    """The adapter is trained in float32 over a base of any dtype."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    module.eval()


def target_layers(module: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """Full names of the linear layers that get a LoRA.

    Raises:
        ValueError: none matches; lists candidates.
    """
    linears = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    if targets is None:
        chosen = _ending_in(linears, ATTENTION_PROJECTIONS)
        chosen = chosen or [name for name in linears if "attn" in name or "attention" in name]
        unmatched = list(ATTENTION_PROJECTIONS) if not chosen else []
    else:
        chosen = _ending_in(linears, targets)
        unmatched = [target for target in targets if not _ending_in(linears, [target])]
    if unmatched:
        endings = sorted({name.rsplit(".", 1)[-1] for name in linears if not name[-1].isdigit()})
        raise ValueError(
            f"train.lora.targets has {', '.join(unmatched)}, but no linear layer of "
            f"{type(module).__name__} ends so; candidates: {', '.join(endings)}."
        )
    return chosen


def inference_dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """By name, the dtype of each adapter tensor once diffusers has loaded it: its layer's own."""
    layers: dict[str, Any] = dict(module.named_modules())
    return {
        name: layers[name.partition(".lora_")[0]].get_base_layer().weight.dtype
        for name, _ in module.named_parameters()
        if ".lora_" in name
    }


def save_lora(denoisers: Mapping[str, Any], folder: Path, *, write: bool = True) -> None:
    """Writes the adapters as plain diffusers loads them, each under its module's name, in one file
    with the configuration as metadata.

    A denoiser whose class has no LoRA support in diffusers gets a folder of its name in peft's
    format.

    Args:
        write: False on processes that only help to collect a sharded denoiser.
    """
    layers, metadata = {}, {}
    for name, module in denoisers.items():
        tensors = get_peft_model_state_dict(module, adapter_name=ADAPTER)
        tensors = {key: full_tensor(value.detach()).contiguous() for key, value in tensors.items()}
        config = module.peft_config[ADAPTER]
        if not write:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(module, PeftAdapterMixin):
            layers[name], metadata[name] = tensors, config.to_dict()
        else:
            config.save_pretrained(folder / name)
            tensors = {f"base_model.model.{key}": value for key, value in tensors.items()}
            save_file(tensors, folder / name / PEFT_WEIGHTS)
    if layers:
        # What every pipeline's own save_lora_weights ends in; those take only some of the names.
        LoraBaseMixin._save_lora_weights(str(folder), layers, metadata)


def load_lora(pipe: Any, folder: Path, adapter_name: str = ADAPTER) -> list[str]:
    """Loads what `save_lora` wrote, or any LoRA for diffusers; returns the modules it went to.

    `loading_lines` says the same for people.

    Raises:
        ValueError: nothing there fits a module of the pipeline.
    """
    names = saved_modules(folder)
    by_pipeline = _of_pipeline(type(pipe), folder, names)
    if by_pipeline or not names:
        pipe.load_lora_weights(str(folder), adapter_name=adapter_name)
    for name in names:
        module = getattr(pipe, name, None)
        if module is None:
            raise ValueError(
                f"LoRA is {folder}, for a module {name}, but {type(pipe).__name__} has none; use "
                "the pipeline that it was trained on."
            )
        if name in by_pipeline or (by_pipeline and not isinstance(module, ModelMixin)):
            continue  # a text encoder's part is the pipeline's own affair
        if (folder / name / PEFT_WEIGHTS).is_file():
            model = PeftModel.from_pretrained(
                module, folder / name, adapter_name, autocast_adapter_dtype=False
            )
            module.peft_config = model.peft_config
        else:
            module.load_lora_adapter(
                str(folder), prefix=name, weight_name=WEIGHTS, adapter_name=adapter_name
            )
    return names


def loading_lines(pipeline: type, folder: Path) -> list[str]:
    """Lines of Python that load what `save_lora` wrote into `pipe`, with plain diffusers."""
    names = saved_modules(folder)
    by_pipeline = _of_pipeline(pipeline, folder, names)
    lines = [f"pipe.load_lora_weights({str(folder)!r})"] if by_pipeline else []
    for name in names:
        if (folder / name / PEFT_WEIGHTS).is_file():
            lines.append(
                f"peft.PeftModel.from_pretrained(pipe.{name}, {str(folder / name)!r}, "
                "autocast_adapter_dtype=False)"
            )
        elif name not in by_pipeline:
            lines.append(
                f"pipe.{name}.load_lora_adapter({str(folder)!r}, prefix={name!r}, "
                f"weight_name={WEIGHTS!r})"
            )
    return lines


def set_scale(pipe: Any, names: Sequence[str], scale: float) -> None:
    """Sets the strength of every adapter on these modules; 1 is as trained."""
    for name in names:
        for layer in getattr(pipe, name).modules():
            if isinstance(layer, LoraLayer):
                for adapter in layer.active_adapters:
                    layer.set_scale(adapter, scale)


def unload_lora(pipe: Any, names: Sequence[str]) -> None:
    """Takes every adapter off these modules; the base weights are as before."""
    for name in names:
        module = getattr(pipe, name)
        if isinstance(module, PeftAdapterMixin):
            module.unload_lora()
            continue
        for place, layer in list(module.named_modules()):
            if isinstance(layer, LoraLayer):
                module.set_submodule(place, layer.get_base_layer())
        if hasattr(module, "peft_config"):
            del module.peft_config
        module._hf_peft_config_loaded = False


def saved_modules(folder: Path) -> list[str]:
    """Names of the modules that a folder of `save_lora` holds a LoRA for."""
    names = {path.parent.name for path in folder.glob(f"*/{PEFT_WEIGHTS}")}
    if (folder / WEIGHTS).is_file():
        with safe_open(folder / WEIGHTS, "pt") as file:
            names |= {key.split(".", 1)[0] for key in file.keys()}  # noqa: SIM118
    return sorted(names)


def _of_pipeline(pipeline: type, folder: Path, names: Sequence[str]) -> list[str]:
    """Those that the pipeline's own `load_lora_weights` puts in place."""
    if not (hasattr(pipeline, "load_lora_weights") and (folder / WEIGHTS).is_file()):
        return []
    own = {getattr(pipeline, key, None) for key in ("transformer_name", "unet_name")}
    return [name for name in names if name in own and not (folder / name).is_dir()]


def _ending_in(names: Sequence[str], endings: Sequence[str]) -> list[str]:
    return [name for name in names if any(f".{name}".endswith(f".{e}") for e in endings)]


def saved_denoisers(folder: Path) -> list[str]:
    """Modules whose whole weights lie in a folder of results: they were trained without a LoRA."""
    return sorted(path.parent.name for path in folder.glob("*/config.json"))
