"""What a run leaves behind: checkpoints to go on from, and the LoRA that plain diffusers loads.

A checkpoint is one folder, written under a temporary name, synced and renamed, so that it is whole
or absent; its manifest holds the size and hash of every file. No pickle: safetensors and JSON.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from flowgrpo.config import GRPOConfig
from flowgrpo.config_file import plain
from flowgrpo.environment import versions
from flowgrpo.learner import Learner
from flowgrpo.optimisers import load_moments
from flowgrpo.policy import Policy, as_used, load_weights
from flowgrpo.processes import Processes
from flowgrpo.report import epoch_folders, epoch_of
from flowgrpo.sharding import placed_like

PACKAGES = ("flowgrpo", "torch", "diffusers", "transformers", "peft")
"""Whose versions decide the numbers."""

STATE, MANIFEST, RECORD = "state.safetensors", "manifest.json", "generation.json"


@dataclass(kw_only=True)
class State:
    """What a run has done so far; with the weights and the optimiser, all that a resume needs.

    Prompts, windows and noise are pure functions of the epoch, so there is no state of theirs.
    """

    epoch: int = 0
    """Epochs that are finished."""
    images: int = 0
    seconds: float = 0.0
    """Wall time of training and evaluation, over all starts."""
    passes: dict[str, int] = field(
        default_factory=lambda: {"denoiser_forwards": 0, "denoiser_backwards": 0}
    )
    """Denoiser calls of rollouts and replays, over all processes."""
    rollbacks: int = 0
    """Times that the run went back to a checkpoint, each with a lower learning rate."""


def save(
    folder: Path, learner: Learner, state: State, config: GRPOConfig, processes: Processes
) -> Path:
    """Writes `folder/epoch-NNNN`: the LoRA as it would be used, and the state to go on from.

    All processes call it; the first one writes.

    Raises:
        OSError, SafetensorError: it cannot be written; what was there is still there.
    """
    target = folder / f"epoch-{state.epoch:04d}"
    tensors = learner.tensors()
    with _written_whole(target, write=processes.first) as temporary:
        with as_used(learner.policy, learner.average):
            _write_result(temporary, learner.policy, config, write=processes.first)
        if processes.first:
            save_file(tensors, temporary / STATE)
            _write_manifest(temporary, state, config)
    return target


def newest(folder: Path, before: int | None = None) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint and its manifest; a damaged one is skipped with a message.

    Args:
        before: only one of an earlier epoch than this; the later ones are put aside.
    """
    for path in reversed(epoch_folders(folder)):
        if before is not None and epoch_of(path) >= before:
            put_aside(path)
            continue
        manifest = _verified(path)
        if manifest is not None:
            return path, manifest
        print(f"checkpoint {path} is damaged; trying the one before.", file=sys.stderr)
        put_aside(path)
    return None


def put_aside(path: Path) -> None:
    """Keeps a checkpoint that is damaged or to blame under a name that counts no more."""
    aside = path.with_name(f".{path.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)


def load(path: Path, manifest: dict[str, Any], learner: Learner) -> State:
    """Puts weights, average and moments in place; returns what the run had done."""
    tensors, policy = load_file(path / STATE), learner.policy
    parameters = policy.parameters
    load_weights(policy, _under("weights/", tensors))
    load_moments(learner.optimiser, parameters, _under("optimiser/", tensors))
    average = _under("average/", tensors)
    if average:
        learner.average = {n: placed_like(value, parameters[n]) for n, value in average.items()}
    return State(**manifest["state"])


def rotate(folder: Path, keep: int, best: int | None) -> None:
    """Removes all but the newest `keep` checkpoints and that of epoch `best`; and what was put
    aside, once it has been made again."""
    for path in epoch_folders(folder)[:-keep]:
        if epoch_of(path) != best:
            # Renamed first, so that a kill leaves no checkpoint that is half there.
            gone = path.with_name(f".{path.name}.removed")
            shutil.rmtree(gone, ignore_errors=True)
            os.replace(path, gone)
    for gone in folder.glob(".epoch-*.removed"):
        shutil.rmtree(gone, ignore_errors=True)
    last = max(map(epoch_of, epoch_folders(folder)), default=0)
    for aside in folder.glob(".epoch-*.aside"):
        if epoch_of(aside.with_suffix("")) <= last:
            shutil.rmtree(aside, ignore_errors=True)


def best_epoch(scores: dict[int, float], saved: Collection[int]) -> int | None:
    """The saved epoch with the highest evaluated score; None where none was evaluated."""
    both = [epoch for epoch in scores if epoch in saved]
    return max(both, key=lambda epoch: scores[epoch], default=None)


def save_result(folder: Path, policy: Policy, config: GRPOConfig, *, write: bool = True) -> None:
    """What was trained, as plain diffusers loads it, and a record of its settings; whole or as
    before.

    Args:
        write: False on processes that only help to collect a sharded denoiser.
    """
    with _written_whole(folder, write=write) as temporary:
        _write_result(temporary, policy, config, write=write)


def _write_result(folder: Path, policy: Policy, config: GRPOConfig, *, write: bool) -> None:
    policy.save(folder, write=write)
    if not write:
        return
    scheduler = policy.pipe.scheduler
    record = {
        "pipeline": type(policy.pipe).__name__,
        "model": config.model.path,
        "scheduler": {"class": type(scheduler).__name__, **scheduler.config},
        "training": config.sampling_call,
        "evaluation": config.evaluation_call,
        "versions": versions(PACKAGES),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1, default=str))


def _write_manifest(folder: Path, state: State, config: GRPOConfig) -> None:
    files = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in _files(folder)
    }
    manifest = {
        "state": asdict(state),
        "versions": versions(PACKAGES),
        "config": plain(config),
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


@contextmanager
def _written_whole(target: Path, *, write: bool) -> Iterator[Path]:
    """Within the block a folder under a temporary name is filled; then it takes `target`'s place.
    Everything is on the disk before its name says so."""
    temporary = target.with_name(f".{target.name}.partial")
    if not write:
        yield temporary
        return
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        _put_in_place(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _put_in_place(temporary: Path, target: Path) -> None:
    for path in _files(temporary):
        _sync(path)
    for path in [temporary, *(p for p in temporary.rglob("*") if p.is_dir())]:
        _sync(path)
    former = target.with_name(f".{target.name}.removed")
    shutil.rmtree(former, ignore_errors=True)
    if target.exists():
        os.replace(target, former)
    os.replace(temporary, target)
    _sync(target.parent)
    shutil.rmtree(former, ignore_errors=True)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _verified(path: Path) -> dict[str, Any] | None:
    """The manifest, if every file it lists is there as it was written."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        for name, file in manifest["files"].items():
            if (path / name).stat().st_size != file["size"]:
                return None
            if _sha256(path / name) != file["sha256"]:
                return None
        State(**manifest["state"])
        return manifest if "config" in manifest and STATE in manifest["files"] else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
