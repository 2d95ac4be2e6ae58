"""Video: LTX-Video, and LTX-2, which also makes audio."""

from typing import Any

from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTX2ImageToVideoPipeline,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
    LTXImageToVideoPipeline,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

from families.family import GUIDED, UNGUIDED, Family
from families.language_models import gemma3, gemma_tokenizer
from families.parts import DIT, flow_euler, picture, t5, text_parts


def ltx_scheduler() -> FlowMatchEulerDiscreteScheduler:
    return flow_euler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )


def ltx(cls: type = LTXPipeline) -> Any:
    vae = AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        down_block_types=("LTXVideoDownBlock3D",) * 3,
        spatio_temporal_scaling=(True, True, False),
        decoder_spatio_temporal_scaling=(True, True, False),
        layers_per_block=(1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        decoder_inject_noise=(False,) * 4,
        downsample_type=("conv",) * 3,
        upsample_residual=(False,) * 3,
        upsample_factor=(1, 1, 1),
    )
    return cls(
        transformer=LTXVideoTransformer3DModel(**DIT, cross_attention_dim=32, caption_channels=16),
        vae=vae,
        scheduler=ltx_scheduler(),
        **t5(),
    )


def ltx_image() -> LTXImageToVideoPipeline:
    return ltx(LTXImageToVideoPipeline)


def connectors() -> LTX2TextConnectors:
    """The connectors between the language model and the transformer."""
    config = {
        "connector_num_attention_heads": 2,
        "connector_attention_head_dim": 8,
        "connector_num_layers": 1,
        "connector_num_learnable_registers": 4,
    }
    both = {f"{modality}_{key}": v for modality in ("video", "audio") for key, v in config.items()}
    return LTX2TextConnectors(
        caption_channels=16,
        text_proj_in_factor=3,
        connector_rope_base_seq_len=32,
        rope_type="split",
        **both,
    )


def ltx2(cls: type = LTX2Pipeline) -> Any:
    """Video and audio are denoised together, each with its own scheduler."""
    transformer = LTX2VideoTransformer3DModel(
        **DIT,
        cross_attention_dim=32,
        vae_scale_factors=(4, 16, 16),
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
        caption_channels=16,
        rope_type="split",
    )
    vae = AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        down_block_types=("LTX2VideoDownBlock3D",) * 2,
        layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, True),
        decoder_spatio_temporal_scaling=(True, True),
        decoder_inject_noise=(False,) * 3,
        downsample_type=("spatiotemporal",) * 2,
        upsample_residual=(False,) * 2,
        upsample_factor=(1, 1),
    )
    audio_vae = AutoencoderKLLTX2Audio(
        base_channels=4,
        ch_mult=(1,),
        num_res_blocks=1,
        resolution=32,
        latent_channels=2,
        mel_bins=8,
    )
    vocoder = LTX2Vocoder(
        in_channels=16,
        hidden_channels=32,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
    )
    return cls(
        transformer=transformer,
        connectors=connectors(),
        vae=vae,
        audio_vae=audio_vae,
        vocoder=vocoder,
        scheduler=ltx_scheduler(),
        **text_parts(gemma3, gemma_tokenizer(padding_side="left")),
    )


def ltx2_image() -> LTX2ImageToVideoPipeline:
    return ltx2(LTX2ImageToVideoPipeline)


CALL = {"height": 32, "width": 32, "num_frames": 5, "max_sequence_length": 16, **UNGUIDED}
CALL_2 = {
    **CALL,
    "audio_guidance_scale": 1.0,
    "stg_scale": 0.0,
    "audio_stg_scale": 0.0,
    "spatio_temporal_guidance_blocks": None,
    "modality_scale": 1.0,
    "audio_modality_scale": 1.0,
    "guidance_rescale": 0.0,
    "audio_guidance_rescale": 0.0,
}
GUIDED_2 = {
    **GUIDED,
    "audio_guidance_scale": 7.0,
    "stg_scale": 1.0,
    "audio_stg_scale": 1.0,
    "spatio_temporal_guidance_blocks": [0],
    "modality_scale": 3.0,
    "audio_modality_scale": 3.0,
    "guidance_rescale": 0.7,
    "audio_guidance_rescale": 0.7,
}

VIDEO_LTX: dict[str, Family] = {
    "ltx": Family(label="LTX-Video", build=ltx, call=CALL, guided=GUIDED),
    "ltx-i2v": Family(
        label="LTX-Video image-to-video",
        build=ltx_image,
        call={**CALL, "image": picture(32, 32)},
        guided={**GUIDED, "guidance_rescale": 0.5},
    ),
    "ltx-2": Family(label="LTX-2 (video and audio)", build=ltx2, call=CALL_2, guided=GUIDED_2),
    "ltx-2-i2v": Family(
        label="LTX-2 image-to-video (video and audio)",
        build=ltx2_image,
        call={**CALL_2, "image": picture(32, 32), "image_crf": 0},
        guided=GUIDED_2,
    ),
}
