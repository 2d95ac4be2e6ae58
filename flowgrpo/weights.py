"""How large a model is, read from its files' headers: nothing is loaded."""

import math
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open

DENOISER_NAMES = ("transformer", "unet")
"""How the parts of a diffusers pipeline that denoise are called: these, or transformer_2, say."""


def denoiser_sizes(path: str | None, names: Sequence[str] | None = None) -> dict[str, int]:
    """Number of parameters by denoiser, of a pipeline folder; empty where there is none here.

    Args:
        names: only these denoisers; default: all.
    """
    sizes: dict[str, int] = {}
    for file in sorted(Path(path or "").expanduser().glob("*/*.safetensors")):
        name = file.parent.name
        if path and name.startswith(DENOISER_NAMES) and (names is None or name in names):
            sizes[name] = sizes.get(name, 0) + _parameters_in(file)
    return sizes


def _parameters_in(file: Path) -> int:
    with safe_open(file, "pt") as tensors:
        shapes = [tensors.get_slice(key).get_shape() for key in tensors.keys()]  # noqa: SIM118
    return sum(math.prod(shape) for shape in shapes)
