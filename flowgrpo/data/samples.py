"""Samples, which are images or videos, and the files that they are saved in."""

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image, ImageSequence, PngImagePlugin

Sample: TypeAlias = Image.Image | list[Image.Image]
"""A PIL image, or a video as a list of PIL frames, RGB, in order."""


STRIP = 5
"""Largest number of frames of a video in a strip."""


def is_video(sample: Sample) -> bool:
    """Whether a sample is a video."""
    return isinstance(sample, (list, tuple))


def frames_of(sample: Sample) -> list[Image.Image]:
    """The frames of a video; an image is its own only frame."""
    return [sample] if isinstance(sample, Image.Image) else list(sample)


def strip_of(sample: Sample, most: int = STRIP) -> list[Image.Image]:
    """At most `most` frames at even intervals, the first and the last included."""
    frames = frames_of(sample)
    if len(frames) <= most:
        return frames
    return [frames[round(i * (len(frames) - 1) / (most - 1))] for i in range(most)]


def side_by_side(frames: Sequence[Image.Image], gap: int = 0) -> Image.Image:
    """Joins frames of one size into one image, from left to right.

    Args:
        gap: width in pixels of the white gaps between them.
    """
    width, height = frames[0].size
    sheet = Image.new("RGB", (len(frames) * (width + gap) - gap, height), "white")
    for column, frame in enumerate(frames):
        sheet.paste(frame, (column * (width + gap), 0))
    return sheet


def save_sample(sample: Sample, path: Path, fps: float) -> None:
    """Writes an image as the PNG `path`; a video as an MP4 next to it, and its strip as the PNG."""
    if not is_video(sample):
        frames_of(sample)[0].save(path)
        return
    write_video(frames_of(sample), path.with_suffix(".mp4"), fps)
    strip, info = strip_of(sample), PngImagePlugin.PngInfo()
    info.add_text("frames", str(len(strip)))
    side_by_side(strip).save(path, pnginfo=info)


def load_sample(path: Path) -> Sample:
    """Reads a PNG of `save_sample`, which is lossless: an image, or the frames of a strip."""
    with Image.open(path) as file:
        image, count = file.convert("RGB"), int(file.info.get("frames", 0))
    if not count:
        return image
    width = image.width // count
    return [image.crop((i * width, 0, (i + 1) * width, image.height)) for i in range(count)]


def write_video(frames: Iterable[Image.Image], path: Path, fps: float) -> None:
    """Writes an MP4 that browsers play (H.264, 4:2:0).

    The format needs even sizes, so an odd height or width is padded by a copy of its last pixels.

    Args:
        fps: frame rate.

    Raises:
        RuntimeError: ffmpeg failed.
    """
    import imageio.v2 as imageio

    frames = iter(frames)
    first = next(frames)
    edge = ((0, first.height % 2), (0, first.width % 2), (0, 0))
    target: Any = imageio.get_writer(
        path,
        "ffmpeg",
        fps=fps,
        codec="libx264",
        pixelformat="yuv420p",
        quality=8,
        macro_block_size=1,
        output_params=["-movflags", "+faststart"],
    )
    with target as writer:
        for frame in chain([first], frames):
            writer.append_data(np.pad(np.asarray(frame.convert("RGB")), edge, "edge"))
    if not path.stat().st_size:  # imageio raises no error; ffmpeg has printed the reason
        raise RuntimeError(
            f"{path} cannot be written ({first.width} x {first.height}, {fps:g} frames per "
            "second); see what ffmpeg printed."
        )


def read_video(path: str | Path) -> list[Image.Image]:
    """Reads the frames of a video file or an animated GIF.

    Raises:
        ValueError: the file ends before its last frame.
    """
    if Path(path).suffix.lower() == ".gif":
        with Image.open(path) as file:
            return [frame.convert("RGB") for frame in ImageSequence.Iterator(file)]
    import imageio.v2 as imageio

    source: Any = imageio.get_reader(path, "ffmpeg")
    with source as reader:
        frames = [Image.fromarray(frame) for frame in reader]
        metadata = reader.get_meta_data()
    expected = metadata["duration"] * metadata["fps"]
    if len(frames) < 0.9 * expected:
        raise ValueError(f"it ends after {len(frames)} of {expected:.0f} frames")
    return frames
