"""Pictures and videos: columns that hold them, how they are opened, and the files they become.

A sample is a PIL image, or a video: a list of PIL frames, RGB, in order.
"""

import contextlib
import hashlib
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from flowgrpo.data.samples import read_video

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
