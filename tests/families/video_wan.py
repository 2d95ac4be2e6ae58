"""Video: Wan and models built on it."""

from typing import Any

from diffusers import (
    LucyEditPipeline,
    SkyReelsV2Pipeline,
    SkyReelsV2Transformer3DModel,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
    WanVideoToVideoPipeline,
)
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, UMT5EncoderModel

from families.family import GUIDED, SHORT, SIZE, UNGUIDED, Family
from families.language_models import EYES
from families.parts import DIT, film, flow_unipc, picture, t5
from families.vaes import PATCHED, wan_vae


def wan_transformer(cls: type = WanTransformer3DModel, **config: Any) -> Any:
    defaults = {**DIT, "text_dim": 16, "freq_dim": 32, "ffn_dim": 32, "rope_max_seq_len": 32}
    return cls(**{**defaults, **config})


def wan_parts(flow_shift: float = 3.0, **vae: Any) -> dict[str, Any]:
    """The parts of every Wan pipeline except its denoisers."""
    return {
        "vae": wan_vae(**vae),
        "scheduler": flow_unipc(flow_shift),
        **t5(cls=UMT5EncoderModel),
    }


def wan_21(cls: type = WanPipeline) -> Any:
    return cls(transformer=wan_transformer(), **wan_parts())


def wan_21_image() -> WanImageToVideoPipeline:
    """The image enters through a CLIP encoder and as latents."""
    return WanImageToVideoPipeline(
        transformer=wan_transformer(in_channels=12, image_dim=16, added_kv_proj_dim=32),
        image_encoder=CLIPVisionModel(CLIPVisionConfig(**EYES)),
        image_processor=CLIPImageProcessor(size=SIZE, crop_size=SIZE),
        **wan_parts(),
    )


def wan_21_video() -> WanVideoToVideoPipeline:
    return wan_21(WanVideoToVideoPipeline)


def wan_vace() -> WanVACEPipeline:
    transformer = wan_transformer(
        WanVACETransformer3DModel, vace_layers=[0], vace_in_channels=2 * 4 + 4 * 4
    )
    return WanVACEPipeline(transformer=transformer, **wan_parts())


def wan_22(cls: type = WanPipeline, in_channels: int = 4) -> Any:
    """Two experts; each is called in two of four steps."""
    return cls(
        transformer=wan_transformer(in_channels=in_channels),
        transformer_2=wan_transformer(in_channels=in_channels),
        boundary_ratio=0.875,
        **wan_parts(),
    )


def wan_22_image() -> WanImageToVideoPipeline:
    """Two experts; the image enters as latents only."""
    return wan_22(WanImageToVideoPipeline, in_channels=12)


def wan_22_5b(cls: type = WanPipeline) -> Any:
    """Each token has its own timestep; the VAE splits images into patches."""
    return cls(
        transformer=wan_transformer(in_channels=6, out_channels=6),
        expand_timesteps=True,
        **wan_parts(5.0, z_dim=6, **PATCHED, scale_factor_spatial=8),
    )


def wan_22_5b_image() -> WanImageToVideoPipeline:
    return wan_22_5b(WanImageToVideoPipeline)


def lucy() -> LucyEditPipeline:
    """As Wan 2.2 5B, with the video to be edited as further channels."""
    return LucyEditPipeline(
        transformer=wan_transformer(in_channels=8), expand_timesteps=True, **wan_parts(5.0)
    )


def skyreels() -> SkyReelsV2Pipeline:
    transformer = wan_transformer(SkyReelsV2Transformer3DModel)
    return SkyReelsV2Pipeline(transformer=transformer, **wan_parts(8.0))


CALL = {**SHORT, "num_frames": 5, **UNGUIDED}
FROM_PICTURE = {**CALL, "image": picture()}
EXPERTS_GUIDED = {**GUIDED, "guidance_scale_2": 3.0}

VIDEO_WAN: dict[str, Family] = {
    "wan-2.1": Family(label="Wan 2.1", build=wan_21, call=CALL, guided=GUIDED),
    "wan-2.1-i2v": Family(
        label="Wan 2.1 image-to-video", build=wan_21_image, call=FROM_PICTURE, guided=GUIDED
    ),
    "wan-v2v": Family(
        label="Wan 2.1 video-to-video",
        build=wan_21_video,
        call={**SHORT, **UNGUIDED, "video": film()},
        guided=GUIDED,
        last_step=1,
    ),
    "wan-vace": Family(
        label="Wan 2.1 VACE",
        build=wan_vace,
        call={
            **CALL,
            "video": film(),
            "mask": film(seed=9),
            "reference_images": [picture(seed=5)],
        },
        guided=GUIDED,
    ),
    "wan-2.2": Family(
        label="Wan 2.2 (two experts)", build=wan_22, call=CALL, guided=EXPERTS_GUIDED
    ),
    "wan-2.2-i2v": Family(
        label="Wan 2.2 image-to-video (two experts)",
        build=wan_22_image,
        call=FROM_PICTURE,
        guided=EXPERTS_GUIDED,
    ),
    "wan-2.2-5b": Family(label="Wan 2.2 5B", build=wan_22_5b, call=CALL, guided=GUIDED),
    "wan-2.2-5b-i2v": Family(
        label="Wan 2.2 5B image-to-video", build=wan_22_5b_image, call=FROM_PICTURE, guided=GUIDED
    ),
    "lucy": Family(
        label="Lucy Edit",
        build=lucy,
        call={**CALL, "video": film()},
        guided=GUIDED,
        float32=("vae",),
    ),
    "skyreels": Family(label="SkyReels-V2", build=skyreels, call=CALL, guided=GUIDED),
}
