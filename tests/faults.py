"""Runs that fail: `flowgrpo train` in a new process, with a fault at a counted event.

The process counts its events: changes of files in its run folder, denoiser calls and optimizer
steps, and reward calls. A `Point` names an event and the fault that happens there. No handler can
catch a death: it is SIGKILL, SIGXFSZ (a file reaches a size limit), or SIGALRM (a timer that ends
the process wherever it is, even in compiled code).
"""

import functools
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Literal

import families  # noqa: F401  like others below: imported once, not in each process
import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from tqdm import tqdm

import flowgrpo.training.trainer  # noqa: F401
from flowgrpo.cli import main
from flowgrpo.runs.environment import packages_of_modules

packages_of_modules()  # cached once, not in each process

RUN = "run"
"""Name of the run folder, in the working directory of the process."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"}
SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}

Event = Literal["file", "model", "reward"]
Deed = Literal["kill", "terminate", "interrupt", "size", "timer", "full"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A fault at one event of a process."""

    event: Event
    """Sort of event that is counted."""
    at: int
    """Number of the event among those of its sort, from 1."""
    deed: Deed = "kill"
    """The fault: a signal; `size` or `full`, a limit for files; `timer`, a delayed death."""
    amount: float = 0
    """`size`, `full`: limit for files in bytes, beyond which the process dies (`size`) or gets an
    error (`full`). `timer`: seconds until death."""


@dataclass(kw_only=True)
class Ended:
    """The outcome of a process that has ended."""

    code: int
    """Exit code; negative: the number of the signal that ended it."""
    stderr: str
    events: dict[str, list[str]]
    """Descriptions of its events by sort, in order; empty if the process was killed."""
    struck: str | None
    """Description of the event at which the fault happened; None if it was not reached."""
    seconds: float
    """Time in seconds from the fault to the end."""


@dataclass(kw_only=True)
class EventCounter:
    """Counts the events of this process, and causes the fault at its point."""

    folder: str
    point: Point | None
    report: Any
    """Connection to the parent; what was sent survives this process."""
    events: dict[str, list[str]] = field(
        default_factory=lambda: {"file": [], "model": [], "reward": []}
    )

    def count(self, event: Event, description: str) -> None:
        """Counts an event just before it happens."""
        self.events[event].append(description)
        if self.point and (event, len(self.events[event])) == (self.point.event, self.point.at):
            self.report.send((description, time.monotonic()))
            cause_fault(self.point)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Audit hook of Python: counts changes of files in the folder."""
        if event in CHANGES:
            path = _absolute(arguments[0], arguments[-1])
        elif event == "open" and arguments[2] & WRITES:
            path = arguments[0]
        else:
            return
        if isinstance(path, (str, os.PathLike)):
            name = os.path.abspath(path)
            if name.startswith(self.folder):
                self.count("file", f"{event} {os.path.relpath(name, self.folder)}")

    def before_forward(self, module: torch.nn.Module, _: Any) -> None:
        """Forward pre-hook of every torch module: counts denoiser calls."""
        if type(module).__name__.endswith("Transformer2DModel"):
            self.count("model", "denoiser")


_counter: EventCounter | None = None
"""The counter of this process, if it runs `train`."""


def reward_called(prompt: str) -> None:
    """Counts a reward call; to be called by the reward."""
    if _counter is not None:
        _counter.count("reward", f"reward of {prompt}")


def cause_fault(point: Point) -> None:
    """Causes the fault of `point` in this process."""
    if point.deed in SIGNALS:
        os.kill(os.getpid(), SIGNALS[point.deed])
    elif point.deed == "timer":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(point.amount, 1e-6))
    else:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if point.deed == "size" else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(point.amount), resource.RLIM_INFINITY))


def train(config: Path, folder: Path, *overrides: str, point: Point | None = None) -> Ended:
    """Runs `flowgrpo train` in `folder` and a new process, until that ends.

    If the folder holds a run, it is resumed, as in the Makefile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    resume = ["--resume"] if (folder / RUN / "config.yaml").exists() else []
    arguments = ["train", str(config), *overrides, *resume]
    messages, stderr, code = in_a_process(_train, folder, arguments, point)
    now = time.monotonic()
    struck, since = next((m for m in messages if isinstance(m, tuple)), (None, now))
    events = next((m for m in messages if isinstance(m, dict)), {})
    return Ended(code=code, stderr=stderr, events=events, struck=struck, seconds=now - since)


def in_a_process(
    target: Callable[..., None], folder: Path, *arguments: Any
) -> tuple[list[Any], str, int]:
    """Calls ``target(report, *arguments)`` in a new process in `folder`, for up to two minutes.

    Returns:
        The messages it sent, its stderr and its exit code.
    """
    context = _context()
    (receiver, report), (reader, stderr) = context.Pipe(False), context.Pipe(False)
    process = context.Process(target=_start, args=(target, report, stderr, folder, *arguments))
    process.start()
    report.close()
    stderr.close()
    process.join(120)
    if process.is_alive():
        process.kill()
        process.join()
    messages = []
    try:
        while True:
            messages.append(receiver.recv())
    except EOFError:
        pass
    with os.fdopen(os.dup(reader.fileno()), errors="replace") as file:
        return messages, file.read(), process.exitcode


@functools.cache
def _context() -> Any:
    """Processes are forked from a server that has imported everything and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults", "trials"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


def _start(
    target: Callable[..., None], report: Any, stderr: Any, folder: Path, *arguments: Any
) -> None:
    os.dup2(stderr.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    stderr.close()
    os.chdir(folder)
    tqdm.set_lock(threading.RLock())  # the default is a semaphore that a killed process would leak
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    target(report, *arguments)


def _train(report: Any, arguments: list[str], point: Point | None) -> None:
    global _counter
    counter = _counter = EventCounter(folder=os.path.abspath(RUN), point=point, report=report)
    sys.addaudithook(counter.audit)
    register_module_forward_pre_hook(counter.before_forward)
    register_optimizer_step_pre_hook(lambda *_: counter.count("model", "optimizer"))
    sys.argv = ["flowgrpo", *arguments]
    try:
        main()
    finally:
        report.send(counter.events)


def _absolute(path: Any, folder_descriptor: Any) -> Any:
    """The absolute path of one that is relative to an open folder, as within shutil.rmtree."""
    if isinstance(folder_descriptor, int) and folder_descriptor >= 0:
        return os.path.join(os.readlink(f"/proc/self/fd/{folder_descriptor}"), path)
    return path
