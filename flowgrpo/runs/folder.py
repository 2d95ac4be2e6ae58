"""The run folder: metrics, samples and the summary that people read."""

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
from flowgrpo.core.config_file import dump_config, plain
from flowgrpo.core.errors import ConfigError, DiskError
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
"""Errors of a disk that is full, broken or closed to us."""


class RunFolder:
    """Paths and files of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.lora = path / "lora"
        self._lock = FileLock(path / ".lock")

    def check_usable(self, resume: bool, config: GRPOConfig, fingerprint: dict[str, Any]) -> None:
        """Raises ConfigError where the folder holds a run and shall not, or holds a different one.

        A folder without the base model's evaluation holds no run yet.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"output_dir is {self.path}, but that is a file; name a folder.")
        existing = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        try:
            if not os.access(existing, os.W_OK):
                raise PermissionError(errno.EACCES, "it cannot be written", str(existing))
            missing = [p for p in (self.path, *self.path.parents) if not p.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            for tried in missing:
                tried.rmdir()
        except OSError as error:
            raise ConfigError(
                f"output_dir is {self.path}, but that cannot be ({error.strerror}: {existing}); "
                "correct its rights, or name another folder."
            ) from error
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
            check_resumable(self._read("config.yaml"), plain(config))
            check_resumable(self._read("inputs.json"), fingerprint)

    def lock(self) -> None:
        """Keeps other runs out, until `unlock` or the end of this process.

        Raises:
            ConfigError: another one is at work in the folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(
                f"output_dir is {self.path}, but another process trains there now; wait for its "
                "end, or name another folder."
            ) from None

    def unlock(self) -> None:
        self._lock.release()

    def _read(self, name: str) -> dict[str, Any]:
        """A file that says what the run is. JSON is YAML, too."""
        try:
            data: dict[str, Any] = yaml.safe_load((self.path / name).read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{self.path / name} cannot be read ({reason}), but says what run this is; put it "
                "back, or start another run."
            ) from error
        return data

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Within the block a disk that is full or refuses becomes one sentence.

        Raises:
            DiskError: instead of the writer's own error.
        """
        try:
            yield
        except (OSError, SafetensorError) as error:
            place = getattr(error, "filename", None) or self.path
            ours = self.path.absolute() in [Path(place).absolute(), *Path(place).absolute().parents]
            known = isinstance(error, SafetensorError) or error.errno in NOT_WRITABLE
            if not (known and ours):
                raise
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise DiskError(
                f"{place} cannot be written ({reason}); make room or correct its rights, and go on "
                "with --resume: what was there is still there."
            ) from error

    def begin(self, config: GRPOConfig, fingerprint: dict[str, Any], epoch: int) -> None:
        """Writes the resolved config; drops what a resumed run does again after `epoch`."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "config.yaml", dump_config(config))
        write_atomically(self.path / "inputs.json", json.dumps(fingerprint, indent=1))
        for folder in self._evaluation_folders():
            if epoch_of(folder) > epoch:
                shutil.rmtree(folder)
        kept = [line for line in self.metrics() if line["epoch"] <= epoch]
        write_atomically(self._metrics, "".join(json.dumps(line) + "\n" for line in kept))

    def log(self, line: dict[str, Any]) -> None:
        """Adds a line to the metrics; it is on the disk before the epoch's checkpoint is."""
        with self._metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def record_stop(self, reason: str, message: str, epoch: int, checkpoint: str | None) -> None:
        """summary.json of a run that ended early: why, when, and what there is to go on from."""
        if not self.path.is_dir():
            return
        stopped = {"reason": reason, "message": message, "epoch": epoch, "checkpoint": checkpoint}
        try:
            summary = {**self._result(), "stopped": stopped}
            write_atomically(self.path / "summary.json", json.dumps(summary, indent=1))
        except OSError as error:  # a full disk may be what ended it
            print(f"warning: summary.json cannot be written ({error}).", file=sys.stderr)

    def metrics(self) -> list[dict[str, Any]]:
        if not self._metrics.exists():
            return []
        lines = self._metrics.read_text().split("\n")
        try:
            return [json.loads(line) for line in lines[:-1]]  # one that a kill cut short has no end
        except ValueError as error:
            raise ConfigError(
                f"{self._metrics} has a line that is no JSON ({error}); take it out."
            ) from None

    def evaluation(self, epoch: int) -> Path:
        return self.path / "eval" / f"epoch-{epoch:04d}"

    def evaluations(self) -> dict[int, dict[str, dict[str, Tensor]]]:
        """Scores of every whole evaluation by epoch; 0 is the base model."""
        folders = [f for f in self._evaluation_folders() if (f / SCORES).exists()]
        return {epoch_of(folder): load_scores(folder) for folder in folders}

    def headlines(self, reward: str, epochs: Iterable[int]) -> dict[int, float]:
        """Mean score of those epochs that are evaluated, of the held-out prompts where there are
        some."""
        means = {}
        for epoch in filter(self.is_evaluated, epochs):
            sets = load_scores(self.evaluation(epoch))
            scores = sets.get("test_prompts", sets["train_prompts"])
            means[epoch] = float(scores[reward].mean())
        return means

    def is_evaluated(self, epoch: int) -> bool:
        return (self.evaluation(epoch) / SCORES).exists()

    def samples(self, epoch: int) -> Path:
        """The contact sheet of an epoch's rollouts."""
        return self.path / "samples" / f"epoch-{epoch:04d}.png"

    def _result(self) -> dict[str, Any]:
        """summary.json of a finished run, without why a later start of it ended early."""
        path = self.path / "summary.json"
        summary = json.loads(path.read_text()) if path.exists() else {}
        summary.pop("stopped", None)
        return summary

    def _evaluation_folders(self) -> list[Path]:
        return epoch_folders(self.path / "eval")

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"
