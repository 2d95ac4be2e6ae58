"""What a run leaves behind: checkpoints to resume from, and the LoRA that plain diffusers loads.

A checkpoint is one folder, written under a temporary name, synced and renamed, so that it is
complete or absent; its manifest holds the size and hash of every file. No pickle: safetensors and
JSON.
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
from flowgrpo.core.config_file import plain
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
"""Whose versions decide the numbers."""

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
    """Writes `folder/epoch-NNNN`: the policy's LoRA as it is now, and the state to resume from.

    Every process calls it, since each holds a part of a sharded denoiser.

    Args:
        tensors: what a resume needs, by name.
        write: False on processes other than the main one.

    Raises:
        OSError, SafetensorError: it cannot be written; what was there is still there.
    """
    target = folder / f"epoch-{state.epoch:04d}"
    with atomic_folder(target, write=write) as temporary:
        _write_result(temporary, policy, config, write=write)
        if write:
            save_file(dict(tensors), temporary / STATE)
            _write_manifest(temporary, state, config)
    return target


def save_result(folder: Path, policy: Policy, config: GRPOConfig, *, write: bool = True) -> None:
    """Writes what was trained as plain diffusers loads it, with a record of its settings; all of it
    or nothing.

    Args:
        write: False on processes that only help to gather a sharded denoiser.
    """
    with atomic_folder(folder, write=write) as temporary:
        _write_result(temporary, policy, config, write=write)


def newest(folder: Path, before: int | None = None) -> tuple[Path, dict[str, Any]] | None:
    """The newest complete checkpoint and its manifest; a damaged one is skipped with a message.

    Args:
        before: only one of an earlier epoch than this; the later ones are quarantined.
    """
    for path in reversed(epoch_folders(folder)):
        if before is not None and epoch_of(path) >= before:
            quarantine(path)
            continue
        manifest = _verified(path)
        if manifest is not None:
            return path, manifest
        print(f"checkpoint {path} is damaged; trying the one before.", file=sys.stderr)
        quarantine(path)
    return None


def load(path: Path, manifest: Mapping[str, Any]) -> tuple[dict[str, Tensor], TrainerState]:
    """The tensors that `save` was given, on the CPU, and what the run had done."""
    return load_file(path / STATE), TrainerState(**manifest["state"])


def quarantine(path: Path) -> None:
    """Renames a damaged or suspect checkpoint so that it is ignored."""
    rename_aside(path, "aside")


def rotate(folder: Path, keep: int, best: int | None) -> None:
    """Removes all but the newest `keep` checkpoints and that of epoch `best`; and quarantined ones
    whose epoch has been reached again."""
    for path in epoch_folders(folder)[:-keep]:
        if epoch_of(path) != best:
            # Renamed first, so that a kill leaves no checkpoint that is half there.
            rename_aside(path, "removed")
    for gone in folder.glob(".epoch-*.removed"):
        shutil.rmtree(gone, ignore_errors=True)
    last = max(map(epoch_of, epoch_folders(folder)), default=0)
    for aside in folder.glob(".epoch-*.aside"):
        if epoch_of(aside.with_suffix("")) <= last:
            shutil.rmtree(aside, ignore_errors=True)


def best_epoch(scores: Mapping[int, float], saved: Collection[int]) -> int | None:
    """The saved epoch with the highest evaluated score; None if none was evaluated."""
    both = [epoch for epoch in scores if epoch in saved]
    return max(both, key=lambda epoch: scores[epoch], default=None)


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
        "config": plain(config),
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _verified(path: Path) -> dict[str, Any] | None:
    """The manifest, if every file it lists is there as it was written."""
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
