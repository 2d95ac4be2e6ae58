"""Prompt files and data sets as rows: a prompt and its columns, with the place they came from."""

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowgrpo.core.errors import ConfigError
from flowgrpo.data.media import Stored, is_media, located, opened


@dataclass(kw_only=True, frozen=True)
class Row:
    """One line of a prompt file."""

    prompt: str
    columns: dict[str, Any] = field(default_factory=dict)
    """Other columns, handed to the pipeline, if its call has a parameter of that name, and to the
    rewards. Pictures and videos stay unread: `media.opened` opens them."""
    source: str
    """Where it stands, for messages: `signs.txt line 3`."""


PromptSource = str | Path | Sequence[str] | Iterable[dict[str, Any]]


def load_prompts(source: PromptSource) -> list[Row]:
    """Rows of a .txt, .jsonl or .csv file, of a list of prompts, or of a `datasets.Dataset`: the
    object, or the name, folder or .parquet of one, with `:split` behind it if it has several.

    Empty lines are skipped; the same line twice is two rows. Columns like `image`, `control_image`,
    `mask` or `video` hold paths, from the file's folder, or pictures; each is read once, to see
    that it can be.

    Raises:
        ConfigError: a missing or empty file, a bad line, a row without a prompt, a picture that
            cannot be read.
    """
    rows = _read(source)
    if not rows:
        raise ConfigError(f"{_name(source)} holds no prompt; give at least one.")
    _check_media(rows)
    return rows


def _read(source: PromptSource) -> list[Row]:
    if isinstance(source, Mapping) or hasattr(source, "columns"):
        raise ConfigError(
            f"dataset is a {type(source).__name__}, but must be rows: prompts or objects with one; "
            'pass one split of it, or its rows (`.to_dict("records")` of a DataFrame).'
        )
    if not isinstance(source, (str, Path)):
        items = _rows_of_dataset(source) if hasattr(source, "select_columns") else source
        return [_row(item, f"{_name(source)} row {i}", Path()) for i, item in enumerate(items)]
    if (named := _named_dataset(str(source))) is not None:
        place, split = named
        items = _rows_of_dataset(_load_dataset(place, split))
        return [_row(item, f"{source} row {i}", Path(place)) for i, item in enumerate(items)]
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
                f"{path} line {number} is not JSON ({error.msg}); write one object a line."
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


def _named_dataset(source: str) -> tuple[str, str | None] | None:
    """Place and split of a folder, a .parquet or a hub name, owner/name; None for other files."""
    place, _, split = source.rpartition(":") if re.search(r":\w+$", source) else (source, "", "")
    path = Path(place).expanduser()
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", place) and not path.parent.is_dir()
    if path.is_dir() or (path.suffix == ".parquet" and path.is_file()):
        return str(path), split or None
    if on_hub and path.suffix not in {*READERS, ".parquet", ".json"}:
        return place, split or None
    return None


def _load_dataset(place: str, split: str | None) -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"prompts are the data set {place}, but datasets is not installed; run "
            "`pip install datasets`."
        ) from None
    try:
        if Path(place).is_file():
            data = datasets.load_dataset("parquet", data_files=place)
        elif Path(place, "dataset_dict.json").exists() or Path(place, "state.json").exists():
            data = datasets.load_from_disk(place)
        else:
            data = datasets.load_dataset(place)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"prompts are the data set {place}, but it cannot be loaded ({reason}); check the name."
        ) from error
    splits = data if isinstance(data, Mapping) else {"train": data}
    if split is None and len(splits) == 1:
        (split,) = splits
    if split not in splits:
        raise ConfigError(
            f"prompts are the data set {place}, whose splits are {', '.join(splits)}; name one, as "
            f"{place}:{next(iter(splits))}."
        )
    return splits[split]


def _rows_of_dataset(data: Any) -> Iterable[dict[str, Any]]:
    """Rows whose pictures stay in the data set, encoded as they are, until they are opened."""
    media = [name for name in data.column_names if is_media(name)]
    encoded = {name: data.select_columns([name]).with_format("arrow") for name in media}
    for index, row in enumerate(data.remove_columns(media).with_format(None)):
        cells = {name: Stored(dataset=encoded[name], index=index) for name in media}
        yield {**row, **{name: _path_or_stored(cell) for name, cell in cells.items()}}


def _path_or_stored(cell: Stored) -> Any:
    value = cell.read()
    item = value[0] if isinstance(value, list) and value else value
    return cell if isinstance(item, Mapping) else value


def _row(item: Any, place: str, folder: Path) -> Row:
    """A row whose paths start at `folder`."""
    if isinstance(item, str):
        item = {"prompt": item}
    if not isinstance(item, dict):
        raise ConfigError(
            f"{place} is a {type(item).__name__}, but must be a prompt or an object with one."
        )
    prompt = item.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f"{place} has no prompt; add a `prompt` column with text.")
    columns = {str(key): value for key, value in item.items() if key != "prompt"}
    columns |= {name: located(value, folder) for name, value in columns.items() if is_media(name)}
    return Row(prompt=prompt, columns=columns, source=place)


def _check_media(rows: Sequence[Row]) -> None:
    """Opens every picture and video once, several at a time."""
    cells = {
        (name, value if isinstance(value, str) else id(value)): (row.source, {name: value})
        for row in reversed(rows)
        for name, value in row.columns.items()
        if is_media(name)
    }

    def check(cell: tuple[str, dict[str, Any]]) -> None:
        place, column = cell
        try:
            opened(column)
        except ValueError as error:
            raise ConfigError(f"{place}: {error}") from error

    with ThreadPoolExecutor(max_workers=8) as pool:
        for _ in pool.map(check, reversed(list(cells.values()))):
            pass


def _name(source: Any) -> str:
    return str(source) if isinstance(source, (str, Path)) else "dataset"


def evenly_spaced(rows: Sequence[Row], most: int | None) -> list[Row]:
    """At most `most` of the rows, from all over the file: prompt files are often sorted."""
    if most is None or len(rows) <= most:
        return list(rows)
    return [rows[i * len(rows) // most] for i in range(most)]
