"""The run folder: its lock, config, metrics, evaluations, contact sheets and summary."""

import errno
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import Tensor

from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.config_changes import check_resumable
from flowgrpo.core.config_file import config_as_json, dump_config
from flowgrpo.core.errors import ConfigError, DiskError, one_line
from flowgrpo.core.files import epoch_folders, epoch_of, write_atomically
from flowgrpo.evaluation.scores import SCORES, load_scores

NOT_WRITABLE = {
    getattr(errno, name)
    for name in (
        "ENOSPC",
        "EFBIG",
        "EDQUOT",
        "EROFS",
        "EACCES",
        "EPERM",
        "EIO",
        "ENOTDIR",
        "ESTALE",
    )
    if hasattr(errno, name)
}
"""Errors of a disk that is full, broken or not writable for us."""


class RunFolder:
    """Paths and files of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.lora = path / "lora"
        self._lock = FileLock(path / ".lock")

    def check_usable(self, resume: bool, config: GRPOConfig, fingerprint: dict[str, Any]) -> None:
        """Checks that a run can start, or resume, in this folder.

        A folder without the base model's evaluation or a checkpoint holds no run yet.

        Raises:
            ConfigError: the folder cannot be written, holds another run, or holds none to resume.
        """
        self._check_writable()
        holds_run = self.is_evaluated(0) or any(self.checkpoints.glob("epoch-*"))
        if holds_run and not resume:
            raise ConfigError(
                f"output_dir is {self.path}, but it holds another run; use --resume, or name "
                "another folder."
            )
        if resume and not (self.path / "config.yaml").exists():
            raise ConfigError(
                f"output_dir is {self.path}, but it holds no run to resume; leave out --resume."
            )
        if resume and holds_run:
            check_resumable(self._read("config.yaml"), config_as_json(config))
            check_resumable(self._read("inputs.json"), fingerprint)

    def _check_writable(self) -> None:
        """Raises ConfigError if the folder cannot be created or written; leaves no trace."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"output_dir is {self.path}, but that is a file; name a folder.")
        existing = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        try:
            if not os.access(existing, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(existing))
            # Permissions do not tell everything (quotas, read-only mounts), so it is tried.
            missing = [p for p in (self.path, *self.path.parents) if not p.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            for created in missing:
                created.rmdir()
        except OSError as error:
            raise ConfigError(
                f"output_dir is {self.path}, but {existing} cannot be written ({error.strerror}); "
                "correct its permissions, or name another folder."
            ) from error

    def lock(self) -> None:
        """Locks the folder against other runs, until `unlock` or the end of this process.

        Raises:
            ConfigError: another process holds the lock.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(
                f"output_dir is {self.path}, but another process is training there; wait for it "
                "to end, or name another folder."
            ) from None

    def unlock(self) -> None:
        self._lock.release()

    def _read(self, name: str) -> dict[str, Any]:
        """Reads a YAML or JSON file (JSON is YAML, too) that identifies the run."""
        try:
            data: dict[str, Any] = yaml.safe_load((self.path / name).read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            reason = one_line(error)
            raise ConfigError(
                f"{self.path / name} cannot be read ({reason}), but identifies the run to resume; "
                "restore it, or start another run."
            ) from error
        return data

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Context in which errors of writing to the run folder become a DiskError.

        Raises:
            DiskError: the disk is full, broken or not writable.
        """
        try:
            yield
        except (OSError, SafetensorError) as error:
            # Errors of write() and of safetensors name no file; the run folder is assumed then.
            path = Path(getattr(error, "filename", None) or self.path)
            in_folder = self.path.absolute() in [path.absolute(), *path.absolute().parents]
            of_disk = isinstance(error, SafetensorError) or error.errno in NOT_WRITABLE
            if not (of_disk and in_folder):
                raise
            reason = getattr(error, "strerror", None) or one_line(error)
            raise DiskError(
                f"{path} cannot be written ({reason}), but existing files are intact; free space "
                "or correct its permissions, and continue with --resume."
            ) from error

    def begin(self, config: GRPOConfig, fingerprint: dict[str, Any], epoch: int) -> None:
        """Writes the resolved config; drops metrics and evaluations after `epoch`, to be redone."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "config.yaml", dump_config(config))
        write_atomically(self.path / "inputs.json", json.dumps(fingerprint, indent=1))
        for folder in self._evaluation_folders():
            if epoch_of(folder) > epoch:
                shutil.rmtree(folder)
        kept = [line for line in self.metrics() if line["epoch"] <= epoch]
        write_atomically(self._metrics, "".join(json.dumps(line) + "\n" for line in kept))

    def log(self, line: dict[str, Any]) -> None:
        """Appends a line to metrics.jsonl and syncs it, so that no checkpoint lacks its line."""
        with self._metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def record_stop(self, reason: str, message: str, epoch: int, checkpoint: str | None) -> None:
        """Writes to summary.json why and when a run ended early, and its newest checkpoint."""
        if not self.path.is_dir():
            return
        stopped = {"reason": reason, "message": message, "epoch": epoch, "checkpoint": checkpoint}
        try:
            summary = {**self._result(), "stopped": stopped}
            write_atomically(self.path / "summary.json", json.dumps(summary, indent=1))
        except OSError as error:  # a full disk may be what ended it
            print(f"warning: summary.json cannot be written ({error}).", file=sys.stderr)

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the lines of metrics.jsonl, one per epoch; without one that a kill cut short.

        Raises:
            ConfigError: a line is not valid JSON.
        """
        if not self._metrics.exists():
            return []
        lines = self._metrics.read_text().split("\n")
        try:
            return [json.loads(line) for line in lines[:-1]]  # a line cut short has no newline
        except ValueError as error:
            raise ConfigError(
                f"{self._metrics} has a line that is not JSON ({error}); remove it."
            ) from None

    def evaluation(self, epoch: int) -> Path:
        """Path of the folder of an epoch's evaluation."""
        return self.path / "eval" / f"epoch-{epoch:04d}"

    def evaluations(self) -> dict[int, dict[str, dict[str, Tensor]]]:
        """Scores (prompts, seeds) of complete evaluations, by epoch, prompt set and reward."""
        folders = [f for f in self._evaluation_folders() if (f / SCORES).exists()]
        return {epoch_of(folder): load_scores(folder) for folder in folders}

    def headlines(self, reward: str, epochs: Iterable[int]) -> dict[int, float]:
        """Mean scores by epoch, for those of `epochs` with a complete evaluation.

        They are of the test prompts, or of the training prompts if there are no test prompts.
        """
        means = {}
        for epoch in filter(self.is_evaluated, epochs):
            sets = load_scores(self.evaluation(epoch))
            scores = sets.get("test_prompts", sets["train_prompts"])
            means[epoch] = float(scores[reward].mean())
        return means

    def is_evaluated(self, epoch: int) -> bool:
        """Whether there is a complete evaluation of an epoch; 0 is the base model."""
        return (self.evaluation(epoch) / SCORES).exists()

    def samples(self, epoch: int) -> Path:
        """Path of the contact sheet of an epoch's rollouts."""
        return self.path / "samples" / f"epoch-{epoch:04d}.png"

    def _result(self) -> dict[str, Any]:
        """The contents of summary.json, except why an earlier start ended early."""
        path = self.path / "summary.json"
        summary = json.loads(path.read_text()) if path.exists() else {}
        summary.pop("stopped", None)
        return summary

    def _evaluation_folders(self) -> list[Path]:
        return epoch_folders(self.path / "eval")

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"
