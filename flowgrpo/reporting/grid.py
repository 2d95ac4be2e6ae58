"""Labelled grids of samples: one row per prompt and noise, one column per model.

In a still grid a video is a strip of frames; `animate_grid` plays all videos of a grid at once.
"""

import textwrap
from collections.abc import Iterator, Sequence

from PIL import Image, ImageDraw, ImageFont

from flowgrpo.data.samples import Sample, frames_of, is_video, side_by_side, strip_of

CELL_WIDTH, FRAME_WIDTH = 192, 96
"""Widths in pixels that an image, and a frame in a strip, are scaled to (see `_fit`)."""


LABEL_WIDTH, LINE_HEIGHT, LETTER_WIDTH, MARGIN, GAP = 190, 18, 7, 6, 2
"""In pixels. LETTER_WIDTH is approximate; GAP is between the frames of a strip."""


INK, FAINT, PAPER = "#1a1a1a", "#6b6b6b", "white"


def draw_grid(
    samples: Sequence[Sequence[Sample]],
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    captions: Sequence[Sequence[str]] | None = None,
) -> Image.Image:
    """Draws all samples as one image, with labels above and beside them and captions under them.

    Args:
        samples: rows of equally many images or videos.
        row_labels: one per row; wrapped.
        column_labels: one per column; wrapped.
        captions: one per sample, such as its score; may have several lines.
    """
    cells = [[_cell(sample) for sample in row] for row in samples]
    layout = _Layout(cells, row_labels, column_labels, captions or [])
    size = (layout.left(len(column_labels)), layout.top(len(cells)))
    sheet = Image.new("RGB", size, PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for column, header in enumerate(layout.headers):
        draw.multiline_text((layout.left(column), 2), "\n".join(header), INK, font)
    for row, label in enumerate(layout.labels):
        top = layout.top(row)
        draw.multiline_text((MARGIN, top), "\n".join(label), INK, font)
        for column, cell in enumerate(cells[row]):
            left = layout.left(column)
            sheet.paste(cell, (left, top))
            if captions:
                below = (left, top + layout.cell_height)
                draw.multiline_text(below, captions[row][column], FAINT, font)
    return sheet


def animate_grid(
    samples: Sequence[Sequence[Sample]],
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    captions: Sequence[Sequence[str]] | None = None,
) -> Iterator[Image.Image]:
    """Yields the frames of a video in which all videos of a grid play at once.

    Shorter videos stop at their last frame. The arguments are those of `draw_grid`.
    """
    cells = [[frames_of(sample) for sample in row] for row in samples]
    for number in range(max(len(frames) for row in cells for frames in row)):
        stills = [[frames[min(number, len(frames) - 1)] for frames in row] for row in cells]
        yield draw_grid(stills, row_labels, column_labels, captions)


class _Layout:
    """Wrapped labels of a grid, and positions in pixels."""

    def __init__(
        self,
        cells: Sequence[Sequence[Image.Image]],
        row_labels: Sequence[str],
        column_labels: Sequence[str],
        captions: Sequence[Sequence[str]],
    ):
        self.cell_width = max(cell.width for row in cells for cell in row)
        self.cell_height = max(cell.height for row in cells for cell in row)
        self.labels = [textwrap.wrap(label, LABEL_WIDTH // LETTER_WIDTH) for label in row_labels]
        self.headers = [
            textwrap.wrap(label, self.cell_width // LETTER_WIDTH) for label in column_labels
        ]
        lines = max((text.count("\n") + 1 for row in captions for text in row), default=0)
        heights = [len(label) * LINE_HEIGHT for label in self.labels]
        self.row_height = max([self.cell_height + lines * LINE_HEIGHT, *heights]) + MARGIN
        self.header_height = max([1, *map(len, self.headers)]) * LINE_HEIGHT + MARGIN

    def left(self, column: int) -> int:
        return LABEL_WIDTH + column * (self.cell_width + MARGIN)

    def top(self, row: int) -> int:
        return self.header_height + row * self.row_height


def _cell(sample: Sample) -> Image.Image:
    if is_video(sample):
        return side_by_side([_fit(frame, FRAME_WIDTH) for frame in strip_of(sample)], GAP)
    return _fit(frames_of(sample)[0], CELL_WIDTH)


def _fit(image: Image.Image, width: int) -> Image.Image:
    """Enlarges a small image by the largest integer factor that `width` has room for.

    One that is wider than twice `width` is reduced to that. Pixels of small images stay sharp.
    """
    image = image.convert("RGB")
    if image.width <= width:
        factor = width // image.width
        size = (image.width * factor, image.height * factor)
        return image.resize(size, Image.Resampling.NEAREST)
    height = round(image.height * 2 * width / image.width)
    return image.resize((2 * width, height)) if image.width > 2 * width else image
