"""Video pipelines with tiny random weights: those that read T5 or UMT5."""

from typing import Any

import torch
from diffusers import (
    AllegroPipeline,
    AllegroTransformer3DModel,
    AutoencoderKLAllegro,
    AutoencoderKLCogVideoX,
    AutoencoderKLCosmos,
    AutoencoderKLLTXVideo,
    AutoencoderKLMochi,
    AutoencoderKLWan,
    CogVideoXDDIMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    Cosmos2VideoToWorldPipeline,
    CosmosTextToWorldPipeline,
    CosmosTransformer3DModel,
    DDIMScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    LattePipeline,
    LatteTransformer3DModel,
    LTXImageToVideoPipeline,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    LucyEditPipeline,
    MochiPipeline,
    MochiTransformer3DModel,
    SkyReelsV2Pipeline,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
    WanVideoToVideoPipeline,
)
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    UMT5Config,
    UMT5EncoderModel,
)

from families.language_models import VISION_SIZE
from families.parts import t5_encoder, t5_tokenizer, vae
from families.text_to_image import lively

EYES: dict[str, Any] = {**VISION_SIZE, "num_hidden_layers": 2, "patch_size": 8}
"""Of image encoders: a picture of 16 x 16 pixels is four tokens."""


def umt5_encoder(tokenizer: Any) -> UMT5EncoderModel:
    config = UMT5Config(
        vocab_size=len(tokenizer), d_model=16, d_ff=32, d_kv=8, num_heads=2, num_layers=2
    )
    return UMT5EncoderModel(config).eval()


def wan_vae(z_dim: int = 4, **config: Any) -> AutoencoderKLWan:
    """A latent pixel is 4 x 4 picture pixels of 4 frames."""
    defaults = {
        "base_dim": 4,
        "dim_mult": [1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [True, True],
        "latents_mean": [0.1] * z_dim,
        "latents_std": [0.25] * z_dim,
        "scale_factor_spatial": 4,
    }
    return AutoencoderKLWan(z_dim=z_dim, **{**defaults, **config}).eval()


def wan_transformer(cls: type = WanTransformer3DModel, **config: Any) -> Any:
    defaults = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 32,
        "ffn_dim": 32,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
    return lively(cls(**{**defaults, **config}))


def wan_parts(flow_shift: float = 3.0, **vae: Any) -> dict[str, Any]:
    """What all Wan pipelines hold besides denoisers."""
    tokenizer = t5_tokenizer()
    return {
        "tokenizer": tokenizer,
        "text_encoder": umt5_encoder(tokenizer),
        "vae": wan_vae(**vae),
        "scheduler": UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
        ),
    }


def wan_21() -> WanPipeline:
    torch.manual_seed(0)
    return WanPipeline(transformer=wan_transformer(), **wan_parts())


def wan_21_image() -> WanImageToVideoPipeline:
    """The image is read by a CLIP encoder and as latents."""
    torch.manual_seed(0)
    size = {"height": 16, "width": 16}
    return WanImageToVideoPipeline(
        transformer=wan_transformer(in_channels=12, image_dim=16, added_kv_proj_dim=24),
        image_encoder=CLIPVisionModel(CLIPVisionConfig(**EYES)).eval(),
        image_processor=CLIPImageProcessor(size=size, crop_size=size),
        **wan_parts(),
    )


def wan_22() -> WanPipeline:
    """Two experts, each for two of four steps."""
    torch.manual_seed(0)
    return WanPipeline(
        transformer=wan_transformer(),
        transformer_2=wan_transformer(),
        boundary_ratio=0.875,
        **wan_parts(),
    )


def wan_22_image() -> WanImageToVideoPipeline:
    """Two experts; the image is read as latents only."""
    torch.manual_seed(0)
    return WanImageToVideoPipeline(
        transformer=wan_transformer(in_channels=12),
        transformer_2=wan_transformer(in_channels=12),
        boundary_ratio=0.875,
        **wan_parts(),
    )


def wan_22_5b(cls: type = WanPipeline) -> Any:
    """Each token has its own timestep; the VAE patches pictures."""
    torch.manual_seed(0)
    vae = {
        "z_dim": 6,
        "in_channels": 12,
        "out_channels": 12,
        "is_residual": True,
        "patch_size": 2,
        "scale_factor_spatial": 8,
    }
    transformer = wan_transformer(in_channels=6, out_channels=6)
    return cls(transformer=transformer, expand_timesteps=True, **wan_parts(5.0, **vae))


def wan_22_5b_image() -> WanImageToVideoPipeline:
    return wan_22_5b(WanImageToVideoPipeline)


def wan_vace() -> WanVACEPipeline:
    torch.manual_seed(0)
    transformer = wan_transformer(
        WanVACETransformer3DModel, vace_layers=[0, 1], vace_in_channels=2 * 4 + 4 * 4
    )
    return WanVACEPipeline(transformer=transformer, **wan_parts())


def wan_video() -> WanVideoToVideoPipeline:
    torch.manual_seed(0)
    return WanVideoToVideoPipeline(transformer=wan_transformer(), **wan_parts())


def lucy() -> LucyEditPipeline:
    """As Wan 2.2 5B, with the video to edit as further channels."""
    torch.manual_seed(0)
    return LucyEditPipeline(
        transformer=wan_transformer(in_channels=8), expand_timesteps=True, **wan_parts(5.0)
    )


