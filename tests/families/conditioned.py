"""Flow-matching pipelines that take images: img2img, editing, control, inpainting."""

import inspect
from functools import partial
from typing import Any

from diffusers import (
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
from diffusers.image_processor import VaeImageProcessor

from families.family import GUIDED, LARGER, SHORT, SIZE, TRUE_CFG, UNGUIDED, Family
from families.language_models import learn_words, qwen2_vl_processor
from families.parts import mask, picture
from families.text_to_image_llm import bria_fibo, flux2
from families.text_to_image_qwen import flux2_klein, longcat_image, qwen_image, z_image
from families.text_to_image_t5 import chroma, flux, sd3
from families.vaes import levels, qwen_vae, vae


def turned(pipe: Any, cls: type, **parts: Any) -> Any:
    """A pipeline of class `cls` from the parts of `pipe` that it accepts, and `parts`."""
    known = inspect.signature(cls).parameters
    shared = {name: part for name, part in pipe.components.items() if name in known}
    return cls(**{**shared, **parts})


def redone(module: Any, cls: type | None = None, **config: Any) -> Any:
    """A new module with the configuration of `module`, as far as `cls` accepts it, and `config`."""
    cls = cls or type(module)
    known = inspect.signature(cls).parameters
    shared = {key: value for key, value in module.config.items() if key in known}
    return cls(**{**shared, **config})


def sd3_img2img() -> StableDiffusion3Img2ImgPipeline:
    return turned(sd3(), StableDiffusion3Img2ImgPipeline)


def sd3_inpaint() -> StableDiffusion3InpaintPipeline:
    """The pipeline requires latents of 16 channels."""
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
    """The latents of the control image are further channels."""
    pipe = flux()
    transformer = redone(pipe.transformer, in_channels=2 * 16, out_channels=16)
    return turned(pipe, FluxControlPipeline, transformer=transformer)


def flux_fill() -> FluxFillPipeline:
    """The latents of the masked image and the pixels of the mask are further channels."""
    pipe = flux()
    transformer = redone(pipe.transformer, in_channels=3 * 16, out_channels=16)
    return turned(pipe, FluxFillPipeline, transformer=transformer)


def flux_controlnet() -> FluxControlNetPipeline:
    pipe = flux()
    controlnet = redone(pipe.transformer, FluxControlNetModel)
    return turned(pipe, FluxControlNetPipeline, controlnet=controlnet)


def qwen_image_img2img() -> QwenImageImg2ImgPipeline:
    return turned(qwen_image(), QwenImageImg2ImgPipeline)


def qwen_image_controlnet() -> QwenImageControlNetPipeline:
    pipe = qwen_image()
    controlnet = redone(pipe.transformer, QwenImageControlNetModel, num_layers=1)
    return turned(pipe, QwenImageControlNetPipeline, controlnet=controlnet)


class Shrinking(VaeImageProcessor):
    """Resizes images to 64 x 64 if the pipeline asks for 1024 x 1024."""

    def resize(self, image: Any, height: int, width: int, **options: Any) -> Any:
        return super().resize(image, height // 16, width // 16, **options)


def shrunk(pipe: Any) -> Any:
    """The pipeline with images 16 times smaller than it assumes, to save time."""
    pipe.image_processor = Shrinking()
    pipe.vae_scale_factor *= 16
    return pipe


def qwen_image_edit(cls: type = QwenImageEditPipeline) -> Any:
    pipe = qwen_image()
    deep = qwen_vae(dim_mult=[1, 1, 1, 1], temperal_downsample=[False] * 3)
    pipe = turned(pipe, cls, processor=qwen2_vl_processor(pipe.tokenizer), vae=deep)
    learn_words(pipe.tokenizer, pipe.prompt_template_encode)
    return shrunk(pipe)


def chroma_img2img() -> ChromaImg2ImgPipeline:
    return turned(chroma(), ChromaImg2ImgPipeline)


def z_image_img2img() -> ZImageImg2ImgPipeline:
    return turned(z_image(), ZImageImg2ImgPipeline)


def longcat_edit() -> LongCatImageEditPipeline:
    deep = vae(latent_channels=16, **levels(4))
    pipe = turned(longcat_image(), LongCatImageEditPipeline, vae=deep)
    learn_words(pipe.tokenizer, pipe.prompt_template_encode_prefix)
    pipe.tokenizer_max_length = 48  # instead of 512, to save time
    return shrunk(pipe)


def fibo_edit() -> BriaFiboEditPipeline:
    """Its prompts are JSON."""
    return turned(bria_fibo(), BriaFiboEditPipeline)


FROM_PICTURE = {**SHORT, "image": picture(), "strength": 0.75}
CONTROL = {**SHORT, "control_image": picture()}
QWEN_EDIT = {"height": 512, "width": 512, "true_cfg_scale": 1.0}
TWO_PICTURES = [picture(), picture(seed=1)]
FLUX2 = {
    **SIZE,
    "image": [picture(64, 64), picture(64, 64, seed=1)],  # smaller ones are refused
    "text_encoder_out_layers": (1, 2, 3),
}

CONDITIONED: dict[str, Family] = {
    "sd3-img2img": Family(
        label="Stable Diffusion 3.5 img2img",
        build=sd3_img2img,
        call={**FROM_PICTURE, **UNGUIDED},
        guided=GUIDED,
        last_step=1,
    ),
    "sd3-inpaint": Family(
        label="Stable Diffusion 3.5 inpainting",
        build=sd3_inpaint,
        call={**FROM_PICTURE, "mask_image": mask(), **UNGUIDED},
        guided=GUIDED,
        last_step=1,
    ),
    "sd3-controlnet": Family(
        label="Stable Diffusion 3.5 ControlNet",
        build=sd3_controlnet,
        call={**CONTROL, **UNGUIDED},
        guided=GUIDED,
    ),
    "flux-img2img": Family(
        label="FLUX.1 img2img",
        build=flux_img2img,
        call=FROM_PICTURE,
        guided=TRUE_CFG,
        last_step=1,
    ),
    "flux-kontext": Family(
        label="FLUX.1 Kontext",
        build=flux_kontext,
        call={**SHORT, "image": picture(), "max_area": 16 * 16, "_auto_resize": False},
        guided=TRUE_CFG,
    ),
    "flux-control": Family(
        label="FLUX.1 Depth and Canny (control)", build=flux_control, call=CONTROL
    ),
    "flux-fill": Family(
        label="FLUX.1 Fill",
        build=flux_fill,
        call={**SHORT, "image": picture(), "mask_image": mask()},
    ),
    "flux-controlnet": Family(
        label="FLUX.1 ControlNet", build=flux_controlnet, call=CONTROL, guided=TRUE_CFG
    ),
    "flux2-references": Family(
        label="FLUX.2 (reference images)",
        build=flux2,
        call={**FLUX2, "max_sequence_length": 128},
    ),
    "flux2-klein-references": Family(
        label="FLUX.2 [klein] (reference images)",
        build=flux2_klein,
        call={**FLUX2, "max_sequence_length": 64, **UNGUIDED},
        guided={"guidance_scale": 4.0},
    ),
    "qwen-image-img2img": Family(
        label="Qwen-Image img2img",
        build=qwen_image_img2img,
        call={**FROM_PICTURE, "true_cfg_scale": 1.0},
        guided=TRUE_CFG,
        last_step=1,
    ),
    "qwen-image-controlnet": Family(
        label="Qwen-Image ControlNet",
        build=qwen_image_controlnet,
        call={**CONTROL, "true_cfg_scale": 1.0},
        guided=TRUE_CFG,
    ),
    "qwen-image-edit": Family(
        label="Qwen-Image-Edit",
        build=qwen_image_edit,
        call={**QWEN_EDIT, "image": picture()},
        guided=TRUE_CFG,
    ),
    "qwen-image-edit-plus": Family(
        label="Qwen-Image-Edit-2509 (several pictures)",
        build=partial(qwen_image_edit, QwenImageEditPlusPipeline),
        call={**QWEN_EDIT, "image": TWO_PICTURES},
        guided=TRUE_CFG,
    ),
    "chroma-img2img": Family(
        label="Chroma img2img",
        build=chroma_img2img,
        call={**FROM_PICTURE, **UNGUIDED},
        guided=GUIDED,
        last_step=1,
    ),
    "z-image-img2img": Family(
        label="Z-Image img2img",
        build=z_image_img2img,
        call={**FROM_PICTURE, "max_sequence_length": 48, "guidance_scale": 0.0},
        guided=GUIDED,
        last_step=1,
    ),
    "longcat-edit": Family(
        label="LongCat-Image-Edit",
        build=longcat_edit,
        call={"image": picture(), **UNGUIDED},
        guided=GUIDED,
    ),
    "fibo-edit": Family(
        label="BRIA FIBO Edit",
        build=fibo_edit,
        call={
            "prompt": '{"edit_instruction": "paint the cube red"}',
            **LARGER,
            "image": picture(64, 64),
            **UNGUIDED,
        },
        guided=GUIDED,
    ),
}
