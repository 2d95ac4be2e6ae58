"""Tiny, randomly initialised pipelines of real diffusers classes: one small builder per family."""

import torch
from diffusers import DiffusionPipeline, ModelMixin

from families.conditioned import CONDITIONED
from families.family import Family
from families.noise_prediction import NOISE_PREDICTION
from families.parts import awake
from families.stable_diffusion import STABLE_DIFFUSION
from families.text_to_image_llm import TEXT_TO_IMAGE_LLM
from families.text_to_image_qwen import TEXT_TO_IMAGE_QWEN
from families.text_to_image_t5 import TEXT_TO_IMAGE_T5
from families.video_hunyuan import VIDEO_HUNYUAN
from families.video_llm import VIDEO_LLM
from families.video_ltx import VIDEO_LTX
from families.video_t5 import VIDEO_T5
from families.video_wan import VIDEO_WAN

KINDS: dict[str, dict[str, Family]] = {
    "text to image": {**TEXT_TO_IMAGE_T5, **TEXT_TO_IMAGE_QWEN, **TEXT_TO_IMAGE_LLM},
    "image conditioned": CONDITIONED,
    "UNet, and noise or v prediction": {**STABLE_DIFFUSION, **NOISE_PREDICTION},
    "video, and video with audio": {
        **VIDEO_WAN,
        **VIDEO_LTX,
        **VIDEO_HUNYUAN,
        **VIDEO_T5,
        **VIDEO_LLM,
    },
}
FAMILIES: dict[str, Family] = {key: f for kind in KINDS.values() for key, f in kind.items()}


def built(name: str, dtype: torch.dtype = torch.float32) -> DiffusionPipeline:
    """The family's pipeline, with the same weights each time, in evaluation mode.

    It is cast as `from_pretrained` casts: modules that their class keeps in float32 stay so.
    """
    torch.manual_seed(0)
    family = FAMILIES[name]
    pipe = family.build()
    for key, part in vars(pipe).items():
        if isinstance(part, ModelMixin):
            awake(part)
        if isinstance(part, torch.nn.Module):
            cast(part.eval(), torch.float32 if key in family.float32 else dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def cast(module: torch.nn.Module, dtype: torch.dtype) -> None:
    module.to(dtype)
    for kept in getattr(module, "_keep_in_fp32_modules", None) or []:
        for path, inner in module.named_modules():
            if kept in path.split("."):
                inner.float()
