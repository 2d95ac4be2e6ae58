"""Does the image match its prompt? Cosine similarity of CLIP's image and text embeddings.

Any model of open_clip can be used (Radford et al. 2021, arXiv 2103.00020).

Weights: ViT-B/32 trained on LAION-2B, from the hub (MIT); other models have their own licence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rewards.contract import reward
from rewards.support.clip_model import embed_images, embed_texts, load
from rewards.support.images import to_pil

if TYPE_CHECKING:
    import torch

    from rewards.support.images import Images


def models(
    *, model: str = "ViT-B-32", pretrained: str | None = None, device: str | None = None
) -> list[torch.nn.Module]:
    """Returns the torch modules that a call with these settings uses."""
    return [load(model, pretrained, device).model]


@reward(columns=(), models=models)
def clip(
    images: Images,
    prompts: Sequence[str],
    *,
    model: str = "ViT-B-32",
    pretrained: str | None = None,
    device: str | None = None,
    **columns: Any,
) -> list[float]:
    """Scores each image by its similarity to its own prompt.

    Args:
        images: B PIL images, or a float tensor (B, 3, H, W) in [0, 1], which is rounded to 8 bits.
        prompts: B prompts. One longer than the model's context (77 tokens for most) is truncated
            but keeps its end token; a warning counts them when this first happens.
        model: an open_clip name, a folder with `open_clip_config.json` (`local-dir:FOLDER` or its
            plain path), or `hf-hub:org/name`.
        pretrained: tag or file of the weights, only for an open_clip name.
        device: device of the model; by default the GPU if there is one.
        columns: data columns, not used.

    Returns:
        B cosine similarities in [-1, 1]; trained models give about 0.1 to 0.4.

    Raises:
        ValueError: an unknown model or tag, or wrong counts.
        ImportError: open_clip is not installed.
    """
    import torch

    pil_images = to_pil(images, prompts, columns)
    loaded = load(model, pretrained, device)
    unique = list(dict.fromkeys(prompts))
    texts = dict(zip(unique, embed_texts(unique, loaded), strict=True))
    if not pil_images:
        return []
    text_embeddings = torch.stack([texts[prompt] for prompt in prompts])
    return (embed_images(pil_images, loaded) * text_embeddings).sum(-1).tolist()
