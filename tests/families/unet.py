"""Pipelines that predict noise or v on a variance-preserving path; all but PixArt have a UNet."""

import string
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from diffusers import (
    AnimateDiffPipeline,
    AutoencoderKL,
    AutoencoderKLTemporalDecoder,
    ControlNetModel,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    Kandinsky3Pipeline,
    Kandinsky3UNet,
    KolorsPipeline,
    MotionAdapter,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
    StableVideoDiffusionPipeline,
    UNet2DConditionModel,
    UNetSpatioTemporalConditionModel,
    VQModel,
)
from diffusers.pipelines.kolors import ChatGLMModel, ChatGLMTokenizer
from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig
from PIL import Image
from sentencepiece import SentencePieceTrainer
from transformers import (
    CLIPImageProcessor,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

from families.family import Family
from families.parts import (
    awake,
    clip_text_encoder,
    clip_tokenizer,
    picture,
    t5_encoder,
    t5_tokenizer,
    vae,
)

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
LEADING = {"timestep_spacing": "leading", "steps_offset": 1}
SIZE = {"height": 16, "width": 16}
UNGUIDED = {"guidance_scale": 1.0}
GUIDED = {"guidance_scale": 4.5}


def sd_vae(**config: Any) -> AutoencoderKL:
    defaults = {"use_quant_conv": True, "use_post_quant_conv": True, "shift_factor": None}
    return vae(**{**defaults, "scaling_factor": 0.18215, **config})


def ddim(**config: Any) -> DDIMScheduler:
    defaults = {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}
    return DDIMScheduler(**{**BETAS, **defaults, **config})


UNET_CONFIG = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}
"""Two levels, the outer one with attention, and a middle block."""

XL_CONFIG = {
    **UNET_CONFIG,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "transformer_layers_per_block": (1, 2),
    "attention_head_dim": (1, 2),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 16 + 6 * 8,
    "cross_attention_dim": 32,
}
"""As above, with attention inside and sizes as a condition."""


def unet(**config: Any) -> UNet2DConditionModel:
    config = {**UNET_CONFIG, "sample_size": 8, **config}
    outward = {"CrossAttnDownBlock2D": "CrossAttnUpBlock2D", "DownBlock2D": "UpBlock2D"}
    up_block_types = tuple(outward[name] for name in reversed(config["down_block_types"]))
    return awake(UNet2DConditionModel(up_block_types=up_block_types, **config))


def sd_parts() -> dict[str, Any]:
    """All that pipelines of Stable Diffusion 1 and 2 share, but denoiser and scheduler."""
    tokenizer = clip_tokenizer()
    return {
        "vae": sd_vae(),
        "text_encoder": clip_text_encoder(CLIPTextModel, tokenizer),
        "tokenizer": tokenizer,
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }


def sd15(cls: type = StableDiffusionPipeline, in_channels: int = 4) -> Any:
    torch.manual_seed(0)
    return cls(unet=unet(in_channels=in_channels), scheduler=ddim(), **sd_parts())


def sd2() -> StableDiffusionPipeline:
    torch.manual_seed(0)
    denoiser = unet(use_linear_projection=True, attention_head_dim=(1, 2))
    scheduler = ddim(prediction_type="v_prediction")
    return StableDiffusionPipeline(unet=denoiser, scheduler=scheduler, **sd_parts())


def controlnet(**config: Any) -> ControlNetModel:
    """A picture of 16 x 16 is brought down to the latents' 8 x 8, and shows."""
    config = {**UNET_CONFIG, "conditioning_embedding_out_channels": (8, 8), **config}
    module = awake(ControlNetModel(**config))
    module.controlnet_cond_embedding.conv_out.weight.data *= 20
    return module


def sd_controlnet() -> StableDiffusionControlNetPipeline:
    torch.manual_seed(0)
    return StableDiffusionControlNetPipeline(
        unet=unet(), controlnet=controlnet(), scheduler=ddim(), **sd_parts()
    )


def sdxl_parts() -> dict[str, Any]:
    """All that pipelines of Stable Diffusion XL share, but denoiser and scheduler."""
    tokenizer = clip_tokenizer()
    return {
        "vae": sd_vae(scaling_factor=0.13025, force_upcast=True),
        "text_encoder": clip_text_encoder(CLIPTextModel, tokenizer),
        "text_encoder_2": clip_text_encoder(CLIPTextModelWithProjection, tokenizer),
        "tokenizer": tokenizer,
        "tokenizer_2": tokenizer,
    }


def sdxl(cls: type = StableDiffusionXLPipeline) -> Any:
    torch.manual_seed(0)
    scheduler = EulerDiscreteScheduler(**BETAS, **LEADING)
    denoiser = unet(**XL_CONFIG)
    return cls(unet=denoiser, scheduler=scheduler, add_watermarker=False, **sdxl_parts())


