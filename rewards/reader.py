"""Reading text with RapidOCR (PP-OCR through onnxruntime, Apache-2.0) on the CPU.

`read_lines` finds lines of text and reads them; `recognise` takes pictures of one line each and
gives the recogniser's probabilities, many pictures in one call.
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
"""Pixels: a line's height as the recogniser takes it, and the width of one of its frames."""

WIDTH_STEP = 32
"""Pixels: lines are padded to whole steps, so that pictures of similar widths share a call."""

BATCH = 64
DETECTION_SIDE = 320
"""Pixels: a picture whose short side is less is enlarged before lines are looked for."""


def read_lines(picture: Image.Image, threads: int) -> str:
    """Text of a picture: its lines from top to bottom, joined by a space; "" if there is none."""
    found = _engine(True, True, threads)(_bgr(picture))
    return " ".join(found.txts or ())


def crop_lines(picture: Image.Image, threads: int) -> list[Image.Image]:
    """The upright boxes around the lines of text of a picture, from top to bottom."""
    found = _engine(True, False, threads)(_bgr(picture))
    boxes = [] if found.boxes is None else found.boxes
    corners = [
        (*np.floor(box.min(0)).astype(int), *np.ceil(box.max(0)).astype(int)) for box in boxes
    ]
    return [picture.crop(c) for c in corners if c[0] < c[2] and c[1] < c[3]]


def recognise(
    lines: Sequence[Image.Image], threads: int, min_frames: Sequence[int] | None = None
) -> list[np.ndarray]:
    """Probabilities (T, C) of each picture as one line of text; symbol 0 is CTC's blank.

    The picture is resized to height 48 with its aspect kept, and padded on the right to whole steps
    of 4 frames; T is its width / 8. Pictures of one width share calls of at most 64.

    Args:
        lines: N pictures.
        threads: of onnxruntime.
        min_frames: least T of each, by padding.
    """
    session = _engine(False, True, threads).text_rec.session.session
    name = session.get_inputs()[0].name
    arrays = [_line(p, n) for p, n in zip(lines, min_frames or [1] * len(lines), strict=True)]
    groups: dict[int, list[int]] = defaultdict(list)
    for index, array in enumerate(arrays):
        groups[array.shape[-1]].append(index)
    frames: dict[int, np.ndarray] = {}
    for indices in groups.values():
        for start in range(0, len(indices), BATCH):
            chunk = indices[start : start + BATCH]
            batch = np.stack([arrays[i] for i in chunk])
            frames.update(zip(chunk, session.run(None, {name: batch})[0], strict=True))
    return [frames[index] for index in range(len(lines))]


def characters(threads: int) -> list[str]:
    """The recogniser's C symbols; the first stands for CTC's blank."""
    return _engine(False, True, threads).text_rec.postprocess_op.character


def decode(frames: np.ndarray, characters: Sequence[str]) -> str:
    """Text of each frame's most probable symbol, frames (T, C): repeats merged, blanks dropped."""
    best = frames.argmax(-1)
    kept = best[(best != 0) & (best != np.append(0, best[:-1]))]
    return "".join(characters[index] for index in kept)


def default_threads() -> int:
    """Half the cores this process may use, from 1 to 4: PyTorch keeps the others."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(4, cores // 2))


def _line(picture: Image.Image, min_frames: int) -> np.ndarray:
    """(3, 48, W) in [-1, 1], blue first, padded with 0 as the recogniser was trained."""
    width = max(1, round(HEIGHT * picture.width / picture.height))
    pixels = _bgr(picture.resize((width, HEIGHT), Image.Resampling.BILINEAR))
    padded = -(-max(width, STRIDE * min_frames) // WIDTH_STEP) * WIDTH_STEP
    line = np.zeros((3, HEIGHT, padded), np.float32)
    line[:, :, :width] = pixels.transpose(2, 0, 1) / np.float32(127.5) - 1
    return line


def _bgr(picture: Image.Image) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(picture)[..., ::-1])


@functools.cache
def _engine(detect: bool, read: bool, threads: int) -> Any:
    try:
        from rapidocr import RapidOCR
    except ImportError as error:
        raise ImportError(
            "reward ocr needs RapidOCR, which is not installed; pip install rapidocr onnxruntime."
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
