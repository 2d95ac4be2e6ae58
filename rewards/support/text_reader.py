"""Text recognition with RapidOCR (PP-OCR models on onnxruntime, Apache-2.0) on the CPU.

`read_lines` detects lines of text and reads them; `recognise` takes images of one line each and
returns the recogniser's probabilities, in batches.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

HEIGHT, STRIDE = 48, 8
"""Height of the recogniser's input and width of one of its frames, in pixels."""

WIDTH_STEP = 32
"""Line widths are padded to a multiple of this, in pixels, so that similar ones share a batch."""

BATCH = 64
"""Largest number of lines per call of the recogniser."""

DETECTION_SIDE = 320
"""Images whose short side is smaller, in pixels, are enlarged to this before detection."""


def read_lines(image: Image.Image, threads: int) -> str:
    """Returns the text of an image, lines from top to bottom joined by a space; "" without text."""
    found = _engine(True, True, threads)(_bgr(image))
    return " ".join(found.txts or ())


def crop_lines(image: Image.Image, threads: int) -> list[Image.Image]:
    """Returns the upright crops around an image's lines of text, from top to bottom."""
    found = _engine(True, False, threads)(_bgr(image))
    boxes = [] if found.boxes is None else found.boxes
    corners = [
        (*np.floor(box.min(0)).astype(int), *np.ceil(box.max(0)).astype(int)) for box in boxes
    ]
    return [image.crop(c) for c in corners if c[0] < c[2] and c[1] < c[3]]


def recognise(
    lines: Sequence[Image.Image], threads: int, min_frames: Sequence[int] | None = None
) -> list[np.ndarray]:
    """Returns the probabilities (T, C) of each image as one line of text; symbol 0 is CTC's blank.

    An image is resized to height 48, keeping its aspect ratio, and padded on the right to a
    multiple of 4 frames; T is its padded width / 8. Images of equal width share a batch.

    Args:
        lines: N images.
        threads: number of onnxruntime threads.
        min_frames: N lower bounds of T, reached by padding.
    """
    session = _engine(False, True, threads).text_rec.session.session
    name = session.get_inputs()[0].name
    arrays = [_line(p, n) for p, n in zip(lines, min_frames or [1] * len(lines), strict=True)]
    by_width: dict[int, list[int]] = defaultdict(list)
    for index, array in enumerate(arrays):
        by_width[array.shape[-1]].append(index)
    frames: dict[int, np.ndarray] = {}
    for indices in by_width.values():
        for start in range(0, len(indices), BATCH):
            chunk = indices[start : start + BATCH]
            batch = np.stack([arrays[i] for i in chunk])
            frames.update(zip(chunk, session.run(None, {name: batch})[0], strict=True))
    return [frames[index] for index in range(len(lines))]


def characters(threads: int) -> list[str]:
    """Returns the recogniser's C symbols; the first is CTC's blank."""
    return _engine(False, True, threads).text_rec.postprocess_op.character


def decode(frames: np.ndarray, characters: Sequence[str]) -> str:
    """Greedy CTC decoding of frames (T, C): the best symbols, repeats merged, blanks dropped."""
    best = frames.argmax(-1)
    kept = best[(best != 0) & (best != np.append(0, best[:-1]))]
    return "".join(characters[index] for index in kept)


def default_threads() -> int:
    """Returns half the number of cores available to this process, 1 to 4; PyTorch uses the rest."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(4, cores // 2))


def _line(image: Image.Image, min_frames: int) -> np.ndarray:
    """Returns the recogniser's input (3, 48, W) in [-1, 1], BGR, zero-padded as in its training."""
    width = max(1, round(HEIGHT * image.width / image.height))
    pixels = _bgr(image.resize((width, HEIGHT), Image.Resampling.BILINEAR))
    padded = -(-max(width, STRIDE * min_frames) // WIDTH_STEP) * WIDTH_STEP
    line = np.zeros((3, HEIGHT, padded), np.float32)
    line[:, :, :width] = pixels.transpose(2, 0, 1) / np.float32(127.5) - 1
    return line


def _bgr(image: Image.Image) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(image)[..., ::-1])


@functools.cache
def _engine(detect: bool, read: bool, threads: int) -> Any:
    try:
        from rapidocr import RapidOCR
    except ImportError as error:
        raise ImportError(
            "RapidOCR is not installed, but reading text needs it; "
            "pip install rapidocr onnxruntime."
        ) from error
    engine = RapidOCR(
        params={
            "Global.log_level": "critical",
            "Global.use_det": detect,
            "Global.use_cls": False,
            "Global.use_rec": read,
            "Det.limit_side_len": DETECTION_SIDE,
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )
    engine(np.full((HEIGHT, 2 * HEIGHT, 3), 255, np.uint8))  # the first call loads the models
    return engine