def sdxl_dpm(**config: Any) -> StableDiffusionXLPipeline:
    pipe = sdxl()
    pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config, **config)
    return pipe


def sdxl_dpm_karras() -> StableDiffusionXLPipeline:
    return sdxl_dpm(use_karras_sigmas=True)


def sdxl_controlnet() -> StableDiffusionXLControlNetPipeline:
    torch.manual_seed(0)
    return StableDiffusionXLControlNetPipeline(
        unet=unet(**XL_CONFIG),
        controlnet=controlnet(**XL_CONFIG),
        scheduler=EulerDiscreteScheduler(**BETAS, **LEADING),
        add_watermarker=False,
        **sdxl_parts(),
    )


@cache
def letters_for_sentencepiece() -> TemporaryDirectory:
    """A folder with `tokenizer.model`, which a ChatGLM tokenizer reads when made and when saved."""
    folder = TemporaryDirectory()
    with (Path(folder.name) / "tokenizer.model").open("wb") as model:
        SentencePieceTrainer.train(
            sentence_iterator=iter([" ".join(string.ascii_lowercase)]),
            model_writer=model,
            model_type="char",
            vocab_size=30,
            minloglevel=2,
        )
    return folder


def chatglm_encoder(tokenizer: ChatGLMTokenizer) -> ChatGLMModel:
    config = ChatGLMConfig(
        num_layers=2,
        padded_vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        ffn_hidden_size=32,
        kv_channels=8,
        num_attention_heads=2,
        seq_length=256,
        add_qkv_bias=True,
        original_rope=True,
        multi_query_attention=True,
        multi_query_group_num=1,
    )
    encoder = ChatGLMModel(config)
    for name, parameter in encoder.named_parameters():  # ChatGLM leaves its memory as it was
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return encoder.eval()


def kolors() -> KolorsPipeline:
    torch.manual_seed(0)
    tokenizer = ChatGLMTokenizer(f"{letters_for_sentencepiece().name}/tokenizer.model")
    denoiser = unet(**XL_CONFIG, encoder_hid_dim_type="text_proj", encoder_hid_dim=16)
    return KolorsPipeline(
        unet=denoiser,
        vae=sd_vae(scaling_factor=0.13025),
        text_encoder=chatglm_encoder(tokenizer),
        tokenizer=tokenizer,
        scheduler=EulerDiscreteScheduler(
            **{**BETAS, "beta_end": 0.014}, **LEADING, num_train_timesteps=1100
        ),
    )


def pixart(cls: type, **config: Any) -> Any:
    torch.manual_seed(0)
    transformer = PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        cross_attention_dim=2 * 12,
        out_channels=2 * 4,  # a variance too, which the pipeline drops
        num_layers=2,
        patch_size=2,
        caption_channels=16,
        **config,
    )
    tokenizer = t5_tokenizer()
    return cls(
        transformer=awake(transformer),
        tokenizer=tokenizer,
        text_encoder=t5_encoder(tokenizer),
        vae=sd_vae(),
        scheduler=DPMSolverMultistepScheduler(),
    )


def pixart_alpha() -> PixArtAlphaPipeline:
    return pixart(PixArtAlphaPipeline, use_additional_conditions=True, sample_size=128)


def pixart_sigma() -> PixArtSigmaPipeline:
    return pixart(PixArtSigmaPipeline, use_additional_conditions=False, sample_size=8)


def sd_img2img() -> StableDiffusionImg2ImgPipeline:
    return sd15(StableDiffusionImg2ImgPipeline)


def sd_inpaint() -> StableDiffusionInpaintPipeline:
    return sd15(StableDiffusionInpaintPipeline, in_channels=4 + 1 + 4)


def sdxl_img2img() -> StableDiffusionXLImg2ImgPipeline:
    return sdxl(StableDiffusionXLImg2ImgPipeline)


def animatediff() -> AnimateDiffPipeline:
    torch.manual_seed(0)
    adapter = MotionAdapter(
        block_out_channels=UNET_CONFIG["block_out_channels"],
        motion_layers_per_block=1,
        motion_norm_num_groups=4,
        motion_num_attention_heads=2,
        motion_max_seq_length=8,
    )
    parts = sd_parts()
    pipe = AnimateDiffPipeline(
        vae=parts["vae"],
        text_encoder=parts["text_encoder"],
        tokenizer=parts["tokenizer"],
        unet=unet(),
        motion_adapter=adapter.eval(),
        scheduler=ddim(beta_schedule="linear"),
    )
    awake(pipe.unet)
    return pipe


