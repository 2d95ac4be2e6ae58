"""The environment of a run: versions, machine, variables and code that can change its numbers."""

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
"""Folder that holds the packages `flowgrpo` and `rewards`."""


VARIABLES = (
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "PYTHONHASHSEED",
)
"""Variables that can change numbers. No others are recorded, since they may hold secrets."""


def variables() -> dict[str, str]:
    """The values of those VARIABLES that are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def versions(names: Iterable[str] | None = None) -> dict[str, str]:
    """Versions of Python and of installed packages, by normalized package name.

    Args:
        names: packages; by default those of all modules imported so far, and flowgrpo's own
            requirements, since rewards import theirs late.
    """
    if names is None:
        owners = packages_of_modules()
        modules = {name.partition(".")[0] for name in list(sys.modules)}
        names = {owner for module in modules for owner in owners.get(module, ())} | _required()
    found = {"python": platform.python_version()}
    for name in sorted({re.sub(r"[-_.]+", "-", name).lower() for name in names}):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def packages_of_modules() -> Mapping[str, list[str]]:
    """Installed packages by the top-level modules they provide; cached, since reading takes 1 s."""
    return importlib.metadata.packages_distributions()


def _required() -> set[str]:
    """Names of the packages that flowgrpo requires, without its extras."""
    try:
        lines = importlib.metadata.requires("flowgrpo") or []
    except importlib.metadata.PackageNotFoundError:
        return set()
    return {re.split(r"[^\w.-]", line)[0] for line in lines if "extra ==" not in line}


def machine() -> dict[str, Any]:
    """Platform, CPU, number of threads, and GPUs."""
    return {
        "platform": platform.platform(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
    }


def _cpu() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def checkout() -> dict[str, Any]:
    """The hash of the running code, and its commit if git tracks it at ROOT; else None."""
    tracked = _git("ls-files", "--error-unmatch", "flowgrpo/__init__.py")
    status = _git("status", "--porcelain", "--", "flowgrpo", "rewards")
    return {
        "commit": _git("rev-parse", "HEAD") if tracked else None,
        "changed": bool(status) if tracked else None,
        "sha256": code_hash(),
    }


def code_hash() -> str:
    """SHA-256 of the file names and contents of both packages, as hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted([*ROOT.glob("flowgrpo/**/*.py"), *ROOT.glob("rewards/**/*.py")]):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _git(*command: str) -> str | None:
    """The output of a git command at ROOT; None if it fails or there is no git."""
    try:
        result = subprocess.run(
            ["git", "-C", str(ROOT), *command],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
