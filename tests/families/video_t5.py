"""Video with T5 as text encoder, other than Wan and LTX-Video."""

from typing import Any

from diffusers import (
    AllegroPipeline,
    AllegroTransformer3DModel,
    AutoencoderKLAllegro,
    AutoencoderKLCogVideoX,
    AutoencoderKLCosmos,
    AutoencoderKLMochi,
    CogVideoXDDIMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    Cosmos2VideoToWorldPipeline,
    CosmosTextToWorldPipeline,
    DDIMScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    LattePipeline,
    LatteTransformer3DModel,
    MochiPipeline,
    MochiTransformer3DModel,
)

from families.family import GUIDED, SHORT, SIZE, UNGUIDED, Family
from families.parts import DIT, flow_euler, picture, t5
from families.text_to_image_t5 import Guardrail, cosmos_transformer
from families.vaes import vae, wan_vae


def mochi() -> MochiPipeline:
    """Its scheduler's sigmas run from 0 to 1."""
    transformer = MochiTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        text_embed_dim=16,
        time_embed_dim=8,
        max_sequence_length=16,
    )
    autoencoder = AutoencoderKLMochi(
        encoder_block_out_channels=(32,) * 4,
        decoder_block_out_channels=(32,) * 4,
        layers_per_block=(1,) * 5,
    )
    return MochiPipeline(
        transformer=transformer,
        vae=autoencoder,
        scheduler=flow_euler(invert_sigmas=True),
        force_zeros_for_empty_prompt=True,
        **t5(),
    )


def cogvideox(cls: type = CogVideoXPipeline, **config: Any) -> Any:
    """Its transformer works on 2 x 2 patches; a latent pixel is 4 x 4 image pixels.

    Position embeddings are fixed, as in CogVideoX 2B.
    """
    transformer = CogVideoXTransformer3DModel(
        **{**DIT, "num_layers": 2, **config},
        time_embed_dim=8,
        text_embed_dim=16,
        sample_width=4,
        sample_height=4,
        sample_frames=9,
        max_text_seq_length=16,
    )
    autoencoder = AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 3,
        up_block_types=("CogVideoXUpBlock3D",) * 3,
        block_out_channels=(8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
        sample_height=16,
        sample_width=16,
    )
    scheduler = CogVideoXDDIMScheduler(
        prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing"
    )
    return cls(transformer=transformer, vae=autoencoder, scheduler=scheduler, **t5())


def cogvideox_image() -> CogVideoXImageToVideoPipeline:
    """With learned and rotary position embeddings, as in CogVideoX 5B."""
    return cogvideox(
        CogVideoXImageToVideoPipeline,
        in_channels=8,
        use_rotary_positional_embeddings=True,
        use_learned_positional_embeddings=True,
    )


def allegro() -> AllegroPipeline:
    """Its VAE decodes only tiles of one video at a time; neither setting is saved with it."""
    transformer = AllegroTransformer3DModel(
        **{**DIT, "attention_head_dim": 12},
        cross_attention_dim=24,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        caption_channels=16,
    )
    autoencoder = AutoencoderKLAllegro(
        down_block_types=("AllegroDownBlock3D",) * 3,
        up_block_types=("AllegroUpBlock3D",) * 3,
        temporal_downsample_blocks=(True, True, False),
        temporal_upsample_blocks=(False, True, True),
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )
    autoencoder.kernel = autoencoder.stride = (8, 16, 16)
    autoencoder.enable_tiling()
    autoencoder.enable_slicing()
    return AllegroPipeline(
        transformer=transformer, vae=autoencoder, scheduler=EulerDiscreteScheduler(), **t5()
    )


def latte() -> LattePipeline:
    """Its transformer also predicts a variance, which the pipeline drops."""
    transformer = LatteTransformer3DModel(
        **{**DIT, "out_channels": 2 * 4},
        cross_attention_dim=32,
        attention_bias=True,
        sample_size=8,
        patch_size=2,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        caption_channels=16,
        video_length=2,
    )
    return LattePipeline(
        transformer=transformer,
        vae=vae(shift_factor=None),
        scheduler=DDIMScheduler(clip_sample=False),
        **t5(),
    )


def cosmos() -> CosmosTextToWorldPipeline:
    """Refused by flowgrpo: it steps twice from the same sigma. Not in FAMILIES."""
    autoencoder = AutoencoderKLCosmos(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=64,
        num_layers=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
        latents_mean=None,
        latents_std=None,
    )
    return CosmosTextToWorldPipeline(
        transformer=cosmos_transformer(),
        vae=autoencoder,
        scheduler=EDMEulerScheduler(sigma_max=80, sigma_data=0.5, final_sigmas_type="sigma_min"),
        safety_checker=Guardrail(),
        **t5(),
    )


def cosmos2_image() -> Cosmos2VideoToWorldPipeline:
    return Cosmos2VideoToWorldPipeline(
        transformer=cosmos_transformer(in_channels=4 + 1),
        vae=wan_vae(),
        scheduler=flow_euler(use_karras_sigmas=True),
        safety_checker=Guardrail(),
        **t5(),
    )


CALL = {**SHORT, **UNGUIDED}

VIDEO_T5: dict[str, Family] = {
    "mochi": Family(label="Mochi 1", build=mochi, call={**CALL, "num_frames": 7}, guided=GUIDED),
    "cogvideox": Family(
        label="CogVideoX",
        build=cogvideox,
        call={**CALL, "num_frames": 9},
        guided={**GUIDED, "use_dynamic_cfg": True},
    ),
    "cogvideox-i2v": Family(
        label="CogVideoX image-to-video",
        build=cogvideox_image,
        call={**CALL, "num_frames": 9, "image": picture()},
        guided=GUIDED,
    ),
    "allegro": Family(
        label="Allegro",
        build=allegro,
        call={**CALL, "num_frames": 8, "clean_caption": False},
        guided=GUIDED,
    ),
    "latte": Family(
        label="Latte",
        build=latte,
        call={**SIZE, "video_length": 2, "clean_caption": False, **UNGUIDED},
        guided=GUIDED,
    ),
    "cosmos-2": Family(
        label="Cosmos-Predict2 image-to-video",
        build=cosmos2_image,
        call={**SHORT, "num_frames": 5, "guidance_scale": 0.0, "image": picture()},
        guided=GUIDED,
    ),
}
