"""Video pipelines with tiny random weights: those that read a language model, and all families."""

from typing import Any

import torch
from diffusers import (
    AdaptiveProjectedGuidance,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    AutoencoderKLMagvit,
    ClassifierFreeGuidance,
    DPMSolverMultistepScheduler,
    EasyAnimatePipeline,
    EasyAnimateTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoImageToVideoPipeline,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    Kandinsky5I2VPipeline,
    Kandinsky5T2VPipeline,
    Kandinsky5Transformer3DModel,
    LTX2ImageToVideoPipeline,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
    MotifVideoPipeline,
    MotifVideoTransformer3DModel,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from transformers import (
    AddedToken,
    ByT5Tokenizer,
    CLIPImageProcessor,
    CLIPTextModel,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLTextModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Gemma2Encoder,
    T5Gemma2EncoderConfig,
)

from families.family import Family
from families.language_models import (
    gemma2,
    gemma3,
    gemma_tokenizer,
    learn_words,
    llama,
    llama_tokenizer,
    qwen2_5_vl,
    qwen2_vl_processor,
    qwen_tokenizer,
    size,
)
from families.parts import clip_text_encoder, clip_tokenizer, picture, t5_encoder
from families.text_to_image import lively
from families.video_parts import (
    EYES,
    allegro,
    cogvideox,
    cogvideox_image,
    cosmos2_image,
    latte,
    ltx,
    ltx_image,
    ltx_scheduler,
    lucy,
    mochi,
    skyreels,
    wan_21,
    wan_21_image,
    wan_22,
    wan_22_5b,
    wan_22_5b_image,
    wan_22_image,
    wan_vace,
    wan_vae,
    wan_video,
)


def clip_of(frames: int, seed: int = 0) -> list[Any]:
    """Pictures of noise, one a frame."""
    return [picture(seed=seed + i) for i in range(frames)]


def sana_video() -> SanaVideoPipeline:
    torch.manual_seed(0)
    tokenizer = gemma_tokenizer()
    transformer = SanaVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=16,
        rope_max_seq_len=32,
    )
    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0
    )
    return SanaVideoPipeline(
        transformer=lively(transformer),
        vae=wan_vae(),
        scheduler=scheduler,
        text_encoder=gemma2(tokenizer),
        tokenizer=tokenizer,
    )


def ltx2(cls: type = LTX2Pipeline) -> Any:
    """Video and audio are denoised together, each with a scheduler of its own."""
    torch.manual_seed(0)
    tokenizer = gemma_tokenizer(padding_side="left")
    transformer = LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        vae_scale_factors=(4, 16, 16),
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
        num_layers=2,
        caption_channels=16,
        rope_type="split",
    )
    connectors = LTX2TextConnectors(
        caption_channels=16,
        text_proj_in_factor=3,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=8,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=4,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=4,
        connector_rope_base_seq_len=32,
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
        transformer=lively(transformer),
        connectors=lively(connectors),
        vae=vae.eval(),
        audio_vae=audio_vae.eval(),
        vocoder=vocoder.eval(),
        scheduler=ltx_scheduler(),
        text_encoder=gemma3(tokenizer),
        tokenizer=tokenizer,
    )


def ltx2_image() -> LTX2ImageToVideoPipeline:
    return ltx2(LTX2ImageToVideoPipeline)


def hunyuan_vae() -> AutoencoderKLHunyuanVideo:
    """A latent pixel is 4 x 4 picture pixels of 4 frames."""
    return AutoencoderKLHunyuanVideo(
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 3,
        up_block_types=("HunyuanVideoUpBlock3D",) * 3,
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        spatial_compression_ratio=4,
    ).eval()


def hunyuan_transformer(**config: Any) -> HunyuanVideoTransformer3DModel:
    defaults = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "text_embed_dim": 16,
        "pooled_projection_dim": 16,
        "rope_axes_dim": (4, 4, 4),
    }
    return lively(HunyuanVideoTransformer3DModel(**{**defaults, **config}))


def clip_77() -> dict[str, Any]:
    """The second text encoder, with as many positions as those pipelines ask for."""
    tokenizer = clip_tokenizer(77)
    return {
        "text_encoder_2": clip_text_encoder(CLIPTextModel, tokenizer),
        "tokenizer_2": tokenizer,
    }


def hunyuan() -> HunyuanVideoPipeline:
    torch.manual_seed(0)
    tokenizer = llama_tokenizer()
    return HunyuanVideoPipeline(
        transformer=hunyuan_transformer(),
        vae=hunyuan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder=llama(tokenizer, LlamaModel, layers=3),
        tokenizer=tokenizer,
        **clip_77(),
    )


