"""Trackers beside metrics.jsonl: TensorBoard, Weights & Biases, Trackio, ..., as accelerate knows
them.

A tracker is a guest. Each has a thread of its own and a bounded queue; one that fails, hangs or
falls behind is switched off with one warning, and the run goes on as without it. What counts is on
disk.
"""

import json
import logging
import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import tracking
from PIL import Image

from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.config_file import plain
from flowgrpo.core.errors import ConfigError, did_you_mean

PROJECT = "flowgrpo"
"""Where a tracker sorts runs into projects; WANDB_PROJECT and the like go before it."""


IDENTITY = "tracker_id.txt"


PATIENCE = 30.0
"""Seconds that the end of a run waits for all of its trackers."""


BACKLOG = 1000
"""Entries that may wait for a tracker; a run of ordinary length logs fewer."""


THREAD = "tracker-"


ONE_PICTURE = ("aim", "clearml")
"""Their log_images takes a picture where that of the others takes several; they get none."""


def check_trackers(names: Sequence[str]) -> None:
    """Raises ConfigError for a tracker that accelerate does not know, or that is not installed."""
    known = sorted(tracking.LOGGER_TYPE_TO_CLASS)
    installed = {str(name) for name in tracking.get_available_trackers()}
    built_in = {str(name) for name in tracking.LoggerType}
    for name in names:
        if name not in known:
            hint = f"{did_you_mean(name, known)} Known: {', '.join(known)}."
            raise ConfigError(f'tracker "{name}" is unknown; {hint.lstrip()}')
        if name in built_in and name not in installed:
            raise ConfigError(
                f'tracker is "{name}", but that is not installed; run `pip install {name}`.'
            )


class Trackers:
    """Hands metrics and pictures to every tracker of a run, and never waits for one.

    Args:
        config: its `trackers` are started, and get all of it, flattened.
        folder: the run folder; what trackers keep on disk lies there.
        epoch: epochs that are finished. A resumed run goes on in the same run of a tracker.
        main: whether this is the main process; on others, nothing happens.
        patience: seconds that `close` waits for all trackers together.
        backlog: entries that may wait for one tracker.
    """

    def __init__(
        self,
        config: GRPOConfig,
        folder: Path,
        *,
        epoch: int = 0,
        main: bool = True,
        patience: float = PATIENCE,
        backlog: int = BACKLOG,
    ):
        self._patience = patience
        self._workers: list[_Worker] = []
        if not (main and config.trackers):
            return
        tracking.logger = _Logger(logging.getLogger(tracking.__name__), {})
        settings = {key: _plain(value) for key, value in _leaves(plain(config), ".")}
        for name in dict.fromkeys(config.trackers):
            start = partial(_start, name, folder, _identity(folder), epoch)
            self._workers.append(_Worker(name, start, settings, backlog))

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Numbers of `metrics`, nested ones as `rewards/ocr/mean`; `step` counts epochs."""
        numbers = flatten(metrics)
        for worker in self._workers:
            worker.put(lambda tracker: tracker.log(numbers, step=step))

    def log_picture(self, name: str, path: Path, step: int) -> None:
        """A PNG, for trackers that take pictures; it is read when its turn comes."""
        for worker in self._workers:
            worker.put(lambda tracker: _log_picture(tracker, name, path, step))

    def close(self) -> None:
        """Lets every tracker finish, for `patience` seconds in all."""
        deadline = time.monotonic() + self._patience
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.wait(max(0.0, deadline - time.monotonic()))


class _Worker:
    """One tracker, used by one thread alone."""

    def __init__(
        self,
        name: str,
        start: Callable[[], tracking.GeneralTracker],
        settings: dict[str, Any],
        backlog: int,
    ):
        self.name = name
        self._entries: queue.Queue[Callable | None] = queue.Queue(backlog)
        self._off = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(start, settings), name=f"{THREAD}{name}", daemon=True
        )
        self._thread.start()

    def put(self, entry: Callable[[tracking.GeneralTracker], None] | None) -> None:
        if self._off.is_set():
            return
        try:
            self._entries.put_nowait(entry)
        except queue.Full:
            self._switch_off(f"is {self._entries.maxsize} entries behind")

    def end(self) -> None:
        self.put(None)

    def wait(self, seconds: float) -> None:
        if self._off.is_set():
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._switch_off("did not finish in time")

    def _run(self, start: Callable[[], tracking.GeneralTracker], settings: dict[str, Any]) -> None:
        try:
            tracker = start()
            tracker.store_init_configuration(settings)
            while (entry := self._entries.get()) is not None and not self._off.is_set():
                entry(tracker)
            tracker.finish()
        except BaseException as error:  # SystemExit too: some trackers end the process
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._switch_off(f"failed ({reason})")

    def _switch_off(self, reason: str) -> None:
        if not self._off.is_set():
            self._off.set()
            print(
                f"warning: tracker {self.name} {reason} and is off now; metrics.jsonl goes on.",
                file=sys.stderr,
            )


class _Logger(logging.LoggerAdapter):
    """Stands in for accelerate's own logger, which asks for a PartialState: that would start a
    process group where there is none, or take another device."""

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        self.warning(*args, **kwargs)


def flatten(values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers under names joined by "/"; what is no number is left out."""
    return {key: value for key, value in _leaves(values, "/") if isinstance(value, (int, float))}


def leave(code: int) -> None:
    """Ends the process at once where a tracker still hangs; else does nothing.

    The exit hooks of a tracker may wait as it does: wandb's, for its network. Everything of the run
    is on disk by now.
    """
    if any(thread.name.startswith(THREAD) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _start(name: str, folder: Path, identity: str, epoch: int) -> tracking.GeneralTracker:
    """A tracker that goes on in the run of `identity`, if it had begun one and can."""
    make = tracking.LOGGER_TYPE_TO_CLASS[name]
    project = os.environ.get(f"{name.upper()}_PROJECT", PROJECT)
    if name == "tensorboard":
        # Steps that a resumed run does again are hidden where they were logged before.
        tracker = make(name, folder, purge_step=epoch + 1 if epoch else None)
    elif name == "wandb":
        tracker = make(project, id=identity, name=folder.name, dir=folder, resume="allow")
    elif name == "trackio":
        tracker = make(project, name=f"{folder.name}-{identity}", resume="allow", embed=False)
    else:
        tracker = make(project, *[folder] * make.requires_logging_directory)
    # The main process is known; accelerate would make a PartialState to ask for it.
    tracker.main_process_only = False
    tracker.start()
    return tracker


def _identity(folder: Path) -> str:
    """Under which trackers know the run; kept in its folder, so that a resumed run has the same."""
    path = folder / IDENTITY
    known = path.read_text().strip() if path.exists() else ""
    if not known:
        folder.mkdir(parents=True, exist_ok=True)
        known = uuid.uuid4().hex[:16]
        path.write_text(known)
    return known


def _log_picture(tracker: tracking.GeneralTracker, name: str, path: Path, step: int) -> None:
    if not hasattr(tracker, "log_images") or tracker.name in ONE_PICTURE:
        return
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))[None]
    layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
    tracker.log_images({name: pixels}, step=step, **layout)


def _leaves(values: Mapping[str, Any], separator: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            inner = _leaves(value, separator)
            yield from ((f"{key}{separator}{name}", leaf) for name, leaf in inner)
        else:
            yield str(key), value


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str)) else json.dumps(value)
