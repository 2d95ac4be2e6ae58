"""Tiny, randomly initialised pipelines of real diffusers classes: one small builder a family."""

import torch
from diffusers import DiffusionPipeline

from families.conditioned import CONDITIONED
from families.family import Family
from families.text_to_image import TEXT_TO_IMAGE
from families.unet import UNET
from families.video import VIDEO

KINDS: dict[str, dict[str, Family]] = {
    "text to image": TEXT_TO_IMAGE,
    "image conditioned": CONDITIONED,
    "UNet, and noise or v prediction": UNET,
    "video, and video with audio": VIDEO,
}
FAMILIES: dict[str, Family] = {key: f for kind in KINDS.values() for key, f in kind.items()}


def built(name: str, dtype: torch.dtype = torch.float32) -> DiffusionPipeline:
    """The family's pipeline in `dtype`, cast as `from_pretrained` casts: parts that their class
    keeps in float32 stay so."""
    pipe = FAMILIES[name].build()
    for part in vars(pipe).values():
        if isinstance(part, torch.nn.Module):
            part.to(dtype)
            for kept in getattr(part, "_keep_in_fp32_modules", None) or []:
                for path, module in part.named_modules():
                    if kept in path.split("."):
                        module.float()
    pipe.set_progress_bar_config(disable=True)
    return pipe