def hunyuan_image(condition: str = "token_replace") -> HunyuanVideoImageToVideoPipeline:
    """`condition` says how the first frame enters: in place of noise, or as further channels."""
    torch.manual_seed(0)
    tokenizer = llama_tokenizer()
    llava = LlavaConfig(
        text_config=LlamaConfig(**size(tokenizer, layers=3)),
        vision_config=CLIPVisionConfig(**EYES),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    transformer = hunyuan_transformer(
        in_channels=9 if condition == "latent_concat" else 4,
        guidance_embeds=False,
        image_condition_type=condition,
    )
    sides = {"height": 16, "width": 16}
    return HunyuanVideoImageToVideoPipeline(
        transformer=transformer,
        vae=hunyuan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder=LlavaForConditionalGeneration(llava).eval(),
        tokenizer=tokenizer,
        image_processor=CLIPImageProcessor(size=sides, crop_size=sides),
        **clip_77(),
    )


def hunyuan_image_concat() -> HunyuanVideoImageToVideoPipeline:
    return hunyuan_image("latent_concat")


def hunyuan_15_parts(guidance_scale: float) -> dict[str, Any]:
    """Its VAE decodes one video only; that it shall do so each in turn is not saved."""
    tokenizer = qwen_tokenizer()
    byt5 = ByT5Tokenizer()
    transformer = HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=16,
        text_embed_2_dim=16,
        image_embed_dim=16,
        rope_axes_dim=(2, 2, 4),
        target_size=16,
    )
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        spatial_compression_ratio=4,
        downsample_match_channel=False,
        upsample_match_channel=False,
    )
    vae.enable_slicing()
    return {
        "transformer": lively(transformer),
        "vae": vae.eval(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
        "text_encoder": qwen2_5_vl(tokenizer, Qwen2_5_VLTextModel, layers=3),
        "tokenizer": tokenizer,
        "text_encoder_2": t5_encoder(byt5),
        "tokenizer_2": byt5,
        "guider": ClassifierFreeGuidance(guidance_scale=guidance_scale),
    }


def with_short_texts(pipe: Any) -> Any:
    """Fewer tokens than the 2,000 that the pipeline always makes; what is saved does not know."""
    pipe.tokenizer_max_length = 48
    pipe.tokenizer_2_max_length = 8
    pipe.vision_num_semantic_tokens = 4
    learn_words(pipe.tokenizer, pipe.system_message)
    pipe.tokenizer.add_tokens(AddedToken(" " * 9, normalized=False))
    return pipe


def hunyuan_15(guidance_scale: float = 1.0) -> HunyuanVideo15Pipeline:
    """Guidance is a part of this pipeline, no argument of its call."""
    torch.manual_seed(0)
    return with_short_texts(HunyuanVideo15Pipeline(**hunyuan_15_parts(guidance_scale)))


def hunyuan_15_guided() -> HunyuanVideo15Pipeline:
    return hunyuan_15(guidance_scale=6.0)


def hunyuan_15_image(guidance_scale: float = 1.0) -> HunyuanVideo15ImageToVideoPipeline:
    torch.manual_seed(0)
    pipe = HunyuanVideo15ImageToVideoPipeline(
        image_encoder=SiglipVisionModel(SiglipVisionConfig(**EYES)).eval(),
        feature_extractor=SiglipImageProcessor(size={"height": 16, "width": 16}),
        **hunyuan_15_parts(guidance_scale),
    )
    return with_short_texts(pipe)


def kandinsky5(cls: type = Kandinsky5T2VPipeline) -> Any:
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    transformer = Kandinsky5Transformer3DModel(
        in_text_dim=16,
        in_text_dim2=16,
        time_dim=16,
        model_dim=24,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 4, 4),
        visual_cond=True,
    )
    pipe = cls(
        transformer=lively(transformer),
        vae=hunyuan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder=qwen2_5_vl(tokenizer),
        tokenizer=qwen2_vl_processor(tokenizer),
        **clip_77(),
    )
    learn_words(tokenizer, pipe.prompt_template)
    return pipe


def kandinsky5_image() -> Kandinsky5I2VPipeline:
    return kandinsky5(Kandinsky5I2VPipeline)


def easyanimate() -> EasyAnimatePipeline:
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6}
    config = Qwen2VLConfig(
        text_config={**size(tokenizer, layers=3), "rope_parameters": rope},
        vision_config={
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": 16,
            "num_heads": 2,
            "patch_size": 4,
        },
    )
    transformer = EasyAnimateTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        patch_size=2,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        mmdit_layers=1,
    )
    vae = AutoencoderKLMagvit(
        latent_channels=4,
        down_block_types=("SpatialDownBlock3D",) + ("SpatialTemporalDownBlock3D",) * 2,
        up_block_types=("SpatialUpBlock3D",) + ("SpatialTemporalUpBlock3D",) * 2,
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        spatial_group_norm=False,
    )
    return EasyAnimatePipeline(
        transformer=lively(transformer),
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder=Qwen2VLForConditionalGeneration(config).eval(),
        tokenizer=tokenizer,
    )


