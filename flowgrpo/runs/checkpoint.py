"""Checkpoints to resume from, and the trained result that plain diffusers loads.

A checkpoint is one folder, written under a temporary name, synced and then renamed, so that it is
either complete or absent. Its manifest holds the size and hash of every file. Only safetensors and
JSON are written, never pickles.
"""

import json
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.config_file import config_as_json
from flowgrpo.core.files import (
    atomic_folder,
    epoch_folders,
    epoch_of,
    files_in,
    rename_aside,
    sha256_of,
)
from flowgrpo.policy.policy import Policy
from flowgrpo.runs.environment import versions
from flowgrpo.runs.state import TrainerState

PACKAGES = ("flowgrpo", "torch", "diffusers", "transformers", "peft")
"""Packages whose versions are saved with a result, since they can change its numbers."""

STATE, MANIFEST, RECORD = "state.safetensors", "manifest.json", "generation.json"


def save(
    folder: Path,
    policy: Policy,
    tensors: Mapping[str, Tensor],
    state: TrainerState,
    config: GRPOConfig,
    *,
    write: bool = True,
) -> Path:
    """Writes `folder/epoch-NNNN`: the current LoRA (or denoisers), and the state to resume from.

    Every process must call it, since each holds a shard of a sharded denoiser.

    Args:
        tensors: tensors of the learner that a resume needs, by name.
        write: True on the main process only.

    Returns:
        Path of the checkpoint.

    Raises:
        OSError, SafetensorError: it cannot be written; an existing checkpoint stays untouched.
    """
    target = folder / f"epoch-{state.epoch:04d}"
    with atomic_folder(target, write=write) as temporary:
        _write_result(temporary, policy, config, write=write)
        if write:
            save_file(dict(tensors), temporary / STATE)
            _write_manifest(temporary, state, config)
    return target


def save_result(folder: Path, policy: Policy, config: GRPOConfig, *, write: bool = True) -> None:
    """Writes the trained weights as plain diffusers loads them, with a record of their settings.

    The folder is replaced in one step. Every process must call it, as with `save`.

    Args:
        write: True on the main process only.
    """
    with atomic_folder(folder, write=write) as temporary:
        _write_result(temporary, policy, config, write=write)


def newest(folder: Path, before: int | None = None) -> tuple[Path, dict[str, Any]] | None:
    """Returns the newest complete checkpoint and its manifest, or None if there is none.

    A damaged checkpoint is reported on stderr and quarantined.

    Args:
        before: return only a checkpoint of an earlier epoch than this; the others are
            quarantined.
    """
    for path in reversed(epoch_folders(folder)):
        if before is not None and epoch_of(path) >= before:
            quarantine(path)
            continue
        manifest = _verified(path)
        if manifest is not None:
            return path, manifest
        print(f"checkpoint {path} is damaged; trying the previous one.", file=sys.stderr)
        quarantine(path)
    return None


def load(path: Path, manifest: Mapping[str, Any]) -> tuple[dict[str, Tensor], TrainerState]:
    """Returns the tensors and the state that were given to `save`; the tensors are on the CPU."""
    return load_file(path / STATE), TrainerState(**manifest["state"])


def quarantine(path: Path) -> None:
    """Renames a damaged or suspect checkpoint so that it is ignored."""
    rename_aside(path, "aside")


def rotate(folder: Path, keep: int, best: int | None) -> None:
    """Removes old checkpoints, except the newest `keep` and that of epoch `best`.

    Quarantined checkpoints are removed once the run has reached their epoch again.
    """
    for path in epoch_folders(folder)[:-keep]:
        if epoch_of(path) != best:
            # Renamed first, so that a kill never leaves half a checkpoint under its name.
            rename_aside(path, "removed")
    for removed in folder.glob(".epoch-*.removed"):
        shutil.rmtree(removed, ignore_errors=True)
    last = max(map(epoch_of, epoch_folders(folder)), default=0)
    for aside in folder.glob(".epoch-*.aside"):
        if epoch_of(aside.with_suffix("")) <= last:
            shutil.rmtree(aside, ignore_errors=True)


def best_epoch(scores: Mapping[int, float], saved: Collection[int]) -> int | None:
    """The saved epoch with the highest evaluated score; None if none was evaluated."""
    candidates = [epoch for epoch in scores if epoch in saved]
    return max(candidates, key=lambda epoch: scores[epoch], default=None)


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


def _write_manifest(folder: Path, state: TrainerState, config: GRPOConfig) -> None:
    files = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": sha256_of(path)}
        for path in files_in(folder)
    }
    manifest = {
        "state": asdict(state),
        "versions": versions(PACKAGES),
        "config": config_as_json(config),
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _verified(path: Path) -> dict[str, Any] | None:
    """Returns the manifest if every file that it lists is unchanged; else None."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        for name, file in manifest["files"].items():
            if (path / name).stat().st_size != file["size"]:
                return None
            if sha256_of(path / name) != file["sha256"]:
                return None
        TrainerState(**manifest["state"])
        return manifest if "config" in manifest and STATE in manifest["files"] else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
