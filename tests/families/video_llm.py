"""Video with other language models: SANA-Video, Kandinsky 5.0, EasyAnimate, Motif-Video."""

from functools import partial

from diffusers import (
    AdaptiveProjectedGuidance,
    AutoencoderKLMagvit,
    EasyAnimatePipeline,
    EasyAnimateTransformer3DModel,
    Kandinsky5I2VPipeline,
    Kandinsky5T2VPipeline,
    MotifVideoPipeline,
    MotifVideoTransformer3DModel,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
)

from families.family import GUIDED, SHORT, SIZE, UNGUIDED, Family
from families.language_models import (
    gemma2,
    gemma_tokenizer,
    qwen2_vl,
    qwen_tokenizer,
    t5gemma2_encoder,
)
from families.parts import DIT, flow_dpm, flow_euler, picture, text_parts
from families.text_to_image_llm import SANA
from families.text_to_image_qwen import kandinsky5
from families.vaes import hunyuan_vae, wan_vae


def sana_video() -> SanaVideoPipeline:
    transformer = SanaVideoTransformer3DModel(
        **{**DIT, "attention_head_dim": 12},
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=16,
        rope_max_seq_len=32,
    )
    return SanaVideoPipeline(
        transformer=transformer,
        vae=wan_vae(),
        scheduler=flow_dpm(shift=8.0),
        **text_parts(gemma2, gemma_tokenizer()),
    )


def kandinsky5_video() -> Kandinsky5T2VPipeline:
    return kandinsky5(Kandinsky5T2VPipeline, hunyuan_vae(), visual_cond=True)


def kandinsky5_from_picture() -> Kandinsky5I2VPipeline:
    return kandinsky5(Kandinsky5I2VPipeline, hunyuan_vae(), visual_cond=True)


def easyanimate() -> EasyAnimatePipeline:
    transformer = EasyAnimateTransformer3DModel(
        **{**DIT, "num_layers": 2},
        patch_size=2,
        time_embed_dim=8,
        text_embed_dim=16,
        mmdit_layers=1,
    )
    autoencoder = AutoencoderKLMagvit(
        latent_channels=4,
        down_block_types=("SpatialDownBlock3D",) + ("SpatialTemporalDownBlock3D",) * 2,
        up_block_types=("SpatialUpBlock3D",) + ("SpatialTemporalUpBlock3D",) * 2,
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        spatial_group_norm=False,
    )
    return EasyAnimatePipeline(
        transformer=transformer,
        vae=autoencoder,
        scheduler=flow_euler(shift=5.0),
        **text_parts(qwen2_vl, qwen_tokenizer(), layers=3),
    )


def motif_video(guidance_scale: float = 1.0) -> MotifVideoPipeline:
    """Guidance is a component of this pipeline, not an argument of its call."""
    transformer = MotifVideoTransformer3DModel(
        **{**DIT, "in_channels": 9, "attention_head_dim": 12},
        num_single_layers=2,
        num_decoder_layers=1,
        text_embed_dim=16,
        rope_axes_dim=(4, 4, 4),
        enable_text_cross_attention_dual=True,
        enable_text_cross_attention_single=True,
    )
    return MotifVideoPipeline(
        transformer=transformer,
        vae=wan_vae(),
        scheduler=flow_euler(shift=7.0),
        guider=AdaptiveProjectedGuidance(guidance_scale=guidance_scale),
        **text_parts(t5gemma2_encoder, gemma_tokenizer()),
    )


VIDEO_LLM: dict[str, Family] = {
    "sana-video": Family(
        label="SANA-Video",
        build=sana_video,
        call={**SANA, "frames": 5},
        guided=GUIDED,
    ),
    "kandinsky-5": Family(
        label="Kandinsky 5.0 text-to-video",
        build=kandinsky5_video,
        call={**SHORT, "num_frames": 5, **UNGUIDED},
        guided=GUIDED,
    ),
    "kandinsky-5-i2v": Family(
        label="Kandinsky 5.0 image-to-video",
        build=kandinsky5_from_picture,
        call={**SHORT, "num_frames": 17, "image": picture(), **UNGUIDED},
        guided=GUIDED,
    ),
    "easyanimate": Family(
        label="EasyAnimate",
        build=easyanimate,
        call={**SIZE, "num_frames": 5, **UNGUIDED},
        guided=GUIDED,
    ),
    "motif-video": Family(label="Motif-Video", build=motif_video, call={**SHORT, "num_frames": 5}),
    "motif-video-guided": Family(
        label="Motif-Video (guided)",
        build=partial(motif_video, guidance_scale=8.0),
        call={**SHORT, "num_frames": 5},
    ),
}
