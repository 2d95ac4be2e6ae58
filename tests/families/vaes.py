"""Tiny VAEs that several families share."""

from typing import Any

from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
)


def levels(count: int, channels: int = 8) -> dict[str, Any]:
    """Configuration of an AutoencoderKL: each level except the innermost halves the sides."""
    return {
        "block_out_channels": (channels,) * count,
        "down_block_types": ("DownEncoderBlock2D",) * count,
        "up_block_types": ("UpDecoderBlock2D",) * count,
        "norm_num_groups": channels // 2,
        "layers_per_block": 1,
    }


def vae(latent_channels: int = 4, **config: Any) -> AutoencoderKL:
    """A latent pixel is 2 x 2 image pixels."""
    defaults = {
        **levels(2),
        "sample_size": 16,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "shift_factor": 0.06,
        "scaling_factor": 1.5,
    }
    return AutoencoderKL(latent_channels=latent_channels, **{**defaults, **config})


def sd_vae(**config: Any) -> AutoencoderKL:
    """The VAE of Stable Diffusion and similar models."""
    defaults = {"use_quant_conv": True, "use_post_quant_conv": True, "shift_factor": None}
    return vae(**{**defaults, "scaling_factor": 0.18215, **config})


def flux2_vae() -> AutoencoderKLFlux2:
    """A latent pixel is 4 x 4 image pixels; batch normalization acts on 2 x 2 latent pixels."""
    model = AutoencoderKLFlux2(**levels(3), latent_channels=4, sample_size=16)
    model.bn.running_mean.normal_(std=0.1)
    return model


STATISTICS: dict[str, Any] = {
    "latents_mean": [0.1, -0.1, 0.2, 0.0],
    "latents_std": [1.5, 2.0, 1.0, 1.2],
}
"""Statistics of latents with four channels."""


def qwen_vae(**config: Any) -> AutoencoderKLQwenImage:
    """A latent pixel is 2 x 2 image pixels; the Wan VAE's counterpart for images."""
    defaults = {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False],
        **STATISTICS,
    }
    return AutoencoderKLQwenImage(**{**defaults, **config})


def wan_vae(z_dim: int = 4, **config: Any) -> AutoencoderKLWan:
    """A latent pixel is 4 x 4 image pixels of 4 frames."""
    defaults = {
        "base_dim": 4,
        "dim_mult": [1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [True, True],
        "latents_mean": [0.1] * z_dim,
        "latents_std": [0.25] * z_dim,
        "scale_factor_spatial": 4,
    }
    return AutoencoderKLWan(z_dim=z_dim, **{**defaults, **config})


PATCHED: dict[str, Any] = {
    "in_channels": 12,
    "out_channels": 12,
    "is_residual": True,
    "patch_size": 2,
}
"""Configuration of a Wan VAE that starts with 2 x 2 patches, as in Wan 2.2 5B."""


def hunyuan_vae() -> AutoencoderKLHunyuanVideo:
    """A latent pixel is 4 x 4 image pixels of 4 frames."""
    return AutoencoderKLHunyuanVideo(
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 3,
        up_block_types=("HunyuanVideoUpBlock3D",) * 3,
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        spatial_compression_ratio=4,
    )