def motif_video(guidance_scale: float = 1.0) -> MotifVideoPipeline:
    """Guidance is a part of this pipeline, no argument of its call."""
    torch.manual_seed(0)
    tokenizer = gemma_tokenizer()
    config = T5Gemma2EncoderConfig(
        text_config={**size(tokenizer, layers=2), "dropout_rate": 0.0},
        vision_config=EYES,
        mm_tokens_per_image=4,
    )
    transformer = MotifVideoTransformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=1,
        num_single_layers=2,
        num_decoder_layers=1,
        text_embed_dim=16,
        rope_axes_dim=(4, 4, 4),
        enable_text_cross_attention_dual=True,
        enable_text_cross_attention_single=True,
    )
    return MotifVideoPipeline(
        transformer=lively(transformer),
        vae=wan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder=T5Gemma2Encoder(config).eval(),
        tokenizer=tokenizer,
        guider=AdaptiveProjectedGuidance(guidance_scale=guidance_scale),
    )


def motif_video_guided() -> MotifVideoPipeline:
    return motif_video(guidance_scale=8.0)


SIDES = {"height": 16, "width": 16}
SIZE = {**SIDES, "num_frames": 5}
TEXT = {"max_sequence_length": 12}
UNGUIDED = {**TEXT, "guidance_scale": 1.0}
GUIDED = {"guidance_scale": 4.0, "negative_prompt": "blurry"}
TRUE_GUIDED = {"true_cfg_scale": 4.0, "negative_prompt": "blurry"}
EXPERTS_GUIDED = {**GUIDED, "guidance_scale_2": 3.0}
WAN = {**SIZE, **UNGUIDED}
LTX = {**UNGUIDED, "height": 32, "width": 32, "num_frames": 5}
LTX2 = {
    **LTX,
    "audio_guidance_scale": 1.0,
    "stg_scale": 0.0,
    "audio_stg_scale": 0.0,
    "spatio_temporal_guidance_blocks": None,
    "modality_scale": 1.0,
    "audio_modality_scale": 1.0,
    "guidance_rescale": 0.0,
    "audio_guidance_rescale": 0.0,
}
LTX2_GUIDED = {
    "guidance_scale": 3.0,
    "audio_guidance_scale": 7.0,
    "negative_prompt": "blurry",
    "stg_scale": 1.0,
    "audio_stg_scale": 1.0,
    "spatio_temporal_guidance_blocks": [1],
    "modality_scale": 3.0,
    "audio_modality_scale": 3.0,
    "guidance_rescale": 0.7,
    "audio_guidance_rescale": 0.7,
}
HUNYUAN_IMAGE = {
    **SIZE,
    "max_sequence_length": 64,
    "image": picture(),
    "prompt_template": {
        "template": "<image>{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>",
        "crop_start": 2,
        "image_emb_start": 1,
        "image_emb_end": 5,
        "image_emb_len": 4,
    },
}

