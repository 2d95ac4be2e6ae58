"""Provenance of a run: a line in starts.jsonl per start, and what has changed since the first."""

import hashlib
import inspect
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from pydantic_core import PydanticSerializationError

from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.files import files_in, sha256_of, write_atomically
from flowgrpo.runs.environment import checkout, code_hash, machine, variables, versions
from flowgrpo.scoring.reward import Reward

STARTS = "starts.jsonl"


MAX_HASHED_SIZE = 2**20
"""Largest size of a model's file, in bytes, whose contents are hashed completely. Of a larger
safetensors file only the header is, since weights take long to read."""


MAX_LISTED_FILES = 3
"""Number of files that a sentence names before it counts the rest."""


def record_start(
    folder: Path,
    config: GRPOConfig,
    rewards: Sequence[Reward],
    *,
    epoch: int,
    processes: int = 1,
    objects: Sequence[str] = (),
) -> None:
    """Appends a line to `folder/starts.jsonl`; called by the main process at each start.

    Args:
        rewards: all rewards, held-out ones too; the file that defines each function is hashed, but
            not what that file imports.
        epoch: number of finished epochs.
        processes: number of processes of the run.
        objects: arguments that config.yaml cannot hold, from `unrecorded_arguments`; if there are
            any, the line has no command to repeat the run.
    """
    start = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "epoch": epoch,
        "processes": processes,
        "command": sys.orig_argv,
        "directory": str(Path.cwd()),
        "repeat": None if objects else repeat_command(folder, processes),
        "objects": list(objects),
        "flowgrpo": checkout(),
        "versions": versions(),
        "machine": machine(),
        "environment": variables(),
        "files": _files(config, rewards),
    }
    lines = [json.dumps(line) + "\n" for line in [*starts(folder), start]]
    write_atomically(folder / STARTS, "".join(lines))


def starts(folder: Path) -> list[dict[str, Any]]:
    """Returns the records of all starts of the run, oldest first."""
    path = folder / STARTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def repeat_command(folder: Path, processes: int) -> str:
    """The command that repeats the run in `FOLDER-again`, to be run in the recorded directory."""
    launch = (
        f"torchrun --nproc-per-node {processes} -m flowgrpo.cli" if processes > 1 else "flowgrpo"
    )
    config, again = folder / "config.yaml", f"output_dir={folder}-again"
    return f"{launch} train {shlex.quote(str(config))} {shlex.quote(again)}"


def unrecorded_arguments(config: GRPOConfig, **arguments: Any) -> list[str]:
    """Names of the trainer's arguments that config.yaml cannot hold.

    It does hold paths of a model or of prompts, but never rewards that were given as arguments, not
    even by name.
    """
    may_be_path = ("model", "train_dataset", "eval_dataset")
    found = [
        name
        for name, value in arguments.items()
        if value is not None and not (name in may_be_path and isinstance(value, (str, Path)))
    ]
    try:
        config.model_dump(mode="json")
    except PydanticSerializationError:  # such as an image among the call arguments
        found.append("args")
    return found


def differences(folder: Path) -> list[str]:
    """Returns sentences about what has changed since the run started at epoch 0.

    Without a record, nothing is known to have changed.
    """
    if not (recorded := starts(folder)):
        return []
    first = next((start for start in reversed(recorded) if start["epoch"] == 0), recorded[0])
    sentences = []
    for source, files in first["files"].items():
        now = {name: _file_record(Path(first["directory"], name), source) for name in files}
        if removed := [name for name in files if now[name] is None]:
            sentences.append(f"{_listed(removed)} ({source}) disappeared since the run started.")
        if changed := [name for name in files if now[name] not in (None, files[name])]:
            sentences.append(f"{_listed(changed)} ({source}) changed since the run started.")
    return sentences + _version_changes(first)


def _version_changes(first: Mapping[str, Any]) -> list[str]:
    """One sentence about other versions and other code than at the first start, or none."""
    now = versions(first["versions"])
    changed = [
        f"{name} was {then} and is {now.get(name, 'not installed')}"
        for name, then in first["versions"].items()
        if now.get(name) != then
    ]
    if first["flowgrpo"]["sha256"] != code_hash():
        changed.append("the code of flowgrpo changed")
    return [f"{', '.join(changed)} since the run started."] if changed else []


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - MAX_LISTED_FILES
    return ", ".join(names[:MAX_LISTED_FILES]) + (f" and {rest} more" if rest > 0 else "")


def _files(config: GRPOConfig, rewards: Sequence[Reward]) -> dict[str, dict[str, Any]]:
    """Size and hash of every file that the run reads, by source and by path as in the config."""
    lora = config.train.lora.start if config.train.lora else None
    sources = {
        "prompts.train": _files_of(config.prompts.train),
        "prompts.test": _files_of(config.prompts.test),
        "rewards": [path for reward in rewards if (path := _source_file(reward.function))],
        "model": _files_of(_model_folder(config.model.path)),
        "lora": _files_of(lora),
    }
    return {
        source: {str(path): _file_record(path, source) for path in paths}
        for source, paths in sources.items()
        if paths
    }


def _files_of(source: str | None) -> list[Path]:
    """The files in a folder, or the file itself; none for a name on the hub."""
    path = Path(source or "").expanduser()
    if source is None or not path.exists():
        return []
    return [path] if path.is_file() else files_in(path)


def _model_folder(model: str | None) -> str | None:
    """The folder of a model; for a name on the hub, its cached snapshot, named by its commit."""
    if model is None or Path(model).expanduser().exists():
        return model
    index = try_to_load_from_cache(model, "model_index.json")
    return str(Path(index).parent) if isinstance(index, str) else None


def _source_file(function: Any) -> Path | None:
    """The file that defines a function; None for one typed at a Python prompt."""
    while isinstance(function, partial):
        function = function.func
    try:
        name = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # a callable object, whose class may have a file
        try:
            name = inspect.getsourcefile(type(function))
        except TypeError:
            return None
    return Path(name) if name and Path(name).is_file() else None


def _file_record(path: Path, source: str) -> dict[str, Any] | None:
    """Size and hash of a file; None if there is no such file."""
    path = path.expanduser()
    if not path.is_file():
        return None
    size = path.stat().st_size
    if source not in ("model", "lora") or size <= MAX_HASHED_SIZE:
        return {"size": size, "sha256": sha256_of(path)}
    if path.suffix != ".safetensors":
        return {"size": size}
    with path.open("rb") as file:
        # A safetensors file starts with the length of its header, in 8 bytes.
        header = file.read(min(int.from_bytes(file.read(8), "little"), size))
    return {"size": size, "header_sha256": hashlib.sha256(header).hexdigest()}
