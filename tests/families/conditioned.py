"""Flow-matching pipelines that take pictures: to change, to edit, to follow, to fill in."""

import inspect
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    BriaFiboEditPipeline,
    ChromaImg2ImgPipeline,
    FluxControlNetModel,
    FluxControlNetPipeline,
    FluxControlPipeline,
    FluxFillPipeline,
    FluxImg2ImgPipeline,
    FluxKontextPipeline,
    LongCatImageEditPipeline,
    QwenImageControlNetModel,
    QwenImageControlNetPipeline,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImageImg2ImgPipeline,
    SD3ControlNetModel,
    StableDiffusion3ControlNetPipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3InpaintPipeline,
    ZImageImg2ImgPipeline,
)

from families.family import Family
from families.language_models import learn_words, qwen2_vl_processor
from families.parts import picture, vae
from families.text_to_image import (
    bria_fibo,
    chroma,
    flux,
    flux2,
    flux2_klein,
    lively,
    longcat_image,
    qwen_image,
    sd3,
    z_image,
)
from families.unet import mask


def turned(pipe: Any, cls: type, **parts: Any) -> Any:
    """A pipeline of another class from the parts that it shares with one, and more."""
    known = inspect.signature(cls).parameters
    shared = {name: part for name, part in pipe.components.items() if name in known}
    return cls(**{**shared, **parts})


def redone(module: Any, cls: type | None = None, **config: Any) -> Any:
    """A new module with another's configuration, as far as `cls` knows it, some of it changed."""
    torch.manual_seed(1)
    cls = cls or type(module)
    known = inspect.signature(cls).parameters
    shared = {key: value for key, value in module.config.items() if key in known}
    return lively(cls(**{**shared, **config}))


def sd3_img2img() -> StableDiffusion3Img2ImgPipeline:
    return turned(sd3(), StableDiffusion3Img2ImgPipeline)


def sd3_inpaint() -> StableDiffusion3InpaintPipeline:
    """The pipeline refuses latents of other than 16 channels."""
    pipe = sd3()
    transformer = redone(pipe.transformer, in_channels=16, out_channels=16)
    parts = {"transformer": transformer, "vae": vae(latent_channels=16)}
    return turned(pipe, StableDiffusion3InpaintPipeline, **parts)


def sd3_controlnet() -> StableDiffusion3ControlNetPipeline:
    pipe = sd3()
    controlnet = redone(pipe.transformer, SD3ControlNetModel, num_layers=1)
    return turned(pipe, StableDiffusion3ControlNetPipeline, controlnet=controlnet)


def flux_img2img() -> FluxImg2ImgPipeline:
    return turned(flux(), FluxImg2ImgPipeline)


def flux_kontext() -> FluxKontextPipeline:
    return turned(flux(), FluxKontextPipeline)


def flux_control() -> FluxControlPipeline:
    """The picture's latents lie beside the noise, as channels."""
    pipe = flux()
    transformer = redone(pipe.transformer, in_channels=2 * 16, out_channels=16)
    return turned(pipe, FluxControlPipeline, transformer=transformer)


def flux_controlnet() -> FluxControlNetPipeline:
    pipe = flux()
    controlnet = redone(pipe.transformer, FluxControlNetModel)
    return turned(pipe, FluxControlNetPipeline, controlnet=controlnet)


def flux_fill() -> FluxFillPipeline:
    """The masked picture's latents and the mask's pixels lie beside the noise, as channels."""
    pipe = flux()
    transformer = redone(pipe.transformer, in_channels=3 * 16, out_channels=16)
    return turned(pipe, FluxFillPipeline, transformer=transformer)


def deep_qwen_vae() -> AutoencoderKLQwenImage:
    """A latent pixel is 64 x 64 picture pixels: editing pipelines enlarge what they are given."""
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1] * 7,
        num_res_blocks=0,
        temperal_downsample=[False] * 6,
        latents_mean=[0.0, -0.1, -0.2, -0.3],
        latents_std=[0.03, 0.04, 0.05, 0.06],
    ).eval()


def qwen_image_edit(cls: type = QwenImageEditPipeline) -> Any:
    pipe = qwen_image()
    processor = qwen2_vl_processor(pipe.tokenizer)
    pipe = turned(pipe, cls, processor=processor, vae=deep_qwen_vae())
    learn_words(pipe.tokenizer, pipe.prompt_template_encode)
    return pipe


def qwen_image_edit_plus() -> QwenImageEditPlusPipeline:
    return qwen_image_edit(QwenImageEditPlusPipeline)


def qwen_image_img2img() -> QwenImageImg2ImgPipeline:
    return turned(qwen_image(), QwenImageImg2ImgPipeline)


def qwen_image_controlnet() -> QwenImageControlNetPipeline:
    pipe = qwen_image()
    controlnet = redone(pipe.transformer, QwenImageControlNetModel, num_layers=1)
    return turned(pipe, QwenImageControlNetPipeline, controlnet=controlnet)


def chroma_img2img() -> ChromaImg2ImgPipeline:
    return turned(chroma(), ChromaImg2ImgPipeline)


def z_image_img2img() -> ZImageImg2ImgPipeline:
    return turned(z_image(), ZImageImg2ImgPipeline)


def longcat_edit() -> LongCatImageEditPipeline:
    """Pictures are 1024 x 1024, whatever is asked; a latent pixel is 64 x 64 of their pixels."""
    levels = {
        "block_out_channels": (4,) * 7,
        "down_block_types": ("DownEncoderBlock2D",) * 7,
        "up_block_types": ("UpDecoderBlock2D",) * 7,
        "layers_per_block": 0,
    }
    pipe = longcat_image()
    pipe = turned(pipe, LongCatImageEditPipeline, vae=vae(latent_channels=16, **levels))
    learn_words(pipe.tokenizer, pipe.prompt_template_encode_prefix)
    return pipe