VIDEO: dict[str, Family] = {
    "wan-2.1": Family(label="Wan 2.1", build=wan_21, call=WAN, guided=GUIDED),
    "wan-2.1-i2v": Family(
        label="Wan 2.1, image to video",
        build=wan_21_image,
        call={**WAN, "image": picture()},
        guided=GUIDED,
    ),
    "wan-2.2": Family(
        label="Wan 2.2, two experts",
        build=wan_22,
        call=WAN,
        guided=EXPERTS_GUIDED,
    ),
    "wan-2.2-i2v": Family(
        label="Wan 2.2, two experts, image to video",
        build=wan_22_image,
        call={**WAN, "image": picture()},
        guided=EXPERTS_GUIDED,
    ),
    "wan-2.2-5b": Family(label="Wan 2.2 5B", build=wan_22_5b, call=WAN, guided=GUIDED),
    "wan-2.2-5b-i2v": Family(
        label="Wan 2.2 5B, image to video",
        build=wan_22_5b_image,
        call={**WAN, "image": picture()},
        guided=GUIDED,
    ),
    "wan-vace": Family(
        label="Wan VACE",
        build=wan_vace,
        call={
            **WAN,
            "video": clip_of(5),
            "mask": clip_of(5, seed=9),
            "reference_images": [picture(seed=5)],
        },
        guided=GUIDED,
    ),
    "ltx": Family(
        label="LTX",
        build=ltx,
        call=LTX,
        guided=GUIDED,
    ),
    "ltx-i2v": Family(
        label="LTX, image to video",
        build=ltx_image,
        call={**LTX, "image": picture(32, 32)},
        guided={**GUIDED, "guidance_rescale": 0.5},
    ),
    "mochi": Family(
        label="Mochi",
        build=mochi,
        call={**WAN, "num_frames": 7},
        guided=GUIDED,
    ),
    "cogvideox": Family(
        label="CogVideoX",
        build=cogvideox,
        call={**WAN, "num_frames": 9},
        guided={**GUIDED, "use_dynamic_cfg": True},
    ),
    "cogvideox-i2v": Family(
        label="CogVideoX, image to video",
        build=cogvideox_image,
        call={**WAN, "num_frames": 9, "image": picture()},
        guided=GUIDED,
    ),
    "skyreels": Family(label="SkyReels V2", build=skyreels, call=WAN, guided=GUIDED),
    "allegro": Family(
        label="Allegro",
        build=allegro,
        call={**WAN, "num_frames": 8, "clean_caption": False},
        guided=GUIDED,
    ),
    "latte": Family(
        label="Latte",
        build=latte,
        call={**SIDES, "video_length": 2, "guidance_scale": 1.0, "clean_caption": False},
        guided=GUIDED,
    ),
    "cosmos-2": Family(
        label="Cosmos 2, image to world",
        build=cosmos2_image,
        call={**WAN, "guidance_scale": 0.0, "image": picture()},
        guided=GUIDED,
    ),
    "wan-v2v": Family(
        label="Wan, video to video",
        build=wan_video,
        call={
            **SIDES,
            **UNGUIDED,
            "video": clip_of(5),
        },
        guided=GUIDED,
    ),
    "lucy": Family(
        label="Lucy Edit",
        build=lucy,
        call={**WAN, "video": clip_of(5)},
        guided=GUIDED,
    ),
    "sana-video": Family(
        label="SANA-Video",
        build=sana_video,
        call={
            **UNGUIDED,
            "height": 32,
            "width": 32,
            "frames": 5,
            "use_resolution_binning": False,
            "complex_human_instruction": None,
        },
        guided=GUIDED,
    ),
    "ltx-2": Family(label="LTX-2", build=ltx2, call=LTX2, guided=LTX2_GUIDED),
    "ltx-2-i2v": Family(
        label="LTX-2, image to video",
        build=ltx2_image,
        call={**LTX2, "image": picture(32, 32), "image_crf": 0},
        guided=LTX2_GUIDED,
    ),
    "hunyuan": Family(
        label="HunyuanVideo",
        build=hunyuan,
        call={**SIZE, **TEXT, "prompt_template": {"template": "{}", "crop_start": 0}},
        guided=TRUE_GUIDED,
    ),
    "hunyuan-i2v": Family(
        label="HunyuanVideo, image to video",
        build=hunyuan_image,
        call=HUNYUAN_IMAGE,
        guided=TRUE_GUIDED,
    ),
    "hunyuan-i2v-concat": Family(
        label="HunyuanVideo, image to video, first frame as channels",
        build=hunyuan_image_concat,
        call=HUNYUAN_IMAGE,
        guided=TRUE_GUIDED,
    ),
    "hunyuan-1.5": Family(label="HunyuanVideo 1.5", build=hunyuan_15, call=SIZE),
    "hunyuan-1.5-guided": Family(
        label="HunyuanVideo 1.5, guided", build=hunyuan_15_guided, call=SIZE
    ),
    "hunyuan-1.5-i2v": Family(
        label="HunyuanVideo 1.5, image to video",
        build=hunyuan_15_image,
        call={"num_frames": 5, "image": picture()},
    ),
    "kandinsky-5": Family(
        label="Kandinsky 5",
        build=kandinsky5,
        call=WAN,
        guided=GUIDED,
    ),
    "kandinsky-5-i2v": Family(
        label="Kandinsky 5, image to video",
        build=kandinsky5_image,
        call={**WAN, "num_frames": 17, "image": picture()},
        guided=GUIDED,
    ),
    "easyanimate": Family(
        label="EasyAnimate",
        build=easyanimate,
        call={**SIZE, "guidance_scale": 1.0},
        guided=GUIDED,
    ),
    "motif-video": Family(label="Motif-Video", build=motif_video, call={**SIZE, **TEXT}),
    "motif-video-guided": Family(
        label="Motif-Video, guided", build=motif_video_guided, call={**SIZE, **TEXT}
    ),
}
