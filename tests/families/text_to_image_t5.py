"""Text to image by flow matching, with T5 as text encoder, alone or with others."""

from typing import Any

import torch
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    BriaPipeline,
    BriaTransformer2DModel,
    ChromaPipeline,
    ChromaTransformer2DModel,
    Cosmos2TextToImagePipeline,
    CosmosTransformer3DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    HiDreamImagePipeline,
    HiDreamImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from transformers import CLIPTextModelWithProjection, UMT5EncoderModel

from families.family import GUIDED, SHORT, TRUE_CFG, UNGUIDED, Family
from families.language_models import llama, llama_tokenizer
from families.parts import (
    DIT,
    FLUX,
    clip,
    dynamic_flow_euler,
    flow_euler,
    flow_unipc,
    t5,
    text_parts,
)
from families.vaes import levels, vae, wan_vae


def flux() -> FluxPipeline:
    return FluxPipeline(
        transformer=FluxTransformer2DModel(**FLUX, pooled_projection_dim=16, guidance_embeds=True),
        scheduler=dynamic_flow_euler(shift=3.0),
        vae=vae(),
        **clip(),
        **t5("_2"),
    )


def sd3() -> StableDiffusion3Pipeline:
    """The first layer has the second attention of SD3.5 medium."""
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=flow_euler(shift=3.0),
        vae=vae(),
        **clip(cls=CLIPTextModelWithProjection),
        **clip("_2", cls=CLIPTextModelWithProjection),
        **t5("_3", width=32),
    )


def aura_flow() -> AuraFlowPipeline:
    transformer = AuraFlowTransformer2DModel(
        sample_size=8,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pos_embed_max_size=64,
    )
    return AuraFlowPipeline(
        transformer=transformer,
        scheduler=flow_euler(shift=1.73),
        vae=vae(shift_factor=None),
        **t5(cls=UMT5EncoderModel),
    )


def chroma() -> ChromaPipeline:
    transformer = ChromaTransformer2DModel(
        **FLUX, approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1
    )
    return ChromaPipeline(
        transformer=transformer,
        scheduler=flow_euler(use_beta_sigmas=True),
        vae=vae(),
        **t5(),
    )


def bria() -> BriaPipeline:
    return BriaPipeline(
        transformer=BriaTransformer2DModel(**FLUX),
        scheduler=dynamic_flow_euler(),
        vae=vae(),
        **t5(),
    )


def hidream() -> HiDreamImagePipeline:
    """Large patches, because it makes 128 x 128 latent pixels whatever size the call asks for."""
    transformer = HiDreamImageTransformer2DModel(
        **{**DIT, "attention_head_dim": 8},
        patch_size=32,
        num_single_layers=1,
        caption_channels=[16, 16],
        text_emb_dim=32,
        num_routed_experts=2,
        num_activated_experts=1,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(128, 128),
        llama_layers=[0, 1],
    )
    return HiDreamImagePipeline(
        transformer=transformer,
        scheduler=flow_unipc(),
        vae=vae(**levels(1, channels=4), mid_block_add_attention=False),
        **clip(cls=CLIPTextModelWithProjection),
        **clip("_2", cls=CLIPTextModelWithProjection),
        **t5("_3"),
        **text_parts(llama, llama_tokenizer(), "_4"),
    )


class Guardrail(ModelMixin, ConfigMixin):
    """Stands in for the Cosmos guardrail, which is too large for a test; lets everything pass.

    It must be passed to `from_pretrained`, too, which cannot find its class by the saved name.
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


def cosmos_transformer(**config: Any) -> CosmosTransformer3DModel:
    defaults = {**DIT, "mlp_ratio": 2, "text_embed_dim": 16, "adaln_lora_dim": 4}
    return CosmosTransformer3DModel(**{**defaults, "max_size": (4, 32, 32), **config})


def cosmos2_text_to_image() -> Cosmos2TextToImagePipeline:
    return Cosmos2TextToImagePipeline(
        transformer=cosmos_transformer(rope_scale=(1.0, 4.0, 4.0), extra_pos_embed_type=None),
        scheduler=flow_euler(use_karras_sigmas=True),
        vae=wan_vae(),
        safety_checker=Guardrail(),
        **t5(),
    )


TEXT_TO_IMAGE_T5: dict[str, Family] = {
    "flux": Family(label="FLUX.1", build=flux, call={**SHORT, "guidance_scale": 3.5}),
    "flux-true-cfg": Family(
        label="FLUX.1 (classifier-free guidance)", build=flux, call=SHORT, guided=TRUE_CFG
    ),
    "sd3": Family(
        label="Stable Diffusion 3.5", build=sd3, call={**SHORT, **UNGUIDED}, guided=GUIDED
    ),
    "sd3-skip-layers": Family(
        label="Stable Diffusion 3.5 (skip-layer guidance)",
        build=sd3,
        call={**SHORT, **UNGUIDED},
        guided={
            "guidance_scale": 4.5,
            "skip_guidance_layers": [1],
            "skip_layer_guidance_start": 0.2,
            "skip_layer_guidance_stop": 0.7,
        },
    ),
    "aura-flow": Family(
        label="AuraFlow", build=aura_flow, call={**SHORT, **UNGUIDED}, guided=GUIDED
    ),
    "chroma": Family(label="Chroma", build=chroma, call={**SHORT, **UNGUIDED}, guided=GUIDED),
    "bria": Family(label="BRIA 3.2", build=bria, call={**SHORT, **UNGUIDED}, guided=GUIDED),
    "hidream": Family(
        label="HiDream-I1",
        build=hidream,
        call={"max_sequence_length": 16, **UNGUIDED},
        guided=GUIDED,
    ),
    "cosmos2-text-to-image": Family(
        label="Cosmos-Predict2 text-to-image",
        build=cosmos2_text_to_image,
        call={**SHORT, **UNGUIDED},
        guided=GUIDED,
    ),
}
