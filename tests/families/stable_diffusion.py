"""Stable Diffusion 1.5, 2 and XL, from text and from images, and AnimateDiff."""

from typing import Any

import torch
from diffusers import (
    AnimateDiffPipeline,
    ControlNetModel,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    MotionAdapter,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextModelWithProjection

from families.family import GUIDED, SIZE, UNGUIDED, Family
from families.parts import clip, mask, picture
from families.vaes import sd_vae

BETAS: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
}
LEADING: dict[str, Any] = {"timestep_spacing": "leading", "steps_offset": 1}


def ddim(**config: Any) -> DDIMScheduler:
    defaults = {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}
    return DDIMScheduler(**{**BETAS, **defaults, **config})


def euler() -> EulerDiscreteScheduler:
    return EulerDiscreteScheduler(**BETAS, **LEADING)


UNET: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}
"""Two levels, the outer one with attention, and a middle block."""

XL_UNET: dict[str, Any] = {
    **UNET,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "attention_head_dim": (1, 2),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 16 + 6 * 8,
    "cross_attention_dim": 32,
}
"""As UNET, with attention at the inner level and image sizes as conditions."""


def unet(**config: Any) -> UNet2DConditionModel:
    config = {**UNET, "sample_size": 8, **config}
    outward = {"CrossAttnDownBlock2D": "CrossAttnUpBlock2D", "DownBlock2D": "UpBlock2D"}
    up_block_types = tuple(outward[name] for name in reversed(config["down_block_types"]))
    return UNet2DConditionModel(up_block_types=up_block_types, **config)


def controlnet(**config: Any) -> ControlNetModel:
    """Brings an image of 16 x 16 down to the latents' 8 x 8; has an effect, since its last
    convolution is not zero."""
    config = {**UNET, "conditioning_embedding_out_channels": (8, 8), **config}
    module = ControlNetModel(**config)
    torch.nn.init.normal_(module.controlnet_cond_embedding.conv_out.weight)
    return module


def sd15(cls: type = StableDiffusionPipeline, **parts: Any) -> Any:
    return cls(
        **{"unet": unet(), "scheduler": ddim(), **parts},
        vae=sd_vae(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        **clip(),
    )


def sd2() -> StableDiffusionPipeline:
    denoiser = unet(use_linear_projection=True, attention_head_dim=(1, 2))
    return sd15(unet=denoiser, scheduler=ddim(prediction_type="v_prediction"))


def sd_img2img() -> StableDiffusionImg2ImgPipeline:
    return sd15(StableDiffusionImg2ImgPipeline)


def sd_inpaint() -> StableDiffusionInpaintPipeline:
    return sd15(StableDiffusionInpaintPipeline, unet=unet(in_channels=4 + 1 + 4))


def sd_controlnet() -> StableDiffusionControlNetPipeline:
    return sd15(StableDiffusionControlNetPipeline, controlnet=controlnet())


def sdxl(cls: type = StableDiffusionXLPipeline, **parts: Any) -> Any:
    return cls(
        unet=unet(**XL_UNET),
        **{"scheduler": euler(), **parts},
        vae=sd_vae(scaling_factor=0.13025, force_upcast=True),
        add_watermarker=False,
        **clip(),
        **clip("_2", cls=CLIPTextModelWithProjection),
    )


def sdxl_dpm(**config: Any) -> StableDiffusionXLPipeline:
    return sdxl(scheduler=DPMSolverMultistepScheduler.from_config(euler().config, **config))


def sdxl_dpm_karras() -> StableDiffusionXLPipeline:
    return sdxl_dpm(use_karras_sigmas=True)


def sdxl_img2img() -> StableDiffusionXLImg2ImgPipeline:
    return sdxl(StableDiffusionXLImg2ImgPipeline)


def sdxl_controlnet() -> StableDiffusionXLControlNetPipeline:
    return sdxl(StableDiffusionXLControlNetPipeline, controlnet=controlnet(**XL_UNET))


def animatediff() -> AnimateDiffPipeline:
    adapter = MotionAdapter(
        block_out_channels=UNET["block_out_channels"],
        motion_layers_per_block=1,
        motion_norm_num_groups=4,
        motion_num_attention_heads=2,
        motion_max_seq_length=8,
    )
    return AnimateDiffPipeline(
        unet=unet(),
        motion_adapter=adapter,
        scheduler=ddim(beta_schedule="linear"),
        vae=sd_vae(),
        **clip(),
    )


TEXT = {**SIZE, **UNGUIDED}
IMG2IMG = {**UNGUIDED, "image": picture(), "strength": 0.75}
CONTROLNET = {**TEXT, "image": picture()}

STABLE_DIFFUSION: dict[str, Family] = {
    "sd-1.5": Family(label="Stable Diffusion 1.5", build=sd15, call=TEXT, guided=GUIDED),
    "sd-2": Family(label="Stable Diffusion 2 (v prediction)", build=sd2, call=TEXT, guided=GUIDED),
    "sd-img2img": Family(
        label="Stable Diffusion 1.5 img2img",
        build=sd_img2img,
        call=IMG2IMG,
        guided=GUIDED,
        last_step=1,
    ),
    "sd-inpaint": Family(
        label="Stable Diffusion 1.5 inpainting",
        build=sd_inpaint,
        call={**TEXT, "image": picture(), "mask_image": mask()},
        guided=GUIDED,
    ),
    "sd-controlnet": Family(
        label="Stable Diffusion 1.5 ControlNet",
        build=sd_controlnet,
        call=CONTROLNET,
        guided=GUIDED,
    ),
    "sdxl": Family(label="Stable Diffusion XL", build=sdxl, call=TEXT, guided=GUIDED),
    "sdxl-dpm": Family(
        label="Stable Diffusion XL (DPM-Solver++)", build=sdxl_dpm, call=TEXT, guided=GUIDED
    ),
    "sdxl-dpm-karras": Family(
        label="Stable Diffusion XL (DPM-Solver++, Karras)",
        build=sdxl_dpm_karras,
        call=TEXT,
        guided=GUIDED,
    ),
    "sdxl-img2img": Family(
        label="Stable Diffusion XL img2img",
        build=sdxl_img2img,
        call=IMG2IMG,
        guided=GUIDED,
        last_step=1,
    ),
    "sdxl-controlnet": Family(
        label="Stable Diffusion XL ControlNet",
        build=sdxl_controlnet,
        call=CONTROLNET,
        guided=GUIDED,
    ),
    "animatediff": Family(
        label="AnimateDiff",
        build=animatediff,
        call={**SIZE, "num_frames": 2, **UNGUIDED},
        guided=GUIDED,
    ),
}
