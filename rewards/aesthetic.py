"""How pleasing is the image? LAION's improved aesthetic predictor on CLIP ViT-L/14 embeddings.

A stack of linear layers, trained on ratings from 1 to 10 (SAC, LAION logos and AVA; Schuhmann 2022,
github.com/christophschuhmann/improved-aesthetic-predictor). The prompt is not used.

Weights: predictor head from the hub (Apache-2.0), on OpenAI's CLIP ViT-L/14 (MIT).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewards.contract import reward
from rewards.support.clip_model import embed_images, load
from rewards.support.images import to_pil

if TYPE_CHECKING:
    import torch

    from rewards.support.images import Images

HUB_WEIGHTS = "trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth"
"""The published head `sac+logos+ava1-l14-linearMSE`, as `org/name/file` on the hub."""

WIDTH = 768
"""Number of dimensions of a ViT-L/14 embedding."""


def models(
    *,
    weights: str | None = None,
    clip_model: str = "ViT-L-14",
    clip_pretrained: str | None = "openai",
    device: str | None = None,
) -> list[torch.nn.Module]:
    """Returns the torch modules that a call with these settings uses, except for the head, which is
    small and stays on the CPU."""
    return [load(clip_model, clip_pretrained, device).model]


@reward(columns=(), models=models)
def aesthetic(
    images: Images,
    prompts: Sequence[str],
    *,
    weights: str | None = None,
    clip_model: str = "ViT-L-14",
    clip_pretrained: str | None = "openai",
    device: str | None = None,
    **columns: Any,
) -> list[float]:
    """Scores how much people would like each image.

    Args:
        images: B PIL images, or a float tensor (B, 3, H, W) in [0, 1].
        prompts: B prompts, not used.
        weights: the head: a .safetensors or .pth file, or `org/name/file` on the hub; by default
            the published one, `HUB_WEIGHTS`.
        clip_model: an open_clip name, a folder, or `hf-hub:org/name`, with embeddings of 768
            dimensions; the published head is meaningful only on OpenAI's ViT-L/14.
        clip_pretrained: tag or file of its weights; None for a folder or the hub.
        device: device of CLIP; by default the GPU if there is one.
        columns: data columns, not used.

    Returns:
        B ratings, mostly from 3 to 8 of 10; the scale has no hard bounds.

    Raises:
        ValueError: weights of another layout, a model of another width, or wrong counts.
        ImportError: open_clip is not installed.
    """
    pil_images = to_pil(images, prompts, columns)
    head = load_head(weights)
    loaded = load(clip_model, clip_pretrained, device)
    return predict(embed_images(pil_images, loaded), head).tolist() if pil_images else []


def predict(embeddings: torch.Tensor, head: torch.nn.Module) -> torch.Tensor:
    """Returns the ratings (B,) of image embeddings (B, 768), which are L2-normalised here.

    Raises:
        ValueError: embeddings of another shape.
    """
    import torch

    if embeddings.ndim != 2 or embeddings.shape[1] != WIDTH:
        raise ValueError(
            f"embeddings is {tuple(embeddings.shape)}, but must be (B, {WIDTH}); "
            "use a CLIP model of that width, ViT-L-14."
        )
    with torch.inference_mode():
        return head(torch.nn.functional.normalize(embeddings, dim=-1)).squeeze(-1)


@functools.cache
def load_head(weights: str | None = None) -> torch.nn.Module:
    """Loads the head in eval mode, once per `weights`, which are described at `aesthetic`.

    Raises:
        ValueError: weights of another layout, or neither a file nor a path on the hub.
    """
    import torch

    path = _find(weights or HUB_WEIGHTS)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        state = load_file(path)
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
    head = _head()
    try:
        head.load_state_dict({k.removeprefix("layers."): v for k, v in state.items()})
    except RuntimeError as error:
        raise ValueError(
            f"weights is {path}, but lacks the predictor's layers 768-1024-128-64-16-1; "
            "use the file sac+logos+ava1-l14-linearMSE."
        ) from error
    return head.float().eval().requires_grad_(False)


def _head() -> torch.nn.Module:
    """Returns the untrained layers, without activations; dropouts keep the published indices."""
    from torch.nn import Dropout, Linear, Sequential

    return Sequential(
        Linear(WIDTH, 1024),
        Dropout(0.2),
        Linear(1024, 128),
        Dropout(0.2),
        Linear(128, 64),
        Dropout(0.1),
        Linear(64, 16),
        Linear(16, 1),
    )


def _find(weights: str) -> Path:
    if Path(weights).is_file():
        return Path(weights)
    parts = weights.split("/")
    if len(parts) < 3 or not all(parts):
        raise ValueError(
            f"weights is {weights}, but is neither a file nor org/name/file on the hub; "
            "correct the path."
        )
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download("/".join(parts[:2]), "/".join(parts[2:])))
