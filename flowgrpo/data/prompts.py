"""Prompt files and data sets as rows: a prompt with its other columns and its source."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flowgrpo.core.errors import ConfigError
from flowgrpo.data.columns import is_media
from flowgrpo.data.datasets import load_dataset, parse_dataset_name, rows_of_dataset
from flowgrpo.data.media import open_media, resolve_paths
from flowgrpo.data.row import Row

PromptSource = str | Path | Sequence[str] | Iterable[dict[str, Any]]
"""A file or the name of a data set, or rows: prompts, mappings or a `datasets.Dataset`."""


def load_prompts(source: PromptSource) -> list[Row]:
    """Loads prompts and their columns.

    Empty lines are skipped; the same line twice makes two rows. Columns such as `image`,
    `control_image`, `mask` or `video` hold images, or paths relative to the file; each is opened
    once to check that it can be read.

    Args:
        source: .txt, .jsonl or .csv file; Hub name, folder or .parquet file of a data set, followed
            by `:split` if it has several; list of prompts or mappings; or a `datasets.Dataset`.

    Raises:
        ConfigError: a missing or empty file, a malformed line, a row without a prompt, or an image
            that cannot be read.
    """
    rows = _read(source)
    if not rows:
        raise ConfigError(f"{_name(source)} holds no prompts; add at least one.")
    _check_media(rows)
    return rows


def _read(source: PromptSource) -> list[Row]:
    if isinstance(source, Mapping) or hasattr(source, "columns"):
        raise ConfigError(
            f"dataset is a {type(source).__name__}, but must be rows: prompts or objects with one; "
            'pass one split of it, or its rows (`.to_dict("records")` of a DataFrame).'
        )
    if not isinstance(source, (str, Path)):
        items = rows_of_dataset(source) if hasattr(source, "select_columns") else source
        return [_row(item, f"{_name(source)} row {i}", Path()) for i, item in enumerate(items)]
    if (dataset := parse_dataset_name(str(source))) is not None:
        name, split = dataset
        items = rows_of_dataset(load_dataset(name, split))
        return [_row(item, f"{source} row {i}", Path(name)) for i, item in enumerate(items)]
    path = Path(source).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"prompt file is {path}, but there is no such file; give .txt, .jsonl or .csv."
        )
    if path.suffix not in READERS:
        raise ConfigError(f"prompt file is {path}, but must end in .txt, .jsonl, .csv or .parquet.")
    lines = READERS[path.suffix](path)
    return [_row(item, f"{path} line {number}", path.parent) for number, item in lines]


def _read_txt(path: Path) -> Iterable[tuple[int, Any]]:
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if line.strip():
            yield number, line.strip()


def _read_jsonl(path: Path) -> Iterable[tuple[int, Any]]:
    for number, line in _read_txt(path):
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{path} line {number} is not JSON ({error.msg}); write one object per line."
            ) from None


def _read_csv(path: Path) -> Iterable[tuple[int, Any]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        for item in _csv_rows(reader, path):
            if None in item:
                raise ConfigError(
                    f"{path} line {reader.line_num} has more cells than the header; quote commas."
                )
            yield reader.line_num, item


def _csv_rows(reader: csv.DictReader, path: Path) -> Iterable[dict[str, Any]]:
    names = reader.fieldnames or []
    if len(set(names)) < len(names):
        raise ConfigError(f"{path} line 1 has a column twice; rename one of them.")
    try:
        yield from reader
    except csv.Error as error:
        raise ConfigError(f"{path} line {reader.line_num} is not CSV ({error}).") from None


READERS = {".txt": _read_txt, ".jsonl": _read_jsonl, ".csv": _read_csv}
"""Readers of prompt files by suffix; each yields line numbers and items."""


def _row(item: Any, source: str, folder: Path) -> Row:
    """Makes a row of a prompt or a mapping; its paths are relative to `folder`."""
    if isinstance(item, str):
        item = {"prompt": item}
    if not isinstance(item, dict):
        raise ConfigError(
            f"{source} is a {type(item).__name__}, but must be a prompt or an object with one."
        )
    prompt = item.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f"{source} has no prompt; add a `prompt` column with text.")
    columns = {str(key): value for key, value in item.items() if key != "prompt"}
    columns |= {
        name: resolve_paths(value, folder) for name, value in columns.items() if is_media(name)
    }
    return Row(prompt=prompt, columns=columns, source=source)


def _check_media(rows: Sequence[Row]) -> None:
    """Opens every image and video once, several at a time; the first that fails is refused."""
    cells = {
        (name, value if isinstance(value, str) else id(value)): (row.source, {name: value})
        for row in reversed(rows)
        for name, value in row.columns.items()
        if is_media(name)
    }

    def check(cell: tuple[str, dict[str, Any]]) -> None:
        source, column = cell
        try:
            open_media(column)
        except ValueError as error:
            raise ConfigError(f"{source}: {error}") from error

    with ThreadPoolExecutor(max_workers=8) as pool:
        for _ in pool.map(check, reversed(list(cells.values()))):
            pass


def _name(source: Any) -> str:
    """Name of a source in messages."""
    return str(source) if isinstance(source, (str, Path)) else "dataset"


def evenly_spaced(rows: Sequence[Row], limit: int | None) -> list[Row]:
    """At most `limit` rows at even intervals, because prompt files are often sorted."""
    if limit is None or len(rows) <= limit:
        return list(rows)
    return [rows[i * len(rows) // limit] for i in range(limit)]
