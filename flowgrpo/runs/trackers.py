"""Experiment trackers of accelerate (TensorBoard, Weights & Biases, Trackio, ...).

They get copies of what metrics.jsonl and the run folder hold. Each runs in a thread of its own, so
that a tracker that fails, hangs or falls behind never affects the run.
"""

import json
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import tracking
from PIL import Image

from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.config_file import config_as_json
from flowgrpo.core.errors import ConfigError, did_you_mean
from flowgrpo.runs.tracker_worker import TrackerWorker

PROJECT = "flowgrpo"
"""Project of a run in a tracker, unless a variable such as WANDB_PROJECT names another."""


IDENTITY = "tracker_id.txt"
"""File in the run folder with the name by which trackers recognize a resumed run."""


TIMEOUT = 30.0
"""Time in seconds that the end of a run waits for all of its trackers."""


MAX_ENTRIES = 1000
"""Number of entries that may wait for a tracker; a run of ordinary length logs fewer."""


SINGLE_IMAGE = ("aim", "clearml")
"""Trackers whose log_images takes one image, unlike that of all others; they get no images."""


def check_trackers(names: Sequence[str]) -> None:
    """Raises ConfigError if a tracker is unknown to accelerate or not installed."""
    known = sorted(tracking.LOGGER_TYPE_TO_CLASS)
    installed = {str(name) for name in tracking.get_available_trackers()}
    built_in = {str(name) for name in tracking.LoggerType}
    for name in names:
        if name not in known:
            hint = f"{did_you_mean(name, known)} Known: {', '.join(known)}."
            raise ConfigError(f'tracker "{name}" is unknown; {hint.lstrip()}')
        if name in built_in and name not in installed:
            raise ConfigError(f'tracker "{name}" is not installed; run `pip install {name}`.')


class Trackers:
    """Passes metrics and images to every tracker of a run, without ever waiting for one.

    Args:
        config: its `trackers` are started, and get all of it, flattened.
        folder: the run folder; trackers keep their files there.
        epoch: number of finished epochs. A resumed run continues the same run of a tracker.
        main: whether this is the main process; on others, nothing happens.
        timeout: time in seconds that `close` waits for all trackers together.
        max_entries: number of entries that may wait for one tracker.
    """

    def __init__(
        self,
        config: GRPOConfig,
        folder: Path,
        *,
        epoch: int = 0,
        main: bool = True,
        timeout: float = TIMEOUT,
        max_entries: int = MAX_ENTRIES,
    ):
        self._timeout = timeout
        self._workers: list[TrackerWorker] = []
        if not (main and config.trackers):
            return
        tracking.logger = _Logger(logging.getLogger(tracking.__name__), {})
        settings = {key: _setting(value) for key, value in _leaves(config_as_json(config), ".")}
        for name in dict.fromkeys(config.trackers):
            start = partial(_start, name, folder, _identity(folder), epoch)
            self._workers.append(TrackerWorker(name, start, settings, max_entries))

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Logs the numbers in `metrics`, nested ones as `rewards/ocr/mean`; `step` is the epoch."""
        numbers = flatten(metrics)
        for worker in self._workers:
            worker.put(lambda tracker: tracker.log(numbers, step=step))

    def log_image(self, name: str, path: Path, step: int) -> None:
        """Logs a PNG to trackers that take images; the file is read later, in their threads."""
        for worker in self._workers:
            worker.put(lambda tracker: _log_image(tracker, name, path, step))

    def close(self) -> None:
        """Lets every tracker finish, within `timeout` seconds in all."""
        deadline = time.monotonic() + self._timeout
        for worker in self._workers:
            worker.put(None)
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))


class _Logger(logging.LoggerAdapter):
    """Replaces accelerate's own logger, which needs a PartialState.

    Making one would start a process group if there is none, or choose another device.
    """

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        self.warning(*args, **kwargs)


def flatten(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a nested mapping by their keys, joined by "/"; drops other values."""
    return {key: value for key, value in _leaves(values, "/") if isinstance(value, (int, float))}


def _start(name: str, folder: Path, identity: str, epoch: int) -> tracking.GeneralTracker:
    """Starts a tracker, which continues its run called `identity` if it has one and supports it."""
    make = tracking.LOGGER_TYPE_TO_CLASS[name]
    project = os.environ.get(f"{name.upper()}_PROJECT", PROJECT)
    if name == "tensorboard":
        # Hides former values of the steps that a resumed run repeats.
        tracker = make(name, folder, purge_step=epoch + 1 if epoch else None)
    elif name == "wandb":
        tracker = make(project, id=identity, name=folder.name, dir=folder, resume="allow")
    elif name == "trackio":
        tracker = make(project, name=f"{folder.name}-{identity}", resume="allow", embed=False)
    else:
        tracker = make(project, *[folder] * make.requires_logging_directory)
    # Only the main process has trackers; accelerate would make a PartialState to find that out.
    tracker.main_process_only = False
    tracker.start()
    return tracker


def _identity(folder: Path) -> str:
    """The name by which trackers recognize the run; read from its folder, or made and saved."""
    path = folder / IDENTITY
    identity = path.read_text().strip() if path.exists() else ""
    if not identity:
        folder.mkdir(parents=True, exist_ok=True)
        identity = uuid.uuid4().hex[:16]
        path.write_text(identity)
    return identity


def _log_image(tracker: tracking.GeneralTracker, name: str, path: Path, step: int) -> None:
    if not hasattr(tracker, "log_images") or tracker.name in SINGLE_IMAGE:
        return
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))[None]
    layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
    tracker.log_images({name: pixels}, step=step, **layout)


def _leaves(values: Mapping[str, Any], separator: str) -> Iterator[tuple[str, Any]]:
    """Yields the values of a nested mapping that are no mappings, with their joined keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            inner = _leaves(value, separator)
            yield from ((f"{key}{separator}{name}", leaf) for name, leaf in inner)
        else:
            yield str(key), value


def _setting(value: Any) -> Any:
    """A value as trackers accept it: a number or a string, else JSON."""
    return value if isinstance(value, (int, float, str)) else json.dumps(value)
