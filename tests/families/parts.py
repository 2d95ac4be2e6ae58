"""Parts that families share: random weights, images, CLIP and T5, sizes, flow schedulers.

Every tokenizer spells letter by letter.
"""

import string
from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from PIL import Image
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    PreTrainedTokenizerBase,
    T5EncoderModel,
    T5Tokenizer,
)

DIT: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 1,
    "in_channels": 4,
    "out_channels": 4,
}
"""Configuration of a transformer on latents of four channels."""

JOINT: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 1,
    "in_channels": 16,
    "joint_attention_dim": 16,
    "axes_dims_rope": (4, 6, 6),
}
"""Configuration of a transformer on 2 x 2 patches of such latents, with joint attention.

The text output of the last layer is unused, so that with a single layer only the keys and values of
the text are trained.
"""

FLUX: dict[str, Any] = {**JOINT, "num_single_layers": 1}
"""As JOINT, with a single-stream layer after the double-stream one."""


def awake(module: torch.nn.Module) -> None:
    """Makes every input matter to the output: scales linear layers by 3 ** 0.5, which undoes the
    shrinking of torch's initialization, and fills parameters that are initialized to zero."""
    generator = torch.Generator().manual_seed(1)
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data *= 3**0.5
    for parameter in module.parameters():
        if parameter.count_nonzero() == 0:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05


def picture(width: int = 16, height: int = 16, seed: int = 0) -> Image.Image:
    """An image of noise, for pipelines that take one."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (height, width, 3), generator=generator)
    return Image.fromarray(values.to(torch.uint8).numpy())


def film(frames: int = 5, seed: int = 0) -> list[Image.Image]:
    """Images of noise, one per frame."""
    return [picture(seed=seed + i) for i in range(frames)]


def mask() -> Image.Image:
    """An inpainting mask whose right half is white, that is, repainted."""
    canvas = Image.new("L", (16, 16), 0)
    canvas.paste(255, (8, 0, 16, 16))
    return canvas


def text_parts(
    encoder: Callable[..., Any], tokenizer: PreTrainedTokenizerBase, suffix: str = "", **config: Any
) -> dict[str, Any]:
    """A pipeline's `text_encoder` and `tokenizer`; `suffix` is appended to both names, as `_2`."""
    return {
        f"text_encoder{suffix}": encoder(tokenizer, **config),
        f"tokenizer{suffix}": tokenizer,
    }


def clip_tokenizer(max_length: int = 16) -> CLIPTokenizer:
    letters = [*string.ascii_lowercase, *string.digits, '"', "'", ",", "."]
    tokens = [*letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=max_length)


def clip_text_encoder(tokenizer: CLIPTokenizer, cls: type = CLIPTextModel) -> Any:
    """`cls` may be CLIPTextModelWithProjection."""
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
    return cls(config)


def clip(suffix: str = "", max_length: int = 16, **config: Any) -> dict[str, Any]:
    return text_parts(clip_text_encoder, clip_tokenizer(max_length), suffix, **config)


def t5_tokenizer() -> T5Tokenizer:
    pieces = ["<pad>", "</s>", "<unk>", "▁", *string.ascii_lowercase]
    return T5Tokenizer(vocab=[(p, -float(i)) for i, p in enumerate(pieces)], extra_ids=0)


def t5_encoder(
    tokenizer: PreTrainedTokenizerBase, cls: type = T5EncoderModel, width: int = 16
) -> Any:
    """`cls` may be UMT5EncoderModel."""
    config = cls.config_class(
        vocab_size=len(tokenizer),
        d_model=width,
        d_ff=32,
        d_kv=8,
        num_heads=2,
        num_layers=1,
        dropout_rate=0.0,
    )
    return cls(config)


def t5(suffix: str = "", **config: Any) -> dict[str, Any]:
    return text_parts(t5_encoder, t5_tokenizer(), suffix, **config)


def flow_euler(**config: Any) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**config)


def dynamic_flow_euler(max_shift: float = 1.15, **config: Any) -> FlowMatchEulerDiscreteScheduler:
    """The shift grows with the number of image tokens, as in Flux."""
    return flow_euler(use_dynamic_shifting=True, base_shift=0.5, max_shift=max_shift, **config)


FLOW: dict[str, Any] = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


def flow_unipc(shift: float = 3.0) -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(flow_shift=shift, **FLOW)


def flow_dpm(shift: float = 3.0) -> DPMSolverMultistepScheduler:
    return DPMSolverMultistepScheduler(flow_shift=shift, **FLOW)
