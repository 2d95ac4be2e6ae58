"""Prompts from data sets of the `datasets` library, which is optional."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flowgrpo.core.errors import ConfigError, one_line
from flowgrpo.data.columns import DatasetCell, is_media

FILE_SUFFIXES = {".txt", ".jsonl", ".csv", ".parquet", ".json"}
"""Suffixes that tell a missing file, `folder/signs.csv`, from a name on the Hub."""


def parse_dataset_name(source: str) -> tuple[str, str | None] | None:
    """Splits the name of a data set, `NAME` or `NAME:SPLIT`.

    Returns:
        The folder, .parquet file or Hub name (`owner/name`), and the split if there is one; None if
        `source` names some other file.
    """
    name, _, split = source.rpartition(":") if re.search(r":\w+$", source) else (source, "", "")
    path = Path(name).expanduser()
    if path.is_dir() or (path.suffix == ".parquet" and path.is_file()):
        return str(path), split or None
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not path.parent.is_dir()
    if on_hub and path.suffix not in FILE_SUFFIXES:
        return name, split or None
    return None


def load_dataset(name: str, split: str | None) -> Any:
    """Loads one split of a data set.

    Args:
        name: folder, .parquet file or Hub name.
        split: name of the split; None if there is only one.

    Raises:
        ConfigError: the library is missing, or there is no such data set or split.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"prompts are the data set {name}, but datasets is not installed; run "
            "`pip install datasets`."
        ) from None
    try:
        if Path(name).is_file():
            data = datasets.load_dataset("parquet", data_files=name)
        elif Path(name, "dataset_dict.json").exists() or Path(name, "state.json").exists():
            data = datasets.load_from_disk(name)
        else:
            data = datasets.load_dataset(name)
    except Exception as error:
        reason = one_line(error)
        raise ConfigError(
            f"prompts are the data set {name}, but it cannot be loaded ({reason}); check the name."
        ) from error
    splits = data if isinstance(data, Mapping) else {"train": data}
    if split is None and len(splits) == 1:
        (split,) = splits
    if split not in splits:
        raise ConfigError(
            f"prompts are the data set {name}, whose splits are {', '.join(splits)}; name one, for "
            f"example {name}:{next(iter(splits))}."
        )
    return splits[split]


def rows_of_dataset(data: Any) -> Iterable[dict[str, Any]]:
    """Yields rows whose images and videos stay in the data set, encoded, until they are opened."""
    media = [name for name in data.column_names if is_media(name)]
    encoded = {name: data.select_columns([name]).with_format("arrow") for name in media}
    for index, row in enumerate(data.remove_columns(media).with_format(None)):
        cells = {name: DatasetCell(dataset=encoded[name], index=index) for name in media}
        yield {**row, **{name: _path_or_cell(cell) for name, cell in cells.items()}}


def _path_or_cell(cell: DatasetCell) -> Any:
    """The cell's path or paths if that is all it holds, else a reference to its bytes."""
    value = cell.read()
    item = value[0] if isinstance(value, list) and value else value
    return cell if isinstance(item, Mapping) else value