def skyreels() -> SkyReelsV2Pipeline:
    torch.manual_seed(0)
    transformer = wan_transformer(SkyReelsV2Transformer3DModel)
    return SkyReelsV2Pipeline(transformer=transformer, **wan_parts(8.0))


def t5_parts() -> dict[str, Any]:
    tokenizer = t5_tokenizer()
    return {"tokenizer": tokenizer, "text_encoder": t5_encoder(tokenizer)}


def ltx_scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )


def ltx(cls: type = LTXPipeline) -> Any:
    torch.manual_seed(0)
    transformer = LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=2,
        caption_channels=16,
    )
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
        transformer=lively(transformer), vae=vae.eval(), scheduler=ltx_scheduler(), **t5_parts()
    )


def ltx_image() -> LTXImageToVideoPipeline:
    return ltx(LTXImageToVideoPipeline)


def mochi() -> MochiPipeline:
    """Its sigmas run from 0 to 1."""
    torch.manual_seed(0)
    transformer = MochiTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        text_embed_dim=16,
        time_embed_dim=8,
        max_sequence_length=16,
    )
    vae = AutoencoderKLMochi(
        encoder_block_out_channels=(32,) * 4,
        decoder_block_out_channels=(32,) * 4,
        layers_per_block=(1,) * 5,
    )
    return MochiPipeline(
        transformer=lively(transformer),
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        force_zeros_for_empty_prompt=True,
        **t5_parts(),
    )


def cogvideox_parts(**transformer: Any) -> dict[str, Any]:
    """Its transformer works on 2 x 2 patches; a latent pixel is 4 x 4 picture pixels."""
    defaults = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 8,
        "text_embed_dim": 16,
        "num_layers": 2,
        "sample_width": 4,
        "sample_height": 4,
        "sample_frames": 9,
        "max_text_seq_length": 12,
    }
    vae = AutoencoderKLCogVideoX(
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
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
    )
    return {
        "transformer": lively(CogVideoXTransformer3DModel(**{**defaults, **transformer})),
        "vae": vae.eval(),
        "scheduler": scheduler,
        **t5_parts(),
    }


def cogvideox() -> CogVideoXPipeline:
    """With fixed position embeddings, as CogVideoX 2B."""
    torch.manual_seed(0)
    return CogVideoXPipeline(**cogvideox_parts())


def cogvideox_image() -> CogVideoXImageToVideoPipeline:
    """With learned and rotary positions, as CogVideoX 5B."""
    torch.manual_seed(0)
    return CogVideoXImageToVideoPipeline(
        **cogvideox_parts(
            in_channels=8,
            use_rotary_positional_embeddings=True,
            use_learned_positional_embeddings=True,
        )
    )


def allegro() -> AllegroPipeline:
    """Its VAE decodes only tile by tile, and only one video; neither is part of what is saved."""
    torch.manual_seed(0)
    transformer = AllegroTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        cross_attention_dim=24,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        caption_channels=16,
    )
    vae = AutoencoderKLAllegro(
        down_block_types=("AllegroDownBlock3D",) * 3,
        up_block_types=("AllegroUpBlock3D",) * 3,
        temporal_downsample_blocks=(True, True, False),
        temporal_upsample_blocks=(False, True, True),
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )
    vae.kernel = vae.stride = (8, 16, 16)
    vae.enable_tiling()
    vae.enable_slicing()
    return AllegroPipeline(
        transformer=lively(transformer),
        vae=vae.eval(),
        scheduler=EulerDiscreteScheduler(),
        **t5_parts(),
    )


def latte() -> LattePipeline:
    """Its transformer predicts a variance too, which is dropped."""
    torch.manual_seed(0)
    transformer = LatteTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        cross_attention_dim=16,
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
        transformer=lively(transformer),
        vae=vae(shift_factor=None),
        scheduler=DDIMScheduler(clip_sample=False),
        **t5_parts(),
    )


class Guardrail(ModelMixin, ConfigMixin):
    """Stands in for the Cosmos guardrail, which is too large to run here; lets all pass.

    `from_pretrained` has to be given one too: what is saved names a class that it cannot find.
    """

    config_name = "config.json"

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: Any) -> Any:
        return frames


def cosmos_transformer(in_channels: int = 4) -> CosmosTransformer3DModel:
    transformer = CosmosTransformer3DModel(
        in_channels=in_channels,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        mlp_ratio=2,
        text_embed_dim=16,
        adaln_lora_dim=4,
        max_size=(4, 16, 16),
    )
    return lively(transformer)


def cosmos() -> CosmosTextToWorldPipeline:
    torch.manual_seed(0)
    vae = AutoencoderKLCosmos(
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
    scheduler = EDMEulerScheduler(sigma_max=80, sigma_data=0.5, final_sigmas_type="sigma_min")
    return CosmosTextToWorldPipeline(
        transformer=cosmos_transformer(),
        vae=vae.eval(),
        scheduler=scheduler,
        safety_checker=Guardrail(),
        **t5_parts(),
    )


def cosmos2_image() -> Cosmos2VideoToWorldPipeline:
    torch.manual_seed(0)
    return Cosmos2VideoToWorldPipeline(
        transformer=cosmos_transformer(in_channels=4 + 1),
        vae=wan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        safety_checker=Guardrail(),
        **t5_parts(),
    )
