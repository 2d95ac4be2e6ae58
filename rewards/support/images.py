"""Conversion of a reward's images, PIL images or one float tensor, to PIL images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    import torch

    Images = Sequence[Image.Image] | torch.Tensor


def to_pil(
    images: Images, prompts: Sequence[str], columns: Mapping[str, Any] | None = None
) -> list[Image.Image]:
    """Returns the images as RGB and checks that each has a prompt and an entry in each column.

    Args:
        images: B PIL images of any mode, or a float tensor (B, 3, H, W) in [0, 1], which is rounded
            to 8 bits.
        prompts: B prompts.
        columns: B entries by column name. A plain value is refused as a misspelt setting.

    Raises:
        ValueError: a wrong type, count, shape or range, or a value that is not finite.
    """
    converted = _from_list(images) if isinstance(images, Sequence) else _from_tensor(images)
    for name, values in {"prompts": prompts, **(columns or {})}.items():
        if isinstance(values, str) or not hasattr(values, "__len__"):
            raise ValueError(
                f"{name} is {values!r}, but is neither a setting of this reward nor a list with "
                "one entry per image; correct the spelling."
            )
        if len(values) != len(converted):
            raise ValueError(
                f"{name} is a list of {len(values)}, but {len(converted)} images were given; "
                "pass one entry per image."
            )
    return converted


def _from_list(images: Sequence[Image.Image]) -> list[Image.Image]:
    for image in images:
        if not isinstance(image, Image.Image):
            raise ValueError(
                f"images holds {type(image).__name__}, but must be PIL images or one float tensor "
                "(B, 3, H, W); stack tensors."
            )
    return [image.convert("RGB") for image in images]


def _from_tensor(images: torch.Tensor) -> list[Image.Image]:
    # Duck typing: torch is not imported for callers that pass PIL images.
    shape = tuple(getattr(images, "shape", ()))
    if (
        not hasattr(images, "isfinite")
        or not images.is_floating_point()
        or len(shape) != 4
        or shape[1] != 3
    ):
        raise ValueError(
            f"images is {type(images).__name__} {shape}, but must be PIL images or one float "
            "tensor (B, 3, H, W); stack RGB images along the first dimension."
        )
    values = images.detach().float().cpu()
    if not values.isfinite().all():
        raise ValueError(
            "images is not finite, but every pixel must be; look for NaN in the sampler or decoder."
        )
    # The tolerance allows for rounding in half-precision decoders.
    if values.numel() and (values.min() < -1e-3 or values.max() > 1 + 1e-3):
        raise ValueError(
            f"images is in [{values.min():.3g}, {values.max():.3g}], but must be in [0, 1]; "
            "use images / 2 + 0.5 on a decoder's [-1, 1]."
        )
    arrays = (values.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(array) for array in arrays]
