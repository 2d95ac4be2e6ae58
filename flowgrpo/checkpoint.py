"""What a run leaves behind: checkpoints to go on from, and the LoRA that plain diffusers loads.

A checkpoint is one folder, written under a temporary name, synced and renamed, so that it is whole
or absent. No pickle: safetensors and JSON.
"""

import hashlib
import json
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from flowgrpo.config import GRPOConfig
from flowgrpo.config_file import plain, refuse_changes
from flowgrpo.policy import Policy, as_used, load_weights

STATE, MANIFEST, RECORD = "state.safetensors", "manifest.json", "generation.json"


@dataclass(kw_only=True)
class State:
    """What a run has done so far; with the weights and the optimiser, all that a resume needs."""

    epoch: int = 0
    """Epochs that are finished."""
    images: int = 0
    seconds: float = 0.0
    """Wall time of training and evaluation, over all starts."""
    average: dict[str, Tensor] | None = None
    """The exponential moving average of the trained weights."""


def save(
    folder: Path, policy: Policy, optimiser: Optimizer, state: State, config: GRPOConfig
) -> Path:
    """Writes `folder/epoch-NNNN`: the LoRA as it would be used, and the state to go on from."""
    target = folder / f"epoch-{state.epoch:04d}"
    temporary = folder / f".{target.name}.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with as_used(policy, state.average):
        save_result(temporary, policy, config)
    save_file(_tensors(policy, optimiser, state), temporary / STATE)
    manifest = {
        "state": {k: v for k, v in asdict(state).items() if k != "average"},
        "passes": policy.passes,
        "versions": versions(),
        "config": plain(config),
        "files": {str(path.relative_to(temporary)): _sha256(path) for path in _files(temporary)},
    }
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in _files(temporary):
        _sync(path)
    if target.exists():
        shutil.rmtree(target)
    os.replace(temporary, target)
    _sync(folder)
    return target


def load_newest(
    folder: Path, policy: Policy, optimiser: Optimizer, config: GRPOConfig
) -> State | None:
    """Puts the newest whole checkpoint in place; a damaged one is skipped with a message.

    Returns:
        Its state; None where there is no checkpoint: the run was stopped before its first.

    Raises:
        ConfigError: the run was made with other settings.
    """
    for path in sorted(folder.glob("epoch-*"), reverse=True):
        manifest = _verified(path)
        if manifest is None:
            print(f"checkpoint {path} is damaged; trying the one before.", file=sys.stderr)
            continue
        refuse_changes(manifest["config"], plain(config))
        tensors = load_file(path / STATE)
        load_weights(policy, _under("adapter/", tensors))
        _load_optimiser(_under("optimiser/", tensors), policy, optimiser)
        policy.passes.update(manifest["passes"])
        devices = {name: parameter.device for name, parameter in policy.parameters.items()}
        average = {n: v.to(devices[n]) for n, v in _under("average/", tensors).items()}
        return State(**manifest["state"], average=average or None)
    print(f"{folder} holds no whole checkpoint; starting from the beginning.", file=sys.stderr)
    return None


def save_result(folder: Path, policy: Policy, config: GRPOConfig) -> None:
    """What was trained, as plain diffusers loads it, and a record of its settings."""
    folder.mkdir(parents=True, exist_ok=True)
    policy.save(folder)
    scheduler = policy.pipe.scheduler
    record = {
        "pipeline": type(policy.pipe).__name__,
        "model": config.model.path,
        "scheduler": {"class": type(scheduler).__name__, **scheduler.config},
        "training": config.sampling_call,
        "evaluation": config.evaluation_call,
        "versions": versions(),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1, default=str))


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    names = ["flowgrpo", "torch", "diffusers", "transformers", "peft"]
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _tensors(policy: Policy, optimiser: Optimizer, state: State) -> dict[str, Tensor]:
    """Live adapter, average and optimiser moments under one flat set of names."""
    parameters = policy.parameters
    tensors = {f"adapter/{name}": p.detach().contiguous() for name, p in parameters.items()}
    tensors |= {f"average/{name}": value for name, value in (state.average or {}).items()}
    for name, parameter in parameters.items():
        for key, value in optimiser.state.get(parameter, {}).items():
            tensors[f"optimiser/{key}/{name}"] = value
    return tensors


def _load_optimiser(moments: dict[str, Tensor], policy: Policy, optimiser: Optimizer) -> None:
    parameters = policy.parameters
    for key_and_name, value in moments.items():
        key, name = key_and_name.split("/", 1)
        parameter = parameters[name]
        # AdamW counts its steps on the CPU.
        place = value if key == "step" else value.to(parameter.device)
        optimiser.state[parameter][key] = place


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _verified(path: Path) -> dict[str, Any] | None:
    """The manifest, if every file it lists is there as it was written."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        whole = all(_sha256(path / name) == digest for name, digest in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return manifest if whole else None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
