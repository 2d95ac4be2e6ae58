"""CLIP models of open_clip: loading, and embeddings of images and texts.

A model is a name with a tag of its weights, a folder, or a hub repository. Activation,
preprocessing and tokenizer are the model's own.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from PIL import Image

DEFAULT_TAGS = {"ViT-B-32": "laion2b_s34b_b79k"}
"""Tag of the weights by model name, for models that may be given without one."""

BATCH = 32
"""Largest number of images or texts per forward."""


@dataclass(frozen=True, kw_only=True)
class Clip:
    """A loaded open_clip model on its device, in eval mode and float32."""

    name: str
    """Name that open_clip loaded it by."""
    pretrained: str | None
    """Tag or file of the weights; None for a folder or a hub repository."""
    model: Any
    """The open_clip network."""
    preprocess: Callable[[Image.Image], torch.Tensor]
    """Turns an image into pixels (3, H, W)."""
    tokenizer: Callable[..., torch.Tensor]
    """Turns B texts into token ids (B, context_length)."""
    context_length: int
    """Number of tokens per text."""
    device: str
    """Device of the network."""


def embed_images(images: Sequence[Image.Image], loaded: Clip) -> torch.Tensor:
    """Returns L2-normalised image embeddings (B, D), float32 on the CPU."""
    import torch

    pixels = [torch.stack([loaded.preprocess(i) for i in chunk]) for chunk in _chunks(images)]
    return _embed(pixels, loaded.model.encode_image, loaded.device)


def embed_texts(texts: Sequence[str], loaded: Clip) -> torch.Tensor:
    """Returns L2-normalised text embeddings (B, D), float32 on the CPU.

    Warns once per model if texts are truncated.
    """
    tokens = [tokenize(chunk, loaded) for chunk in _chunks(texts)]
    return _embed(tokens, loaded.model.encode_text, loaded.device)


def tokenize(texts: Sequence[str], loaded: Clip) -> torch.Tensor:
    """Returns token ids (B, context_length); a truncated text keeps the end token as its last."""
    length = loaded.context_length
    tokens = loaded.tokenizer(list(texts))
    # Tokenizers do not report truncation, so compare with a context that fits any of the texts.
    complete = loaded.tokenizer(list(texts), context_length=4 * max(map(len, texts)) + length)
    differs = (tokens != complete[:, :length]).any(-1).tolist()
    truncated = [text for text, is_cut in zip(texts, differs, strict=True) if is_cut]
    if truncated and loaded.name not in _warned:
        _warned.add(loaded.name)
        warnings.warn(
            f"{len(truncated)} of {len(texts)} prompts are longer than the {length} tokens of "
            f'{loaded.name} and are truncated, such as "{truncated[0][:60]}..."; '
            "shorten them, or use a model with a longer context.",
            stacklevel=2,
        )
    return tokens


_warned: set[str] = set()
"""Names of the models whose truncated texts have been reported."""


@functools.cache
def load(model: str, pretrained: str | None = None, device: str | None = None) -> Clip:
    """Loads an open_clip model, once for each combination of arguments.

    Args:
        model: an open_clip name, a folder with `open_clip_config.json` (`local-dir:FOLDER` or its
            plain path), or `hf-hub:org/name`.
        pretrained: tag or file of the weights, only for an open_clip name.
        device: device of the network; by default the GPU if there is one.

    Raises:
        ValueError: an unknown model or tag.
        ImportError: open_clip is not installed.
    """
    import torch

    try:
        import open_clip
    except ImportError as error:
        raise ImportError(
            "open_clip is not installed, but CLIP models need it; pip install open_clip_torch."
        ) from error
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = f"local-dir:{model}" if (Path(model) / "open_clip_config.json").is_file() else model
    quick_gelu = False
    if ":" in name:
        _check_source(name, pretrained)
    else:
        pretrained = pretrained or DEFAULT_TAGS.get(model)
        quick_gelu = _needs_quick_gelu(open_clip, model, pretrained)
    network, preprocess = open_clip.create_model_from_pretrained(
        name, pretrained, device=device, force_quick_gelu=quick_gelu
    )
    tokenizer = open_clip.get_tokenizer(name)
    return Clip(
        name=name,
        pretrained=pretrained,
        model=network.eval().requires_grad_(False),
        preprocess=preprocess,
        tokenizer=tokenizer,
        context_length=tokenizer.context_length,
        device=device,
    )


def _check_source(name: str, pretrained: str | None) -> None:
    schema, source = name.split(":", 1)
    if schema not in ("local-dir", "hf-hub"):
        raise ValueError(
            f"model is {name}, but starts with neither local-dir: nor hf-hub:; use one of them."
        )
    if pretrained:
        raise ValueError(
            f"pretrained is {pretrained}, but {name} has its own weights; leave pretrained out."
        )
    if schema == "local-dir" and not (Path(source) / "open_clip_config.json").is_file():
        raise ValueError(
            f"model is {name}, but that folder holds no open_clip_config.json; correct the path."
        )


def _needs_quick_gelu(open_clip: Any, model: str, pretrained: str | None) -> bool:
    """Checks a name and tag; returns whether the weights were trained with QuickGELU.

    open_clip only warns if the activation of the name differs from that of the weights.
    """
    if model not in (names := open_clip.list_models()):
        near = get_close_matches(model, names, n=3) or ["ViT-B-32"]
        raise ValueError(
            f"model is {model}, but is neither a model of open_clip nor a folder with "
            f"open_clip_config.json; did you mean {' or '.join(near)}?"
        )
    if pretrained and Path(pretrained).is_file():
        return False
    tags = open_clip.list_pretrained_tags_by_model(model)
    if pretrained not in tags:
        raise ValueError(
            f"pretrained is {pretrained}, but must be a file or a tag of {model}; "
            f"use one of {', '.join(tags) or 'no tags: give a file'}."
        )
    quick_gelu = bool(open_clip.get_pretrained_cfg(model, pretrained).get("quick_gelu", False))
    if open_clip.get_model_config(model).get("quick_gelu", False) and not quick_gelu:
        raise ValueError(
            f"model is {model}, but the weights {pretrained} were trained without QuickGELU; "
            f"use {model.removesuffix('-quickgelu')}."
        )
    return quick_gelu


def _embed(batches: list[torch.Tensor], encode: Callable[..., Any], device: str) -> torch.Tensor:
    import torch

    with torch.inference_mode():
        parts = [encode(batch.to(device)).float() for batch in batches]
        parts = [torch.nn.functional.normalize(part, dim=-1).cpu() for part in parts]
    return torch.cat(parts) if parts else torch.empty(0, 0)


def _chunks(items: Sequence[Any]) -> list[Sequence[Any]]:
    return [items[start : start + BATCH] for start in range(0, len(items), BATCH)]
