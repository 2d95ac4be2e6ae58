"""Tiny, randomly initialised pipelines of real classes, one builder a family."""

import string

import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)


def clip_tokenizer(max_length: int = 16) -> CLIPTokenizer:
    """Spells every word letter by letter."""
    letters = [*string.ascii_lowercase, *string.digits, '"', "'", ",", "."]
    tokens = [*letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=max_length)


def clip_text_encoder(cls: type, tokenizer: CLIPTokenizer):
    return cls(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            projection_dim=16,
            max_position_embeddings=tokenizer.model_max_length,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).eval()


def vae(latent_channels: int = 4) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=latent_channels,
        norm_num_groups=4,
        layers_per_block=1,
        sample_size=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.06,
        scaling_factor=1.5,
    ).eval()


def sd3(
    shift: float = 3.0, seed: int = 0, dual_attention: bool = False
) -> StableDiffusion3Pipeline:
    torch.manual_seed(seed)
    tokenizer = clip_tokenizer()
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
        dual_attention_layers=(0,) if dual_attention else (),
    )
    return StableDiffusion3Pipeline(
        transformer=awake(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        vae=vae(),
        text_encoder=clip_text_encoder(CLIPTextModelWithProjection, tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=clip_text_encoder(CLIPTextModelWithProjection, tokenizer),
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )


def flux(seed: int = 0) -> FluxPipeline:
    torch.manual_seed(seed)
    tokenizer = clip_tokenizer()
    pieces = ["<pad>", "</s>", "<unk>", "▁", *string.ascii_lowercase]
    t5_tokenizer = T5Tokenizer(vocab=[(p, -float(i)) for i, p in enumerate(pieces)], extra_ids=0)
    t5 = T5Config(
        vocab_size=len(t5_tokenizer), d_model=16, d_ff=32, d_kv=8, num_heads=2, num_layers=2
    )
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
        guidance_embeds=True,
    )
    return FluxPipeline(
        transformer=awake(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae(),
        text_encoder=clip_text_encoder(CLIPTextModel, tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=T5EncoderModel(t5).eval(),
        tokenizer_2=t5_tokenizer,
    )


FAMILIES = {"sd3": sd3, "flux": flux}

CALL = {"height": 16, "width": 16, "max_sequence_length": 8}
"""Arguments that suit both."""


def awake(module: torch.nn.Module) -> torch.nn.Module:
    """Fills what is initialised with zeros, so that every input matters to the output."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        if parameter.count_nonzero() == 0:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    return module.eval()


def build(family: str, dtype: torch.dtype = torch.float32) -> DiffusionPipeline:
    pipe = FAMILIES[family]().to(dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe
