"""Pictures and videos: columns that hold them, how they are opened, and the files they become.

A sample is a PIL image, or a video: a list of PIL frames, RGB, in order.
"""

import contextlib
import hashlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image, ImageOps, ImageSequence, PngImagePlugin

Sample: TypeAlias = Image.Image | list[Image.Image]

STRIP = 5
"""Frames of a video on a contact strip, at most."""
VIDEO_FILES = {".mp4", ".mov", ".webm", ".mkv", ".avi", ".m4v"}


@dataclass(kw_only=True, frozen=True)
class Stored:
    """A picture or video inside a `datasets.Dataset`, read from there when it is opened."""

    dataset: Any
    """With one column and `with_format("arrow")`, so that nothing is decoded."""
    index: int

    def read(self) -> Any:
        """As it is stored: a path, a mapping with `bytes` or a `path`, or a list of these."""
        (column,) = self.dataset[self.index].columns
        return column[0].as_py()


def is_media(column: str) -> bool:
    """Whether a column of this name holds pictures or videos: image, control_image, mask, ..."""
    return re.search(r"(^|_)(image|images|video|mask)$", column) is not None


def is_mask(column: str) -> bool:
    return "mask" in column.split("_")


def is_video_file(column: str, path: Path) -> bool:
    """Whether a media column's file is read as a video; of a GIF a picture column has one frame."""
    suffix, video = path.suffix.lower(), column.split("_")[-1] == "video"
    return video if suffix == ".gif" else suffix in VIDEO_FILES and (video or is_mask(column))


def located(value: Any, folder: Path) -> Any:
    """Paths of a media value from `folder`; an empty path, as of an empty CSV cell, is None."""
    if isinstance(value, (str, Path)):
        return str(folder / Path(value).expanduser()) if str(value).strip() else None
    return [located(item, folder) for item in value] if isinstance(value, (list, tuple)) else value


def opened(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns with pictures and videos opened: RGB images and frames, masks in grey (`L`).

    Raises:
        ValueError: names the column, the file and the reason.
    """
    return {
        name: _opened(name, value) if is_media(name) else value for name, value in columns.items()
    }


def code_that_opens(name: str, value: Any) -> str:
    """Python that opens a media value as `opened` does; what has no path is called `NAME.png`."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(code_that_opens(name, item) for item in value)}]"
    path = value if isinstance(value, str) else f"{name}.png"
    if is_video_file(name, Path(path)):
        return f"load_video({path!r})"
    return f"load_image({path!r})" + (".convert('L')" if is_mask(name) else "")


def digest(value: Any) -> Any:
    """A media value as JSON that changes with the contents of its files or with its pixels."""
    if isinstance(value, Stored):
        return digest(value.read())
    if isinstance(value, (list, tuple)):
        return [digest(item) for item in value]
    if isinstance(value, Image.Image):
        return hashlib.sha256(f"{value.mode} {value.size} ".encode() + value.tobytes()).hexdigest()
    if isinstance(value, Mapping):
        return digest(value["path"] if value["bytes"] is None else value["bytes"])
    if isinstance(value, (str, Path)):
        return digest(Path(value).read_bytes())
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else value


def is_video(sample: Sample) -> bool:
    return isinstance(sample, (list, tuple))


def frames_of(sample: Sample) -> list[Image.Image]:
    """The frames of a video; a picture is its own only frame."""
    return [sample] if isinstance(sample, Image.Image) else list(sample)


def strip_of(sample: Sample, most: int = STRIP) -> list[Image.Image]:
    """At most `most` frames evenly spaced, the first and the last among them."""
    frames = frames_of(sample)
    if len(frames) <= most:
        return frames
    return [frames[round(i * (len(frames) - 1) / (most - 1))] for i in range(most)]


def side_by_side(frames: Sequence[Image.Image], gap: int = 0) -> Image.Image:
    """One picture of frames of one size, from left to right, with white gaps between them."""
    width, height = frames[0].size
    sheet = Image.new("RGB", (len(frames) * (width + gap) - gap, height), "white")
    for place, frame in enumerate(frames):
        sheet.paste(frame, (place * (width + gap), 0))
    return sheet


def save_sample(sample: Sample, path: Path, fps: float) -> None:
    """Writes a picture as the PNG `path`; a video as an MP4 beside it, and its strip as the PNG."""
    if not is_video(sample):
        frames_of(sample)[0].save(path)
        return
    write_video(frames_of(sample), path.with_suffix(".mp4"), fps)
    strip, info = strip_of(sample), PngImagePlugin.PngInfo()
    info.add_text("frames", str(len(strip)))
    side_by_side(strip).save(path, pnginfo=info)


def load_sample(path: Path) -> Sample:
    """What `save_sample` wrote as PNG, without loss: a picture, or the frames of a strip."""
    with Image.open(path) as file:
        picture, count = file.convert("RGB"), int(file.info.get("frames", 0))
    if not count:
        return picture
    width = picture.width // count
    return [picture.crop((i * width, 0, (i + 1) * width, picture.height)) for i in range(count)]


def write_video(frames: Iterable[Image.Image], path: Path, fps: float) -> None:
    """An MP4 that browsers play (H.264, 4:2:0). Odd sizes get one more row or column of pixels:
    the format has none."""
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
    if not path.stat().st_size:  # ffmpeg says why on stderr, and no error comes back
        raise RuntimeError(
            f"{path} could not be written ({first.width} x {first.height}, {fps:g} frames a "
            "second); see what ffmpeg printed."
        )


def read_video(path: str | Path) -> list[Image.Image]:
    """The frames of a video file or an animated GIF.

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
        about = reader.get_meta_data()
    promised = about["duration"] * about["fps"]
    if len(frames) < 0.9 * promised:
        raise ValueError(f"it ends after {len(frames)} of {promised:.0f} frames")
    return frames


def _opened(name: str, value: Any) -> Any:
    value = value.read() if isinstance(value, Stored) else value
    if isinstance(value, (list, tuple)):
        return [_opened(name, item) for item in value]
    if value is None:
        return None
    mode = "L" if is_mask(name) else "RGB"
    if isinstance(value, Image.Image):
        label = "a picture"
    elif isinstance(value, Mapping) and {"bytes", "path"} <= value.keys():
        label = value["path"] or "a file of the data set"
    elif isinstance(value, (str, Path)):
        label = str(value)
    else:
        raise ValueError(
            f"{name} is a {type(value).__name__}, but must be a path, a picture, or a list of them."
        )
    try:
        return _read(name, value, mode)
    except FileNotFoundError:
        raise ValueError(f"{name} is {label}, but there is no such file; correct it.") from None
    except Exception as error:  # decoders raise what they like, and some of it is long
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"{name} is {label}, but cannot be read ({reason[0]}); replace it."
        ) from error


def _read(name: str, value: Any, mode: str) -> Any:
    """One picture, or the frames of one video."""
    if isinstance(value, Image.Image):
        return ImageOps.exif_transpose(value).convert(mode)
    with _file(value, "video.mp4" if name.endswith("video") else "picture.png") as path:
        if is_video_file(name, path):
            return [frame.convert(mode) for frame in read_video(path)]
        with Image.open(path) as picture:
            return ImageOps.exif_transpose(picture).convert(mode)


@contextlib.contextmanager
def _file(value: Any, default: str) -> Iterator[Path]:
    """The path of a value; bytes of a data set become a file for the time of the block, called
    `default` where they have no name."""
    if not isinstance(value, Mapping):
        yield Path(value)
    elif value["bytes"] is None:
        yield Path(value["path"])
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / Path(value["path"] or default).name
            path.write_bytes(value["bytes"])
            yield path
