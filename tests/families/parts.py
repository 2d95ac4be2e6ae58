"""Parts that families share: tokenizers that spell letter by letter, tiny encoders, tiny VAEs."""

import string
from typing import Any

import torch
from diffusers import AutoencoderKL
from PIL import Image
from transformers import (
    CLIPTextConfig,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)


def awake(module: torch.nn.Module) -> Any:
    """Fills what is initialised with zeros, so that every input matters to the output."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        if parameter.count_nonzero() == 0:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    return module.eval()


def picture(width: int = 16, height: int = 16, seed: int = 0) -> Image.Image:
    """A picture of noise, for pipelines that take one."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (height, width, 3), generator=generator)
    return Image.fromarray(values.to(torch.uint8).numpy())


def clip_tokenizer(max_length: int = 16) -> CLIPTokenizer:
    letters = [*string.ascii_lowercase, *string.digits, '"', "'", ",", "."]
    tokens = [*letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=max_length)


def clip_text_encoder(cls: type, tokenizer: CLIPTokenizer) -> Any:
    """`cls` is CLIPTextModel or CLIPTextModelWithProjection; width 16."""
    config = CLIPTextConfig(
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
    return cls(config).eval()


def t5_tokenizer() -> T5Tokenizer:
    pieces = ["<pad>", "</s>", "<unk>", "▁", *string.ascii_lowercase]
    return T5Tokenizer(vocab=[(p, -float(i)) for i, p in enumerate(pieces)], extra_ids=0)


def t5_encoder(tokenizer: T5Tokenizer, cls: type = T5EncoderModel, width: int = 16) -> Any:
    config = T5Config(
        vocab_size=len(tokenizer), d_model=width, d_ff=32, d_kv=8, num_heads=2, num_layers=2
    )
    return cls(config).eval()


def vae(latent_channels: int = 4, **config: Any) -> AutoencoderKL:
    """Two levels: a latent pixel is 2 x 2 picture pixels."""
    defaults = {
        "block_out_channels": (8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 4,
        "layers_per_block": 1,
        "sample_size": 16,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "shift_factor": 0.06,
        "scaling_factor": 1.5,
    }
    return AutoencoderKL(latent_channels=latent_channels, **{**defaults, **config}).eval()
