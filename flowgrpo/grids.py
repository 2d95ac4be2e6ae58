"""Labelled picture grids: rows of prompts, columns of models, the same noise along a row."""

import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

CELL = 192
"""Width of a cell in pixels; smaller pictures are enlarged by whole factors, pixel by pixel."""
LABEL_WIDTH, LINE, LETTER, MARGIN = 190, 18, 7, 6
"""In pixels; LETTER is the width of a letter of the labels' font, about."""
INK, FAINT, PAPER = "#1a1a1a", "#6b6b6b", "white"


def draw_grid(
    pictures: Sequence[Sequence[Image.Image]],
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    captions: Sequence[Sequence[str]] | None = None,
) -> Image.Image:
    """One picture of all pictures, with labels above and beside them and captions under the cells.

    Args:
        pictures: rows of equally many pictures, all of one size.
        row_labels: one a row, wrapped.
        column_labels: one a column.
        captions: under each cell, a score say; lines end at a newline.
    """
    cells = [[_fit(picture) for picture in row] for row in pictures]
    width, height = cells[0][0].size
    lines = max((text.count("\n") + 1 for row in captions or [] for text in row), default=0)
    labels = [textwrap.wrap(label, LABEL_WIDTH // LETTER) for label in row_labels]
    headers = [textwrap.wrap(label, width // LETTER) for label in column_labels]
    row_height = max([height + lines * LINE, *(len(label) * LINE for label in labels)]) + MARGIN
    head = max([1, *map(len, headers)]) * LINE + MARGIN
    size = (LABEL_WIDTH + len(headers) * (width + MARGIN), head + len(cells) * row_height)
    sheet = Image.new("RGB", size, PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for column, header in enumerate(headers):
        left = LABEL_WIDTH + column * (width + MARGIN)
        draw.multiline_text((left, 2), "\n".join(header), INK, font)
    for row, label in enumerate(labels):
        top = head + row * row_height
        draw.multiline_text((MARGIN, top), "\n".join(label), INK, font)
        for column, cell in enumerate(cells[row]):
            left = LABEL_WIDTH + column * (width + MARGIN)
            sheet.paste(cell, (left, top))
            if captions:
                draw.multiline_text((left, top + height), captions[row][column], FAINT, font)
    return sheet


def _fit(picture: Image.Image) -> Image.Image:
    picture = picture.convert("RGB")
    if picture.width <= CELL:
        factor = CELL // picture.width
        return picture.resize(
            (picture.width * factor, picture.height * factor), Image.Resampling.NEAREST
        )
    height = round(picture.height * 2 * CELL / picture.width)
    return picture.resize((2 * CELL, height)) if picture.width > 2 * CELL else picture
