"""What it takes to repeat a run: a line in starts.jsonl for each start, and what changed since."""

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
from flowgrpo.core.files import write_atomically
from flowgrpo.runs.environment import checkout, code_hash, machine, variables, versions
from flowgrpo.scoring.reward import Reward

STARTS = "starts.jsonl"


WHOLE = 2**20
"""Bytes of a model's file that is hashed as a whole; of a larger one, the safetensors header is."""


NAMED = 3
"""Files that a sentence names before it counts them."""


def record_start(
    folder: Path,
    config: GRPOConfig,
    rewards: Sequence[Reward],
    *,
    epoch: int,
    processes: int = 1,
    objects: Sequence[str] = (),
) -> None:
    """Adds a line to `folder/starts.jsonl`; on the main process, at each start.

    Args:
        rewards: all that score; the file in which each function stands is hashed, not what that
            imports.
        epoch: epochs that are finished.
        objects: arguments from Python that no config holds, as `objects_among` finds them; with one
            of them, the line says that the command line cannot repeat the run.
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
    """Every start of the run, oldest first."""
    path = folder / STARTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def repeat_command(folder: Path, processes: int) -> str:
    """A command that does the run again beside it, from the recorded directory."""
    launch = (
        f"torchrun --nproc-per-node {processes} -m flowgrpo.cli" if processes > 1 else "flowgrpo"
    )
    config, again = folder / "config.yaml", f"output_dir={folder}-again"
    return f"{launch} train {shlex.quote(str(config))} {shlex.quote(again)}"


def unrecorded_arguments(config: GRPOConfig, **arguments: Any) -> list[str]:
    """Names of the trainer's arguments that its config.yaml cannot hold.

    Paths of a model or of prompts are in it; rewards that came as arguments are not, by name
    neither.
    """
    paths = ("model", "train_dataset", "eval_dataset")
    found = [
        name
        for name, value in arguments.items()
        if value is not None and not (name in paths and isinstance(value, (str, Path)))
    ]
    try:
        config.model_dump(mode="json")
    except PydanticSerializationError:  # a picture as an argument of the pipeline, say
        found.append("args")
    return found


def differences(folder: Path) -> list[str]:
    """What has changed since the run's start at epoch 0, a sentence each; none without a record."""
    if not (recorded := starts(folder)):
        return []
    first = next((start for start in reversed(recorded) if start["epoch"] == 0), recorded[0])
    sentences = []
    for kind, files in first["files"].items():
        now = {name: _described(Path(first["directory"], name), kind) for name in files}
        if gone := [name for name in files if now[name] is None]:
            sentences.append(f"{_named(gone)} ({kind}) is gone since the start of the run.")
        if changed := [name for name in files if now[name] not in (None, files[name])]:
            sentences.append(
                f"{_named(changed)} ({kind}) has other contents than at the start of the run."
            )
    return sentences + _other_versions(first)


def _other_versions(first: Mapping[str, Any]) -> list[str]:
    now = versions(first["versions"])
    changed = [
        f"{name} was {then} and is {now.get(name, 'not installed')}"
        for name, then in first["versions"].items()
        if now.get(name) != then
    ]
    if first["flowgrpo"]["sha256"] != code_hash():
        changed.append("the code of flowgrpo is another")
    return [f"{', '.join(changed)} since the start of the run."] if changed else []


def _named(names: Sequence[str]) -> str:
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _files(config: GRPOConfig, rewards: Sequence[Reward]) -> dict[str, dict[str, Any]]:
    """Size and hash by path as the config has it, under what the files are for."""
    lora = config.train.lora.start if config.train.lora else None
    places = {
        "prompts.train": _contents(config.prompts.train),
        "prompts.test": _contents(config.prompts.test),
        "rewards": [path for reward in rewards if (path := _source(reward.function))],
        "model": _contents(_snapshot(config.model.path)),
        "lora": _contents(lora),
    }
    return {
        kind: {str(path): _described(path, kind) for path in paths}
        for kind, paths in places.items()
        if paths
    }


def _contents(place: str | None) -> list[Path]:
    """The files of a folder, or the file; none for a name on the hub."""
    path = Path(place or "").expanduser()
    if place is None or not path.exists():
        return []
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def _snapshot(model: str | None) -> str | None:
    """The folder of a model; for a name on the hub its snapshot, which is called as its commit."""
    if model is None or Path(model).expanduser().exists():
        return model
    index = try_to_load_from_cache(model, "model_index.json")
    return str(Path(index).parent) if isinstance(index, str) else None


def _source(function: Any) -> Path | None:
    """The file in which a function stands; none for what was typed into a prompt."""
    while isinstance(function, partial):
        function = function.func
    try:
        written = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # a callable object: its class stands somewhere
        try:
            written = inspect.getsourcefile(type(function))
        except TypeError:
            return None
    return Path(written) if written and Path(written).is_file() else None


def _described(path: Path, kind: str) -> dict[str, Any] | None:
    path = path.expanduser()
    if not path.is_file():
        return None
    size = path.stat().st_size
    if kind not in ("model", "lora") or size <= WHOLE:
        return {"size": size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    if path.suffix != ".safetensors":
        return {"size": size}
    with path.open("rb") as file:
        header = file.read(min(int.from_bytes(file.read(8), "little"), size))
    return {"size": size, "header_sha256": hashlib.sha256(header).hexdigest()}
