"""Images and videos of prompt files: located, opened and hashed.

An image is opened as a PIL image, a video as a list of PIL frames in order.
"""

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from flowgrpo.data.columns import DatasetCell, is_mask, is_media
from flowgrpo.data.samples import read_video

VIDEO_FILES = {".mp4", ".mov", ".webm", ".mkv", ".avi", ".m4v"}
"""Suffixes of video files; a .gif is a video only in a video column."""


def is_video_file(column: str, path: Path) -> bool:
    """Whether a file in a media column is read as a video; a GIF in an image column is its first
    frame."""
    suffix, video = path.suffix.lower(), column.split("_")[-1] == "video"
    return video if suffix == ".gif" else suffix in VIDEO_FILES and (video or is_mask(column))


def resolve_paths(value: Any, folder: Path) -> Any:
    """The value, with its paths relative to `folder`; an empty path, as in a CSV cell, is None."""
    if isinstance(value, (str, Path)):
        return str(folder / Path(value).expanduser()) if str(value).strip() else None
    return (
        [resolve_paths(item, folder) for item in value]
        if isinstance(value, (list, tuple))
        else value
    )


def open_media(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns with images and videos opened, as RGB; masks as greyscale (`L`).

    Raises:
        ValueError: an image or video cannot be read; names the column, the file and the reason.
    """
    return {
        name: _opened(name, value) if is_media(name) else value for name, value in columns.items()
    }


def digest(value: Any) -> Any:
    """The value with each image and video replaced by the SHA-256 of its file or its pixels."""
    if isinstance(value, DatasetCell):
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


def _opened(name: str, value: Any) -> Any:
    value = value.read() if isinstance(value, DatasetCell) else value
    if isinstance(value, (list, tuple)):
        return [_opened(name, item) for item in value]
    if value is None:
        return None
    mode = "L" if is_mask(name) else "RGB"
    if isinstance(value, Image.Image):
        label = "an image"
    elif isinstance(value, Mapping) and {"bytes", "path"} <= value.keys():
        label = value["path"] or "a file of the data set"
    elif isinstance(value, (str, Path)):
        label = str(value)
    else:
        raise ValueError(
            f"{name} is of type {type(value).__name__}, but must be a path, an image, or a list of "
            "them."
        )
    try:
        return _read(name, value, mode)
    except FileNotFoundError:
        raise ValueError(f"{name} is {label}, but there is no such file; correct it.") from None
    except Exception as error:  # decoders raise errors of any type, some with long messages
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"{name} is {label}, but cannot be read ({reason[0]}); replace it."
        ) from error


def _read(name: str, value: Any, mode: str) -> Any:
    """Reads one image, or the frames of one video."""
    if isinstance(value, Image.Image):
        return ImageOps.exif_transpose(value).convert(mode)
    with _file(value, "video.mp4" if name.endswith("video") else "image.png") as path:
        if is_video_file(name, path):
            return [frame.convert(mode) for frame in read_video(path)]
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert(mode)


@contextlib.contextmanager
def _file(value: Any, default: str) -> Iterator[Path]:
    """Yields the path of a value. Bytes of a data set become a temporary file, called `default` if
    they have no name."""
    if not isinstance(value, Mapping):
        yield Path(value)
    elif value["bytes"] is None:
        yield Path(value["path"])
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / Path(value["path"] or default).name
            path.write_bytes(value["bytes"])
            yield path
