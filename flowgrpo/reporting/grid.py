"""Labelled grids: rows of prompts, columns of models, the same noise along a row. A video is a
strip of frames; `animate_grid` plays all of a grid at once."""

import textwrap
from collections.abc import Iterator, Sequence

from PIL import Image, ImageDraw, ImageFont

from flowgrpo.data.samples import Sample, frames_of, is_video, side_by_side, strip_of

CELL, FRAME = 192, 96
"""Width of a cell, and of a frame on a strip, in pixels; smaller pictures are enlarged by whole
factors, pixel by pixel."""


LABEL_WIDTH, LINE, LETTER, MARGIN, GAP = 190, 18, 7, 6, 2
"""In pixels; LETTER is the width of a letter of the labels' font, about; GAP is within strips."""


INK, FAINT, PAPER = "#1a1a1a", "#6b6b6b", "white"


def draw_grid(
    samples: Sequence[Sequence[Sample]],
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    captions: Sequence[Sequence[str]] | None = None,
) -> Image.Image:
    """One picture of all samples, with labels above and beside them and captions under the cells.

    Args:
        samples: rows of equally many pictures or videos.
        row_labels: one a row, wrapped.
        column_labels: one a column.
        captions: under each cell, a score say; lines end at a newline.
    """
    cells = [[_cell(sample) for sample in row] for row in samples]
    width = max(cell.width for row in cells for cell in row)
    height = max(cell.height for row in cells for cell in row)
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


def animate_grid(
    samples: Sequence[Sequence[Sample]],
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    captions: Sequence[Sequence[str]] | None = None,
) -> Iterator[Image.Image]:
    """The frames of one video in which all videos of a grid play; short ones stop at their end."""
    cells = [[frames_of(sample) for sample in row] for row in samples]
    for number in range(max(len(frames) for row in cells for frames in row)):
        now = [[frames[min(number, len(frames) - 1)] for frames in row] for row in cells]
        yield draw_grid(now, row_labels, column_labels, captions)


def _cell(sample: Sample) -> Image.Image:
    if is_video(sample):
        return side_by_side([_fit(frame, FRAME) for frame in strip_of(sample)], GAP)
    return _fit(frames_of(sample)[0], CELL)


def _fit(picture: Image.Image, width: int) -> Image.Image:
    """From `width`, or from a bit less where a whole factor gives no more, to twice that."""
    picture = picture.convert("RGB")
    if picture.width <= width:
        factor = width // picture.width
        return picture.resize(
            (picture.width * factor, picture.height * factor), Image.Resampling.NEAREST
        )
    height = round(picture.height * 2 * width / picture.width)
    return picture.resize((2 * width, height)) if picture.width > 2 * width else picture
