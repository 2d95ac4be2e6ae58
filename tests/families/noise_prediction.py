"""Other pipelines that predict noise or v: Kolors, Kandinsky 3, SVD, PixArt, Hunyuan-DiT, ..."""

import string
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from diffusers import (
    AutoencoderKLTemporalDecoder,
    CogVideoXDDIMScheduler,
    CogView3PlusPipeline,
    CogView3PlusTransformer2DModel,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    HunyuanDiT2DModel,
    HunyuanDiTPipeline,
    Kandinsky3Pipeline,
    Kandinsky3UNet,
    KolorsPipeline,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    StableVideoDiffusionPipeline,
    UNetSpatioTemporalConditionModel,
    VQModel,
)
from diffusers.pipelines.kolors import ChatGLMModel, ChatGLMTokenizer
from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig
from sentencepiece import SentencePieceTrainer
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

from families.family import GUIDED, LARGER, SHORT, SIZE, UNGUIDED, Family
from families.language_models import EYES, bert, bert_tokenizer
from families.parts import DIT, picture, t5, text_parts
from families.stable_diffusion import BETAS, LEADING, XL_UNET, ddim, unet
from families.vaes import levels, sd_vae, vae


@cache
def letters_for_sentencepiece() -> TemporaryDirectory:
    """A folder with `tokenizer.model`, read when a ChatGLM tokenizer is made and saved."""
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


def chatglm(tokenizer: ChatGLMTokenizer) -> ChatGLMModel:
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
    for name, parameter in encoder.named_parameters():  # ChatGLM does not initialize its weights
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return encoder


def kolors() -> KolorsPipeline:
    tokenizer = ChatGLMTokenizer(f"{letters_for_sentencepiece().name}/tokenizer.model")
    scheduler = EulerDiscreteScheduler(
        **{**BETAS, "beta_end": 0.014}, **LEADING, num_train_timesteps=1100
    )
    return KolorsPipeline(
        unet=unet(**XL_UNET, encoder_hid_dim_type="text_proj", encoder_hid_dim=16),
        vae=sd_vae(scaling_factor=0.13025),
        scheduler=scheduler,
        **text_parts(chatglm, tokenizer),
    )


def kandinsky3() -> Kandinsky3Pipeline:
    """With DDIM instead of the released DDPM, which draws its own noise in every step."""
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
        block_out_channels=(32, 32),  # it normalizes in 32 groups
        down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
        up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=4,
        norm_type="spatial",
    )
    return Kandinsky3Pipeline(
        unet=denoiser,
        movq=movq,
        scheduler=DDIMScheduler(beta_schedule="squaredcos_cap_v2", clip_sample=False),
        **t5(),
    )


def svd() -> StableVideoDiffusionPipeline:
    denoiser = UNetSpatioTemporalConditionModel(
        block_out_channels=(32, 32),  # it normalizes in 32 groups
        layers_per_block=1,
        sample_size=8,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=16,
        num_attention_heads=2,
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=3 * 8,
        num_frames=2,
    )
    decoder = AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        layers_per_block=1,
    )
    # The pipeline resizes images to 224 x 224, whatever the encoder needs.
    eyes = CLIPVisionConfig(**{**EYES, "image_size": 224, "patch_size": 112}, projection_dim=16)
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
        vae=decoder,
        image_encoder=CLIPVisionModelWithProjection(eyes),
        unet=denoiser,
        scheduler=scheduler,
        feature_extractor=CLIPImageProcessor(),
    )


def pixart(cls: type, **config: Any) -> Any:
    """Its transformer also predicts a variance, which the pipeline drops."""
    transformer = PixArtTransformer2DModel(
        **{**DIT, "attention_head_dim": 12, "out_channels": 2 * 4},
        cross_attention_dim=24,
        patch_size=2,
        caption_channels=16,
        **config,
    )
    return cls(
        transformer=transformer, vae=sd_vae(), scheduler=DPMSolverMultistepScheduler(), **t5()
    )


def pixart_alpha() -> PixArtAlphaPipeline:
    return pixart(PixArtAlphaPipeline, use_additional_conditions=True, sample_size=128)


def pixart_sigma() -> PixArtSigmaPipeline:
    return pixart(PixArtSigmaPipeline, use_additional_conditions=False, sample_size=8)


def hunyuan_dit() -> HunyuanDiTPipeline:
    """Four blocks, so that the last has a skip connection; DDIM instead of the released DDPM."""
    transformer = HunyuanDiT2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=2,
        hidden_size=16,
        mlp_ratio=2.0,
        cross_attention_dim=16,
        cross_attention_dim_t5=16,
        pooled_projection_dim=16,
        use_style_cond_and_image_meta_size=False,
    )
    return HunyuanDiTPipeline(
        transformer=transformer,
        scheduler=ddim(beta_end=0.018, prediction_type="v_prediction"),
        vae=vae(**levels(4, channels=4), shift_factor=None),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        **text_parts(bert, bert_tokenizer()),
        **t5("_2"),
    )


def cogview3_plus() -> CogView3PlusPipeline:
    transformer = CogView3PlusTransformer2DModel(
        **DIT,
        text_embed_dim=16,
        time_embed_dim=8,
        condition_dim=4,
        pos_embed_max_size=8,
        sample_size=8,
    )
    scheduler = CogVideoXDDIMScheduler(
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        set_alpha_to_one=True,
        snr_shift_scale=4.0,
        timestep_spacing="trailing",
    )
    return CogView3PlusPipeline(transformer=transformer, scheduler=scheduler, vae=vae(), **t5())


TEXT = {**SIZE, **UNGUIDED}
PIXART = {**SHORT, "use_resolution_binning": False, "clean_caption": False, **UNGUIDED}

NOISE_PREDICTION: dict[str, Family] = {
    "kolors": Family(label="Kolors", build=kolors, call=TEXT, guided=GUIDED),
    "kandinsky-3": Family(label="Kandinsky 3 (DDIM)", build=kandinsky3, call=TEXT, guided=GUIDED),
    "svd": Family(
        label="Stable Video Diffusion",
        build=svd,
        call={**SIZE, "num_frames": 2, "image": picture(), "max_guidance_scale": 1.0},
        guided={"max_guidance_scale": 3.0},
    ),
    "pixart-alpha": Family(label="PixArt-α", build=pixart_alpha, call=PIXART, guided=GUIDED),
    "pixart-sigma": Family(label="PixArt-Σ", build=pixart_sigma, call=PIXART, guided=GUIDED),
    "hunyuan-dit": Family(
        label="Hunyuan-DiT (DDIM)",
        build=hunyuan_dit,
        call={**LARGER, "use_resolution_binning": False, **UNGUIDED},
        guided=GUIDED,
    ),
    "cogview3-plus": Family(
        label="CogView3-Plus", build=cogview3_plus, call={**SHORT, **UNGUIDED}, guided=GUIDED
    ),
}
