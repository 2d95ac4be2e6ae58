"""Files of a LoRA: written as plain diffusers (or peft) loads them, and loaded again."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffusers.loaders import PeftAdapterMixin
from diffusers.loaders.lora_base import LoraBaseMixin
from diffusers.models.modeling_utils import ModelMixin
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save_file

from flowgrpo.distributed.fsdp import full_tensor
from flowgrpo.pipelines.lora import ADAPTER

WEIGHTS = "pytorch_lora_weights.safetensors"
"""File of all LoRAs in diffusers' format, in the LoRA's folder."""

PEFT_WEIGHTS = "adapter_model.safetensors"
"""File of one denoiser's LoRA in peft's format, in a folder with the denoiser's name."""


def save_lora(denoisers: Mapping[str, Any], folder: Path, *, write: bool = True) -> None:
    """Writes the adapters of all denoisers in one file, as plain diffusers loads it.

    Tensors have the name of their denoiser as prefix, and the configurations are in the metadata. A
    denoiser whose class has no LoRA support in diffusers gets a folder in peft's format instead,
    with the denoiser's name.

    Args:
        denoisers: modules with an adapter, by name.
        write: False on processes that only take part in gathering a sharded denoiser.
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
        # Every pipeline's save_lora_weights ends in this call, but accepts only some of the names.
        LoraBaseMixin._save_lora_weights(str(folder), layers, metadata)


def load_lora(pipe: Any, folder: Path, adapter_name: str = ADAPTER) -> list[str]:
    """Loads what `save_lora` wrote, or any LoRA in diffusers' format.

    `loading_lines` must do the same in the words of a user.

    Returns:
        Names of the modules that it was loaded into.

    Raises:
        ValueError: it is for a module that the pipeline does not have.
    """
    names = saved_modules(folder)
    by_pipeline = _loaded_by_pipeline(type(pipe), folder, names)
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
            continue  # the pipeline has loaded it already; also a text encoder's part
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
    """Returns lines of plain diffusers code that load what `save_lora` wrote into `pipe`."""
    names = saved_modules(folder)
    by_pipeline = _loaded_by_pipeline(pipeline, folder, names)
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


def saved_modules(folder: Path) -> list[str]:
    """Returns the names of the modules for which a folder holds a LoRA."""
    names = {path.parent.name for path in folder.glob(f"*/{PEFT_WEIGHTS}")}
    if (folder / WEIGHTS).is_file():
        with safe_open(folder / WEIGHTS, "pt") as file:
            names |= {key.split(".", 1)[0] for key in file.keys()}  # noqa: SIM118
    return sorted(names)


def saved_denoisers(folder: Path) -> list[str]:
    """Returns the names of the modules for which a folder holds complete weights, not a LoRA."""
    return sorted(path.parent.name for path in folder.glob("*/config.json"))


def _loaded_by_pipeline(pipeline: type, folder: Path, names: Sequence[str]) -> list[str]:
    """Returns those of `names` that the pipeline's own `load_lora_weights` loads."""
    if not (hasattr(pipeline, "load_lora_weights") and (folder / WEIGHTS).is_file()):
        return []
    own = {getattr(pipeline, key, None) for key in ("transformer_name", "unet_name")}
    return [name for name in names if name in own and not (folder / name).is_dir()]