def kandinsky3() -> Kandinsky3Pipeline:
    """With DDIM for the released DDPM, which draws noise of its own in every step."""
    torch.manual_seed(0)
    denoiser = Kandinsky3UNet(
        time_embedding_dim=16,
        groups=4,
        attention_head_dim=8,
        layers_per_block=2,
        block_out_channels=(16, 32),
        cross_attention_dim=16,
        encoder_hid_dim=16,
    )
    movq = VQModel(
        block_out_channels=(32, 32),  # its groups are 32
        down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
        up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=4,
        norm_type="spatial",
    )
    tokenizer = t5_tokenizer()
    return Kandinsky3Pipeline(
        unet=awake(denoiser),
        movq=movq.eval(),
        tokenizer=tokenizer,
        text_encoder=t5_encoder(tokenizer),
        scheduler=DDIMScheduler(beta_schedule="squaredcos_cap_v2", clip_sample=False),
    )


def svd() -> StableVideoDiffusionPipeline:
    torch.manual_seed(0)
    denoiser = UNetSpatioTemporalConditionModel(
        block_out_channels=(32, 32),  # its groups are 32
        layers_per_block=1,
        sample_size=8,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=16,
        num_attention_heads=2,
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=3 * 8,
        num_frames=3,
    )
    decoder = AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        layers_per_block=1,
    )
    encoder = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        projection_dim=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=224,  # the pipeline resizes to this, whatever the encoder asks for
        patch_size=112,
    )
    scheduler = EulerDiscreteScheduler(
        **BETAS,
        **LEADING,
        prediction_type="v_prediction",
        sigma_min=0.002,
        sigma_max=700.0,
        timestep_type="continuous",
        use_karras_sigmas=True,
    )
    return StableVideoDiffusionPipeline(
        vae=awake(decoder),
        image_encoder=CLIPVisionModelWithProjection(encoder).eval(),
        unet=awake(denoiser),
        scheduler=scheduler,
        feature_extractor=CLIPImageProcessor(),
    )


def mask() -> Image.Image:
    """White, to be repainted, on the right half."""
    canvas = Image.new("L", (16, 16), 0)
    canvas.paste(255, (8, 0, 16, 16))
    return canvas


TEXT = {**SIZE, **UNGUIDED}
VIDEO = {**SIZE, "num_frames": 3}
PIXART = {"use_resolution_binning": False, "clean_caption": False, "max_sequence_length": 16}

UNET: dict[str, Family] = {
    "sd-1.5": Family(label="Stable Diffusion 1.5", build=sd15, call=TEXT, guided=GUIDED),
    "sd-2": Family(label="Stable Diffusion 2, v-prediction", build=sd2, call=TEXT, guided=GUIDED),
    "sdxl": Family(label="Stable Diffusion XL", build=sdxl, call=TEXT, guided=GUIDED),
    "sdxl-dpm": Family(
        label="Stable Diffusion XL, DPM-Solver++", build=sdxl_dpm, call=TEXT, guided=GUIDED
    ),
    "sdxl-dpm-karras": Family(
        label="Stable Diffusion XL, DPM-Solver++ on Karras sigmas",
        build=sdxl_dpm_karras,
        call=TEXT,
        guided=GUIDED,
    ),
    "kolors": Family(label="Kolors", build=kolors, call=TEXT, guided=GUIDED),
    "pixart-sigma": Family(
        label="PixArt Sigma", build=pixart_sigma, call={**TEXT, **PIXART}, guided=GUIDED
    ),
    "pixart-alpha": Family(
        label="PixArt Alpha", build=pixart_alpha, call={**TEXT, **PIXART}, guided=GUIDED
    ),
    "sd-img2img": Family(
        label="Stable Diffusion 1.5, image to image",
        build=sd_img2img,
        call={**UNGUIDED, "image": picture(), "strength": 0.75},
        guided=GUIDED,
    ),
    "sd-inpaint": Family(
        label="Stable Diffusion 1.5, inpainting",
        build=sd_inpaint,
        call={**TEXT, "image": picture(), "mask_image": mask()},
        guided=GUIDED,
    ),
    "sd-controlnet": Family(
        label="Stable Diffusion 1.5, ControlNet",
        build=sd_controlnet,
        call={**TEXT, "image": picture()},
        guided=GUIDED,
    ),
    "sdxl-img2img": Family(
        label="Stable Diffusion XL, image to image",
        build=sdxl_img2img,
        call={**UNGUIDED, "image": picture(), "strength": 0.75},
        guided=GUIDED,
    ),
    "sdxl-controlnet": Family(
        label="Stable Diffusion XL, ControlNet",
        build=sdxl_controlnet,
        call={**TEXT, "image": picture()},
        guided=GUIDED,
    ),
    "animatediff": Family(
        label="AnimateDiff", build=animatediff, call={**VIDEO, **UNGUIDED}, guided=GUIDED
    ),
    "kandinsky-3": Family(label="Kandinsky 3, DDIM", build=kandinsky3, call=TEXT, guided=GUIDED),
    "svd": Family(
        label="Stable Video Diffusion",
        build=svd,
        call={**VIDEO, "image": picture(), "max_guidance_scale": 1.0},
        guided={"max_guidance_scale": 3.0},
    ),
}
