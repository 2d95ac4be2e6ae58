"""Text to image by flow matching, with Qwen2.5-VL, Qwen3 or Qwen3-VL as text encoder."""

from functools import partial
from typing import Any

import torch
from diffusers import (
    AdaptiveProjectedMixGuidance,
    AutoencoderKLHunyuanImage,
    AutoencoderKLQwenImage21,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    HunyuanImagePipeline,
    HunyuanImageTransformer2DModel,
    Kandinsky5T2IPipeline,
    Kandinsky5Transformer3DModel,
    Krea2Pipeline,
    Krea2Transformer2DModel,
    LongCatImagePipeline,
    LongCatImageTransformer2DModel,
    NucleusMoEImagePipeline,
    NucleusMoEImageTransformer2DModel,
    OvisImagePipeline,
    OvisImageTransformer2DModel,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers.pipelines.nucleusmoe_image.pipeline_nucleusmoe_image import DEFAULT_SYSTEM_PROMPT
from transformers import ByT5Tokenizer, Qwen3Model, Qwen3VLModel

from families.family import GUIDED, LARGER, NEGATIVE, SHORT, SIZE, TRUE_CFG, UNGUIDED, Family
from families.language_models import (
    learn_words,
    qwen2_5_vl,
    qwen2_vl_processor,
    qwen3,
    qwen3_vl,
    qwen3_vl_processor,
    qwen_tokenizer,
)
from families.parts import (
    DIT,
    FLUX,
    JOINT,
    clip,
    dynamic_flow_euler,
    flow_euler,
    t5_encoder,
    text_parts,
)
from families.vaes import STATISTICS, flux2_vae, qwen_vae, vae


def qwen_scheduler() -> Any:
    return dynamic_flow_euler(0.9, max_image_seq_len=8192, shift_terminal=0.02)


def qwen_image() -> QwenImagePipeline:
    pipe = QwenImagePipeline(
        transformer=QwenImageTransformer2DModel(**{**JOINT, "num_layers": 2}, out_channels=4),
        scheduler=qwen_scheduler(),
        vae=qwen_vae(),
        **text_parts(qwen2_5_vl, qwen_tokenizer()),
    )
    learn_words(pipe.tokenizer, pipe.prompt_template_encode)
    return pipe


def qwen_image21() -> QwenImage21Pipeline:
    tokenizer = qwen_tokenizer()
    transformer = QwenImage21Transformer2DModel(
        **DIT, context_in_dim=16, mlp_ratio=2, axes_dims_rope=(4, 6, 6)
    )
    autoencoder = AutoencoderKLQwenImage21(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        **STATISTICS,
    )
    return QwenImage21Pipeline(
        transformer=transformer,
        scheduler=qwen_scheduler(),
        vae=autoencoder,
        text_encoder=qwen3_vl(tokenizer),
        processor=qwen3_vl_processor(tokenizer),
    )


def z_image() -> ZImagePipeline:
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 32, 32],
    )
    return ZImagePipeline(
        transformer=transformer,
        scheduler=flow_euler(shift=6.0),
        vae=vae(),
        **text_parts(qwen3, qwen_tokenizer()),
    )


def flux2_transformer(guidance_embeds: bool) -> Flux2Transformer2DModel:
    """Takes three layers of the language model, of 16 channels each."""
    size = {**FLUX, "joint_attention_dim": 3 * 16, "axes_dims_rope": (4, 4, 4, 4)}
    return Flux2Transformer2DModel(
        **size, timestep_guidance_channels=16, guidance_embeds=guidance_embeds
    )


def flux2_klein() -> Flux2KleinPipeline:
    return Flux2KleinPipeline(
        transformer=flux2_transformer(guidance_embeds=False),
        scheduler=dynamic_flow_euler(shift=3.0),
        vae=flux2_vae(),
        **text_parts(qwen3, qwen_tokenizer(), layers=3),
    )


def hunyuan_image(distilled: bool = False) -> HunyuanImagePipeline:
    """Guidance is a component of the pipeline; the distilled model has a guidance embedding and
    MeanFlow instead."""
    transformer = HunyuanImageTransformer2DModel(
        **{**DIT, "attention_head_dim": 8},
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=16,
        text_embed_2_dim=16,
        rope_axes_dim=(4, 4),
        guidance_embeds=distilled,
        use_meanflow=distilled,
    )
    autoencoder = AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        spatial_compression_ratio=2,
        sample_size=16,
        scaling_factor=0.75,
    )
    guider = AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=1)
    pipe = HunyuanImagePipeline(
        transformer=transformer,
        scheduler=flow_euler(shift=4.0 if distilled else 5.0),
        vae=autoencoder,
        guider=None if distilled else guider,
        ocr_guider=None if distilled else guider,
        **text_parts(qwen2_5_vl, qwen_tokenizer()),
        **text_parts(t5_encoder, ByT5Tokenizer(), "_2"),
    )
    learn_words(pipe.tokenizer, pipe.prompt_template_encode)
    pipe.tokenizer_max_length = 48  # instead of 1000, to save time
    pipe.tokenizer_2_max_length = 16
    return pipe


def kandinsky5(cls: type, autoencoder: Any, **transformer: Any) -> Any:
    """Any Kandinsky 5 pipeline, also for video."""
    tokenizer = qwen_tokenizer()
    denoiser = Kandinsky5Transformer3DModel(
        in_text_dim=16,
        in_text_dim2=16,
        time_dim=16,
        model_dim=32,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=1,
        axes_dims=(4, 6, 6),
        **transformer,
    )
    pipe = cls(
        transformer=denoiser,
        scheduler=flow_euler(shift=3.0),
        vae=autoencoder,
        text_encoder=qwen2_5_vl(tokenizer),
        tokenizer=qwen2_vl_processor(tokenizer),
        **clip("_2", max_length=77),
    )
    learn_words(tokenizer, pipe.prompt_template)
    return pipe


