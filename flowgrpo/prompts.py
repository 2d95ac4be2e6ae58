"""Prompt files and data sets as rows: a prompt and its columns, with the place they came from."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowgrpo.config import ConfigError


@dataclass(kw_only=True, frozen=True)
class Row:
    """One line of a prompt file."""

    prompt: str
    columns: dict[str, Any] = field(default_factory=dict)
    """Other columns, handed to the rewards."""
    place: str
    """Where it stands, for messages: `signs.txt line 3`."""


PromptSource = str | Path | Sequence[str] | Iterable[dict[str, Any]]


def load_prompts(source: PromptSource) -> list[Row]:
    """Rows of a .txt, .jsonl or .csv file, of a list of prompts, or of a `datasets.Dataset`.

    Empty lines are skipped; the same line twice is two rows.

    Raises:
        ConfigError: a missing or empty file, a bad line, or a row without a prompt.
    """
    rows = _read(source)
    if not rows:
        raise ConfigError(f"{_name(source)} holds no prompt; give at least one.")
    return rows


def _read(source: PromptSource) -> list[Row]:
    if isinstance(source, Mapping) or hasattr(source, "columns"):
        raise ConfigError(
            f"dataset is a {type(source).__name__}, but must be rows: prompts or objects with one; "
            'pass one split of it, or its rows (`.to_dict("records")` of a DataFrame).'
        )
    if not isinstance(source, (str, Path)):
        return [_row(item, f"{_name(source)} row {i}") for i, item in enumerate(source)]
    path = Path(source).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"prompt file is {path}, but there is no such file; give .txt, .jsonl or .csv."
        )
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".csv": _read_csv}
    if path.suffix not in readers:
        raise ConfigError(f"prompt file is {path}, but must end in .txt, .jsonl or .csv.")
    return [_row(item, f"{path} line {number}") for number, item in readers[path.suffix](path)]


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


def _row(item: Any, place: str) -> Row:
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
    return Row(prompt=prompt, columns=columns, place=place)


def _name(source: Any) -> str:
    return str(source) if isinstance(source, (str, Path)) else "dataset"
