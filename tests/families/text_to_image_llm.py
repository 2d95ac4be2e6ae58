"""Text to image by flow matching, with Gemma, GLM, Mistral 3 or SmolLM3 as text encoder."""

import torch
from diffusers import (
    AutoencoderDC,
    BriaFiboPipeline,
    BriaFiboTransformer2DModel,
    CogView4Pipeline,
    CogView4Transformer2DModel,
    ErnieImagePipeline,
    ErnieImageTransformer2DModel,
    Flux2Pipeline,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    LuminaNextDiT2DModel,
    LuminaPipeline,
    PRXPipeline,
    PRXTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
)
from transformers import Mistral3Model

from families.family import GUIDED, LARGER, SHORT, SIZE, UNGUIDED, Family
from families.language_models import (
    gemma,
    gemma2,
    gemma_tokenizer,
    glm,
    learn_words,
    mistral3,
    pixtral_processor,
    plain_tokenizer,
    smollm3,
    t5gemma_encoder,
)
from families.parts import DIT, dynamic_flow_euler, flow_dpm, flow_euler, text_parts
from families.text_to_image_qwen import flux2_transformer
from families.vaes import PATCHED, flux2_vae, vae, wan_vae


def flux2() -> Flux2Pipeline:
    tokenizer = plain_tokenizer()
    pipe = Flux2Pipeline(
        transformer=flux2_transformer(guidance_embeds=True),
        scheduler=dynamic_flow_euler(shift=3.0),
        vae=flux2_vae(),
        text_encoder=mistral3(tokenizer, layers=3),
        tokenizer=pixtral_processor(tokenizer),
    )
    learn_words(tokenizer, pipe.system_message)
    return pipe


def lumina() -> LuminaPipeline:
    transformer = LuminaNextDiT2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=16,
        num_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        cross_attention_dim=16,
    )
    torch.nn.init.normal_(transformer.pad_token)
    return LuminaPipeline(
        transformer=transformer,
        scheduler=flow_euler(),
        vae=vae(),
        **text_parts(gemma, gemma_tokenizer()),
    )


def lumina2() -> Lumina2Pipeline:
    transformer = Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=36,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=2,
        axes_dim_rope=(4, 4, 4),
        axes_lens=(128, 32, 32),
        cap_feat_dim=16,
    )
    pipe = Lumina2Pipeline(
        transformer=transformer,
        scheduler=flow_euler(shift=6.0),
        vae=vae(),
        **text_parts(gemma2, gemma_tokenizer()),
    )
    learn_words(pipe.tokenizer, pipe.system_prompt)
    return pipe


def sana() -> SanaPipeline:
    transformer = SanaTransformer2DModel(
        **DIT,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=16,
        sample_size=32,
    )
    autoencoder = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    return SanaPipeline(
        transformer=transformer,
        scheduler=flow_dpm(),
        vae=autoencoder,
        **text_parts(gemma2, gemma_tokenizer()),
    )


def prx() -> PRXPipeline:
    transformer = PRXTransformer2DModel(
        in_channels=4,
        context_in_dim=16,
        hidden_size=16,
        mlp_ratio=2.0,
        num_heads=2,
        depth=1,
        axes_dim=[4, 4],
    )
    return PRXPipeline(
        transformer=transformer,
        scheduler=flow_euler(shift=3.0),
        vae=vae(),
        **text_parts(t5gemma_encoder, gemma_tokenizer()),
    )


def cogview4() -> CogView4Pipeline:
    transformer = CogView4Transformer2DModel(
        **{**DIT, "num_layers": 2},
        text_embed_dim=16,
        time_embed_dim=8,
        condition_dim=4,
        rope_axes_dim=(8, 8),
        sample_size=8,
    )
    scheduler = flow_euler(
        use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
    )
    return CogView4Pipeline(
        transformer=transformer,
        scheduler=scheduler,
        vae=vae(),
        **text_parts(glm, plain_tokenizer()),
    )


def bria_fibo() -> BriaFiboPipeline:
    """The pipeline assumes 16 x 16 image pixels per latent pixel."""
    transformer = BriaFiboTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        text_encoder_dim=16,
        axes_dims_rope=[4, 6, 6],
    )
    autoencoder = wan_vae(
        **PATCHED,
        dim_mult=[1, 1, 1, 1],
        temperal_downsample=[False, True, True],
        scale_factor_spatial=16,
    )
    return BriaFiboPipeline(
        transformer=transformer,
        scheduler=dynamic_flow_euler(shift=3.0),
        vae=autoencoder,
        **text_parts(smollm3, plain_tokenizer(padding_side="right")),
    )


def ernie_image() -> ErnieImagePipeline:
    """Without the optional language model that rewrites prompts."""
    transformer = ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=1,
        ffn_hidden_size=32,
        in_channels=16,
        out_channels=16,
        text_in_dim=16,
        rope_axes_dim=(4, 6, 6),
    )
    return ErnieImagePipeline(
        transformer=transformer,
        scheduler=flow_euler(shift=3.0),
        vae=flux2_vae(),
        **text_parts(mistral3, plain_tokenizer(), cls=Mistral3Model, text_type="ministral3"),
    )


SANA = {
    "height": 32,
    "width": 32,
    "max_sequence_length": 16,
    "use_resolution_binning": False,
    "complex_human_instruction": None,
    **UNGUIDED,
}
LUMINA2 = {**LARGER, "max_sequence_length": 96, **UNGUIDED}

TEXT_TO_IMAGE_LLM: dict[str, Family] = {
    "flux2": Family(
        label="FLUX.2",
        build=flux2,
        call={**SIZE, "max_sequence_length": 128, "text_encoder_out_layers": (1, 2, 3)},
    ),
    "lumina": Family(
        label="Lumina-Next",
        build=lumina,
        call={**LARGER, "max_sequence_length": 16, "clean_caption": False, **UNGUIDED},
        guided=GUIDED,
    ),
    "lumina2": Family(label="Lumina-Image 2.0", build=lumina2, call=LUMINA2, guided=GUIDED),
    "lumina2-truncated": Family(
        label="Lumina-Image 2.0 (guided in half the steps)",
        build=lumina2,
        call=LUMINA2,
        guided={**GUIDED, "cfg_trunc_ratio": 0.5},
    ),
    "sana": Family(
        label="SANA",
        build=sana,
        call=SANA,
        guided=GUIDED,
    ),
    "prx": Family(
        label="PRX",
        build=prx,
        call={
            **SIZE,
            "use_resolution_binning": False,
            "tokenizer_max_length": 16,
            **UNGUIDED,
        },
        guided=GUIDED,
    ),
    "cogview4": Family(label="CogView4", build=cogview4, call={**SHORT, **UNGUIDED}, guided=GUIDED),
    "bria-fibo": Family(
        label="BRIA FIBO", build=bria_fibo, call={**LARGER, **UNGUIDED}, guided=GUIDED
    ),
    "ernie-image": Family(
        label="ERNIE-Image", build=ernie_image, call={**SIZE, **UNGUIDED}, guided=GUIDED
    ),
}
