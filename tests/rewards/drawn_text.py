"""Images of words, drawn with the font that matplotlib includes."""

from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

BLACK, WHITE = (Image.new("RGB", (64, 32), colour) for colour in ("black", "white"))


@cache
def font(size: int) -> ImageFont.FreeTypeFont:
    from matplotlib import get_data_path

    return ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans-Bold.ttf", size)


def draw(*lines: str, width: int = 64, height: int = 32, size: int = 22) -> Image.Image:
    image = Image.new("RGB", (width, height), "white")
    canvas = ImageDraw.Draw(image)
    for index, line in enumerate(lines):
        y = height * (2 * index + 1) / (2 * len(lines))
        canvas.text((width / 2, y), line, fill="black", font=font(size), anchor="mm")
    return image


def noise() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 64, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
