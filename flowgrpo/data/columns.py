"""Columns of prompt files that hold images or videos, and references to the cells of data sets."""

import re
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, frozen=True)
class DatasetCell:
    """An image or video that stays in a `datasets.Dataset` until it is opened."""

    dataset: Any
    """Data set of one column, `with_format("arrow")` so that nothing is decoded."""
    index: int
    """Index of the row."""

    def read(self) -> Any:
        """Returns the encoded value: a path, a mapping with `bytes` or a `path`, or a list."""
        (column,) = self.dataset[self.index].columns
        return column[0].as_py()


def is_media(column: str) -> bool:
    """Whether a column of this name holds images or videos: image, control_image, mask, ..."""
    return re.search(r"(^|_)(image|images|video|mask)$", column) is not None


def is_mask(column: str) -> bool:
    """Whether a column of this name holds masks, which are greyscale."""
    return "mask" in column.split("_")