def fibo_edit() -> BriaFiboEditPipeline:
    """Reads JSON; the pipeline wants a VAE whose latent pixels are 16 x 16 picture pixels."""
    pipe = bria_fibo()
    autoencoder = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        is_residual=True,
        patch_size=2,
        in_channels=12,
        out_channels=12,
        latents_mean=[0.0, -0.1, -0.2, -0.3],
        latents_std=[0.1, 0.2, 0.3, 0.4],
        scale_factor_spatial=16,
    )
    return turned(pipe, BriaFiboEditPipeline, vae=autoencoder.eval())


SMALL = {"height": 16, "width": 16}
SHORT = {**SMALL, "max_sequence_length": 16}
STRENGTH = {"image": picture(), "strength": 0.75}
NEGATIVE = {"negative_prompt": "a blurred ball"}
TRUE_CFG = {**NEGATIVE, "true_cfg_scale": 4.0}
UNGUIDED = {"guidance_scale": 1.0}
GUIDED = {**NEGATIVE, "guidance_scale": 4.5}
TWO_PICTURES = {"image": [picture(), picture(seed=1)]}
TEXT_LAYERS = {"text_encoder_out_layers": (1, 2, 3)}
TWO_LARGER = {"image": [picture(64, 64), picture(64, 64, seed=1)]}
"""Flux.2 refuses pictures of fewer than 64 pixels a side."""

CONDITIONED: dict[str, Family] = {
    "flux-kontext": Family(
        label="Flux Kontext",
        build=flux_kontext,
        call={**SHORT, "image": picture(), "max_area": 16 * 16, "_auto_resize": False},
        guided=TRUE_CFG,
    ),
    "sd3-img2img": Family(
        label="Stable Diffusion 3, image to image",
        build=sd3_img2img,
        call={**SHORT, **STRENGTH, **UNGUIDED},
        guided=GUIDED,
    ),
    "flux-img2img": Family(
        label="Flux.1, image to image",
        build=flux_img2img,
        call={**SHORT, **STRENGTH},
        guided=TRUE_CFG,
    ),
    "flux-control": Family(
        label="Flux.1 Control", build=flux_control, call={**SHORT, "control_image": picture()}
    ),
    "flux-controlnet": Family(
        label="Flux.1, ControlNet",
        build=flux_controlnet,
        call={**SHORT, "control_image": picture()},
        guided=TRUE_CFG,
    ),
    "sd3-controlnet": Family(
        label="Stable Diffusion 3, ControlNet",
        build=sd3_controlnet,
        call={**SHORT, "control_image": picture(), **UNGUIDED},
        guided=GUIDED,
    ),
    "flux-fill": Family(
        label="Flux.1 Fill",
        build=flux_fill,
        call={**SHORT, "image": picture(), "mask_image": mask()},
    ),
    "qwen-image-edit": Family(
        label="Qwen-Image Edit",
        build=qwen_image_edit,
        call={"height": 256, "width": 256, "image": picture(), "true_cfg_scale": 1.0},
        guided=TRUE_CFG,
    ),
    "qwen-image-edit-plus": Family(
        label="Qwen-Image Edit Plus",
        build=qwen_image_edit_plus,
        call={"height": 256, "width": 256, **TWO_PICTURES, "true_cfg_scale": 1.0},
        guided=TRUE_CFG,
    ),
    "flux2-references": Family(
        label="Flux.2, reference images",
        build=flux2,
        call={**SMALL, **TWO_LARGER, "max_sequence_length": 128, **TEXT_LAYERS},
    ),
    "flux2-klein-references": Family(
        label="Flux.2 Klein, reference images",
        build=flux2_klein,
        call={**SMALL, **TWO_LARGER, "max_sequence_length": 64, **TEXT_LAYERS, **UNGUIDED},
        guided={"guidance_scale": 4.0},
    ),
    "qwen-image-img2img": Family(
        label="Qwen-Image, image to image",
        build=qwen_image_img2img,
        call={**SMALL, **STRENGTH, "true_cfg_scale": 1.0},
        guided=TRUE_CFG,
    ),
    "qwen-image-controlnet": Family(
        label="Qwen-Image, ControlNet",
        build=qwen_image_controlnet,
        call={**SMALL, "control_image": picture(), "true_cfg_scale": 1.0},
        guided=TRUE_CFG,
    ),
    "chroma-img2img": Family(
        label="Chroma, image to image",
        build=chroma_img2img,
        call={**SHORT, **STRENGTH, **UNGUIDED},
        guided=GUIDED,
    ),
    "sd3-inpaint": Family(
        label="Stable Diffusion 3, inpainting",
        build=sd3_inpaint,
        call={**SHORT, **STRENGTH, "mask_image": mask(), **UNGUIDED},
        guided=GUIDED,
    ),
    "z-image-img2img": Family(
        label="Z-Image, image to image",
        build=z_image_img2img,
        call={**SMALL, **STRENGTH, "max_sequence_length": 64, "guidance_scale": 0.0},
        guided=GUIDED,
    ),
    "longcat-edit": Family(
        label="LongCat-Image Edit",
        build=longcat_edit,
        call={"image": picture(), **UNGUIDED},
        guided=GUIDED,
    ),
    "fibo-edit": Family(
        label="Bria Fibo Edit",
        build=fibo_edit,
        call={
            "prompt": '{"edit_instruction": "paint the cube red"}',
            "height": 64,
            "width": 64,
            "image": picture(64, 64),
            **UNGUIDED,
        },
        guided=GUIDED,
    ),
}
