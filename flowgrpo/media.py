"""Pictures and videos: what a sample is, and what a prompt file's columns name."""

from collections.abc import Mapping
from typing import Any

from PIL import Image

Sample = Image.Image | list[Image.Image]
"""A picture, or a video: its frames in order."""


def opened(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns with pictures and videos in place of their paths."""
    return dict(columns)
