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
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from flowgrpo.config import GRPOConfig
from flowgrpo.policy import Policy, load_weights, weights

if TYPE_CHECKING:
    from flowgrpo.trainer import GRPOTrainer

STATE, MANIFEST, RECORD = "state.safetensors", "manifest.json", "generation.json"


def save(folder: Path, trainer: "GRPOTrainer") -> Path:
    """Writes `folder/epoch-NNNN`: the LoRA as it would be used, and the state to go on from."""
    target = folder / f"epoch-{trainer.state.epoch:04d}"
    temporary = folder / f".{target.name}.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with weights(trainer.policy, trainer.state.average):
        save_result(temporary, trainer.policy, trainer.config)
    save_file(_tensors(trainer), temporary / STATE)
    counters = {k: v for k, v in asdict(trainer.state).items() if k != "average"}
    counters["denoiser_forwards"] = trainer.policy.denoiser_forwards
    counters["denoiser_backwards"] = trainer.policy.denoiser_backwards
    manifest = {
        "state": counters,
        "versions": versions(),
        "config": trainer.config.model_dump(mode="json"),
        "files": {path.name: _sha256(path) for path in sorted(temporary.iterdir())},
    }
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in temporary.iterdir():
        _sync(path)
    if target.exists():
        shutil.rmtree(target)
    os.replace(temporary, target)
    _sync(folder)
    return target


def load_newest(folder: Path, trainer: "GRPOTrainer") -> None:
    """Puts the newest whole checkpoint into the trainer; a damaged one is skipped with a message.

    Without any, the run starts from its beginning: it was stopped before its first checkpoint.
    """
    for path in sorted(folder.glob("epoch-*"), reverse=True):
        manifest = _verified(path)
        if manifest is None:
            print(f"checkpoint {path} is damaged; trying the one before.", file=sys.stderr)
            continue
        _restore(load_file(path / STATE), trainer)
        for name, value in manifest["state"].items():
            setattr(trainer.state, name, value)
        trainer.policy.denoiser_forwards = trainer.state.denoiser_forwards
        trainer.policy.denoiser_backwards = trainer.state.denoiser_backwards
        return
    print(f"{folder} holds no complete checkpoint; starting from the beginning.", file=sys.stderr)


def save_result(folder: Path, policy: Policy, config: GRPOConfig) -> None:
    """The LoRA in the pipeline's own format, and a record of the settings it was trained with."""
    folder.mkdir(parents=True, exist_ok=True)
    policy.save_lora(folder)
    sampling, scheduler = config.sampling, policy.pipe.scheduler
    record = {
        "pipeline": type(policy.pipe).__name__,
        "model": config.model.path,
        "scheduler": type(scheduler).__name__,
        "training": {"num_inference_steps": sampling.num_inference_steps, **sampling.call},
        "evaluation": config.evaluation_call,
        "versions": versions(),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1, default=str))


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    names = ["flowgrpo", "torch", "diffusers", "transformers", "peft"]
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _tensors(trainer: "GRPOTrainer") -> dict[str, Tensor]:
    """Live adapter, average and optimiser moments under one flat set of names."""
    parameters = trainer.policy.parameters
    tensors = {f"adapter/{name}": p.detach().contiguous() for name, p in parameters.items()}
    for name, value in (trainer.state.average or {}).items():
        tensors[f"average/{name}"] = value
    for name, parameter in parameters.items():
        for key, value in trainer.optimiser.state.get(parameter, {}).items():
            tensors[f"optimiser/{key}/{name}"] = value
    return tensors


def _restore(tensors: dict[str, Tensor], trainer: "GRPOTrainer") -> None:
    parameters = trainer.policy.parameters
    load_weights(trainer.policy, _under("adapter/", tensors))
    if trainer.state.average is not None:
        trainer.state.average = {
            name: value.to(trainer.device) for name, value in _under("average/", tensors).items()
        }
    moments = _under("optimiser/", tensors)
    for key_and_name, value in moments.items():
        key, name = key_and_name.split("/", 1)
        parameter = parameters[name]
        # AdamW counts its steps on the CPU.
        place = value if key == "step" else value.to(parameter.device)
        trainer.optimiser.state[parameter][key] = place


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


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
