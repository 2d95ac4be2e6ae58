"""Video: HunyuanVideo and HunyuanVideo 1.5."""

from functools import partial
from typing import Any

from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoImageToVideoPipeline,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from transformers import (
    AddedToken,
    ByT5Tokenizer,
    CLIPImageProcessor,
    LlamaModel,
    Qwen2_5_VLTextModel,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from families.family import SHORT, SIZE, TRUE_CFG, Family
from families.language_models import (
    EYES,
    learn_words,
    llama,
    llama_tokenizer,
    llava,
    qwen2_5_vl,
    qwen_tokenizer,
)
from families.parts import DIT, clip, flow_euler, picture, t5_encoder, text_parts
from families.vaes import hunyuan_vae


def hunyuan_transformer(**config: Any) -> HunyuanVideoTransformer3DModel:
    defaults = {
        **DIT,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "text_embed_dim": 16,
        "pooled_projection_dim": 16,
        "rope_axes_dim": (4, 6, 6),
    }
    return HunyuanVideoTransformer3DModel(**{**defaults, **config})


def hunyuan() -> HunyuanVideoPipeline:
    return HunyuanVideoPipeline(
        transformer=hunyuan_transformer(),
        vae=hunyuan_vae(),
        scheduler=flow_euler(shift=7.0),
        **text_parts(llama, llama_tokenizer(), cls=LlamaModel, layers=3),
        **clip("_2", max_length=77),
    )


def hunyuan_image(condition: str = "token_replace") -> HunyuanVideoImageToVideoPipeline:
    """`condition` says how the first frame enters: instead of noise, or as further channels."""
    transformer = hunyuan_transformer(
        in_channels=9 if condition == "latent_concat" else 4,
        guidance_embeds=False,
        image_condition_type=condition,
    )
    return HunyuanVideoImageToVideoPipeline(
        transformer=transformer,
        vae=hunyuan_vae(),
        scheduler=flow_euler(shift=7.0),
        image_processor=CLIPImageProcessor(size=SIZE, crop_size=SIZE),
        **text_parts(llava, llama_tokenizer(), layers=3),
        **clip("_2", max_length=77),
    )


def hunyuan_15(
    cls: type = HunyuanVideo15Pipeline, guidance_scale: float = 1.0, **parts: Any
) -> Any:
    """Guidance is a component of this pipeline, not an argument of its call.

    Two settings are not saved with it: its VAE, which decodes one video at a time, slices a batch;
    and texts are shorter than the 2,000 tokens to which the pipeline always pads.
    """
    transformer = HunyuanVideo15Transformer3DModel(
        **{**DIT, "num_layers": 2, "in_channels": 9},
        num_refiner_layers=1,
        text_embed_dim=16,
        text_embed_2_dim=16,
        image_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
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
    pipe = cls(
        transformer=transformer,
        vae=vae,
        scheduler=flow_euler(shift=5.0),
        guider=ClassifierFreeGuidance(guidance_scale=guidance_scale),
        **text_parts(qwen2_5_vl, qwen_tokenizer(), cls=Qwen2_5_VLTextModel, layers=3),
        **text_parts(t5_encoder, ByT5Tokenizer(), "_2"),
        **parts,
    )
    pipe.tokenizer_max_length = 48
    pipe.tokenizer_2_max_length = 8
    pipe.vision_num_semantic_tokens = 4
    learn_words(pipe.tokenizer, pipe.system_message)
    pipe.tokenizer.add_tokens(AddedToken(" " * 9, normalized=False))
    return pipe


def hunyuan_15_image() -> HunyuanVideo15ImageToVideoPipeline:
    return hunyuan_15(
        HunyuanVideo15ImageToVideoPipeline,
        image_encoder=SiglipVisionModel(SiglipVisionConfig(**EYES)),
        feature_extractor=SiglipImageProcessor(size=SIZE),
    )


CALL = {**SIZE, "num_frames": 5}
FROM_PICTURE = {
    **CALL,
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

VIDEO_HUNYUAN: dict[str, Family] = {
    "hunyuan": Family(
        label="HunyuanVideo",
        build=hunyuan,
        call={**SHORT, "num_frames": 5, "prompt_template": {"template": "{}", "crop_start": 0}},
        guided=TRUE_CFG,
    ),
    "hunyuan-i2v": Family(
        label="HunyuanVideo image-to-video",
        build=hunyuan_image,
        call=FROM_PICTURE,
        guided=TRUE_CFG,
    ),
    "hunyuan-i2v-concat": Family(
        label="HunyuanVideo image-to-video (concat)",
        build=partial(hunyuan_image, "latent_concat"),
        call=FROM_PICTURE,
        guided=TRUE_CFG,
    ),
    "hunyuan-1.5": Family(label="HunyuanVideo-1.5", build=hunyuan_15, call=CALL),
    "hunyuan-1.5-guided": Family(
        label="HunyuanVideo-1.5 (guided)",
        build=partial(hunyuan_15, guidance_scale=6.0),
        call=CALL,
    ),
    "hunyuan-1.5-i2v": Family(
        label="HunyuanVideo-1.5 image-to-video",
        build=hunyuan_15_image,
        call={"num_frames": 5, "image": picture()},
    ),
}
