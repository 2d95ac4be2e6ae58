"""Does the picture match its prompt? Cosine similarity of CLIP's image and text embeddings.

Any model of open_clip will do, from a name with a tag, a folder or the hub. Activation,
preprocessing and tokenizer are the model's own; `describe` records them.
"""

from __future__ import annotations

import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .pictures import to_pil

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from .pictures import Images

DEFAULT_TAGS = {"ViT-B-32": "laion2b_s34b_b79k"}
"""The weights of a model whose tag is left out; other names need one."""

BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Clip:
    """A loaded open_clip model on its device, in eval mode and float32."""

    name: str
    """What open_clip was asked for."""
    pretrained: str | None
    """Tag or file of the weights; None where a folder or the hub decides."""
    model: Any
    preprocess: Callable[[Image.Image], torch.Tensor]
    tokenizer: Callable[..., torch.Tensor]
    context_length: int
    device: str


def clip(
    images: Images,
    prompts: Sequence[str],
    *,
    model: str = "ViT-B-32",
    pretrained: str | None = None,
    device: str | None = None,
    **columns: Any,
) -> list[float]:
    """Score each picture against its own prompt.

    Args:
        images: B PIL images, or a float tensor (B, 3, H, W) in [0, 1]; seen as 8-bit pictures.
        prompts: B prompts. One longer than the model's context (77 tokens for most) is cut but
            keeps its end token; the first time this happens a warning counts them.
        model: an open_clip name, a folder with `open_clip_config.json` (`local-dir:FOLDER` or its
            plain path), or `hf-hub:org/name`.
        pretrained: tag or file of the weights, only for an open_clip name.
        device: where the model runs; by default on the GPU if there is one.
        columns: dataset columns, not read.

    Returns:
        B cosine similarities in [-1, 1]; trained models give about 0.1 to 0.4.

    Raises:
        ValueError: an unknown model or tag, or wrong counts.
        ImportError: open_clip is not installed.
    """
    import torch

    pictures = to_pil(images, prompts, columns)
    loaded = load(model, pretrained, device)
    unique = list(dict.fromkeys(prompts))
    texts = dict(zip(unique, embed_texts(unique, loaded), strict=True))
    if not pictures:
        return []
    own = torch.stack([texts[prompt] for prompt in prompts])
    return (embed_images(pictures, loaded) * own).sum(-1).tolist()


def describe(
    *, model: str = "ViT-B-32", pretrained: str | None = None, device: str | None = None
) -> dict[str, Any]:
    """What a score depends on, for a run's record."""
    import open_clip

    loaded = load(model, pretrained, device)
    activations = {type(m).__name__ for m in loaded.model.modules() if "GELU" in type(m).__name__}
    return {
        "open_clip": open_clip.__version__,
        "model": loaded.name,
        "pretrained": loaded.pretrained,
        "activation": ", ".join(sorted(activations)),
        "preprocess": dict(open_clip.get_model_preprocess_cfg(loaded.model)),
        "context_length": loaded.context_length,
        "prompts_cut": len(_cut[loaded.name]),
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
    }


def models(
    *, model: str = "ViT-B-32", pretrained: str | None = None, device: str | None = None
) -> list[Any]:
    """The torch modules that a call with these settings uses."""
    return [load(model, pretrained, device).model]


clip.describe = describe  # type: ignore[attr-defined]
clip.models = models  # type: ignore[attr-defined]
clip.columns = ()  # type: ignore[attr-defined]


def embed_images(pictures: Sequence[Image.Image], loaded: Clip) -> torch.Tensor:
    """L2-normalised image embeddings (B, D), float32 on the CPU."""
    import torch

    pixels = [torch.stack([loaded.preprocess(p) for p in chunk]) for chunk in _chunks(pictures)]
    return _embed(pixels, loaded.model.encode_image, loaded.device)


def embed_texts(texts: Sequence[str], loaded: Clip) -> torch.Tensor:
    """L2-normalised text embeddings (B, D), float32 on the CPU; warns once of texts cut short."""
    tokens = [tokenize(chunk, loaded) for chunk in _chunks(texts)]
    return _embed(tokens, loaded.model.encode_text, loaded.device)


def tokenize(texts: Sequence[str], loaded: Clip) -> torch.Tensor:
    """Token ids (B, context_length); a longer text is cut and its last id is the end token."""
    length = loaded.context_length
    tokens = loaded.tokenizer(list(texts))
    uncut = loaded.tokenizer(list(texts), context_length=4 * max(map(len, texts)) + length)
    is_cut = (tokens != uncut[:, :length]).any(-1).tolist()
    cut = [text for text, short in zip(texts, is_cut, strict=True) if short]
    if cut and not _cut[loaded.name]:
        warnings.warn(
            f"{len(cut)} of {len(texts)} prompts are longer than the {length} tokens of "
            f'{loaded.name} and are cut, such as "{cut[0][:60]}..."; '
            "shorten them, or use a model with a longer context.",
            stacklevel=2,
        )
    _cut[loaded.name].update(cut)
    return tokens


_cut: dict[str, set[str]] = defaultdict(set)
"""Model -> the prompts that it saw cut short."""


@functools.cache
def load(model: str, pretrained: str | None = None, device: str | None = None) -> Clip:
    """Load an open_clip model once for each combination of arguments; see `clip` for them."""
    import torch

    try:
        import open_clip
    except ImportError as error:
        raise ImportError(
            "rewards clip and aesthetic need open_clip, which is not installed; "
            "pip install open_clip_torch."
        ) from error
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = f"local-dir:{model}" if (Path(model) / "open_clip_config.json").is_file() else model
    quick_gelu = False
    if ":" in name:
        _check_source(name, pretrained)
    else:
        pretrained = pretrained or DEFAULT_TAGS.get(model)
        quick_gelu = _check_tag(open_clip, model, pretrained)
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
            f"model is {name}, but starts with neither local-dir: nor hf-hub:; use one."
        )
    if pretrained:
        raise ValueError(
            f"pretrained is {pretrained}, but {name} has its own weights; leave pretrained out."
        )
    if schema == "local-dir" and not (Path(source) / "open_clip_config.json").is_file():
        raise ValueError(
            f"model is {name}, but that folder holds no open_clip_config.json; correct the path."
        )


def _check_tag(open_clip: Any, model: str, pretrained: str | None) -> bool:
    """Whether the weights want QuickGELU; open_clip only warns if the name says otherwise."""
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
    wants = bool(open_clip.get_pretrained_cfg(model, pretrained).get("quick_gelu", False))
    if open_clip.get_model_config(model).get("quick_gelu", False) and not wants:
        raise ValueError(
            f"model is {model}, but the weights {pretrained} were trained without QuickGELU; "
            f"use {model.removesuffix('-quickgelu')}."
        )
    return wants


def _embed(batches: list[torch.Tensor], encode: Callable[..., Any], device: str) -> torch.Tensor:
    import torch

    with torch.inference_mode():
        parts = [encode(batch.to(device)).float() for batch in batches]
        parts = [torch.nn.functional.normalize(part, dim=-1).cpu() for part in parts]
    return torch.cat(parts) if parts else torch.empty(0, 0)


def _chunks(items: Sequence[Any]) -> list[Sequence[Any]]:
    return [items[start : start + BATCH] for start in range(0, len(items), BATCH)]