def kandinsky5_image() -> Kandinsky5T2IPipeline:
    pipe = kandinsky5(Kandinsky5T2IPipeline, vae())
    pipe.resolutions = [(64, 64)]  # any other size is replaced by a listed one
    return pipe


def ovis_image() -> OvisImagePipeline:
    pipe = OvisImagePipeline(
        transformer=OvisImageTransformer2DModel(**FLUX, out_channels=16),
        scheduler=dynamic_flow_euler(shift=3.0),
        vae=vae(),
        **text_parts(qwen3, qwen_tokenizer(), cls=Qwen3Model),
    )
    learn_words(pipe.tokenizer, pipe.system_prompt)
    return pipe


def krea2() -> Krea2Pipeline:
    transformer = Krea2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        timestep_embed_dim=16,
        text_hidden_dim=16,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    pipe = Krea2Pipeline(
        transformer=transformer,
        scheduler=dynamic_flow_euler(max_image_seq_len=6400),
        vae=qwen_vae(),
        text_encoder_select_layers=(1, 2),
        **text_parts(qwen3_vl, qwen_tokenizer(), cls=Qwen3VLModel),
    )
    learn_words(pipe.tokenizer, pipe.prompt_template_encode_prefix)
    return pipe


def longcat_image() -> LongCatImagePipeline:
    """The pipeline requires latents of 16 channels."""
    tokenizer = qwen_tokenizer()
    transformer = LongCatImageTransformer2DModel(
        **{**FLUX, "in_channels": 4 * 16}, pooled_projection_dim=16
    )
    pipe = LongCatImagePipeline(
        transformer=transformer,
        scheduler=dynamic_flow_euler(shift=3.0),
        vae=vae(latent_channels=16),
        text_processor=qwen2_vl_processor(tokenizer),
        **text_parts(qwen2_5_vl, tokenizer),
    )
    learn_words(tokenizer, pipe.prompt_template_encode_prefix)
    pipe.tokenizer_max_length = 48  # instead of 512, to save time
    return pipe


def nucleus() -> NucleusMoEImagePipeline:
    """A dense block, then one with routed experts."""
    tokenizer = qwen_tokenizer()
    transformer = NucleusMoEImageTransformer2DModel(
        **{**JOINT, "num_layers": 2},
        out_channels=4,
        num_key_value_heads=1,
        dense_moe_strategy="leave_first_block_dense",
        num_experts=2,
        moe_intermediate_dim=16,
        capacity_factors=1.0,
    )
    experts = transformer.transformer_blocks[1].img_mlp.experts
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.25)
    learn_words(tokenizer, DEFAULT_SYSTEM_PROMPT)
    return NucleusMoEImagePipeline(
        transformer=transformer,
        scheduler=dynamic_flow_euler(),
        vae=qwen_vae(),
        text_encoder=qwen3_vl(tokenizer, layers=3),
        processor=qwen3_vl_processor(tokenizer),
    )


TRUE_UNGUIDED = {"true_cfg_scale": 1.0}

TEXT_TO_IMAGE_QWEN: dict[str, Family] = {
    "qwen-image": Family(
        label="Qwen-Image", build=qwen_image, call={**SIZE, **TRUE_UNGUIDED}, guided=TRUE_CFG
    ),
    "qwen-image-2.1": Family(
        label="Qwen-Image 2.1 (without its cache)",
        build=qwen_image21,
        call={**LARGER, "use_kv_cache": False, **TRUE_UNGUIDED},
        guided=TRUE_CFG,
    ),
    "z-image": Family(
        label="Z-Image",
        build=z_image,
        call={**SIZE, "max_sequence_length": 48, "guidance_scale": 0.0},
        guided=GUIDED,
    ),
    "flux2-klein": Family(
        label="FLUX.2 [klein]",
        build=flux2_klein,
        call={
            **SIZE,
            "max_sequence_length": 64,
            "text_encoder_out_layers": (1, 2, 3),
            **UNGUIDED,
        },
        guided={"guidance_scale": 4.0},
    ),
    "hunyuan-image": Family(
        label="HunyuanImage-2.1", build=hunyuan_image, call={**SIZE, **NEGATIVE}
    ),
    "hunyuan-image-distilled": Family(
        label="HunyuanImage-2.1 (distilled)",
        build=partial(hunyuan_image, distilled=True),
        call=SIZE,
    ),
    "kandinsky-5-image": Family(
        label="Kandinsky 5.0 text-to-image",
        build=kandinsky5_image,
        call={**LARGER, **UNGUIDED},
        guided=GUIDED,
    ),
    "ovis-image": Family(
        label="Ovis-Image", build=ovis_image, call={**SHORT, **UNGUIDED}, guided=GUIDED
    ),
    "krea2": Family(
        label="Krea 2",
        build=krea2,
        call={**SIZE, "max_sequence_length": 48, "guidance_scale": 0.0},
        guided=GUIDED,
    ),
    "longcat-image": Family(
        label="LongCat-Image",
        build=longcat_image,
        call={**SIZE, "enable_prompt_rewrite": False, **UNGUIDED},
        guided=GUIDED,
    ),
    "nucleus-image": Family(
        label="NucleusMoE-Image",
        build=nucleus,
        call={**SIZE, "return_index": -2, **UNGUIDED},
        guided=GUIDED,
    ),
}
