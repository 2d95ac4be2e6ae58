"""Runs that die: `flowgrpo train` in a process of its own, with a fault at a counted point.

A process counts what happens in it: changes of files in its run folder, calls of denoisers with the
steps of the optimizer, calls of the reward. A `Point` is such a count, and what happens then. No
handler sees a death: SIGKILL; a file that reaches a size (SIGXFSZ); a timer that ends the process
wherever it is, in compiled code too (SIGALRM).
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

import families  # noqa: F401  here and below: imported once, not in each process
import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from tqdm import tqdm

import flowgrpo.training.trainer  # noqa: F401
from flowgrpo.cli import main
from flowgrpo.runs.environment import packages_of_modules

packages_of_modules()  # read once, not in each process

RUN = "run"
"""The run folder, in the folder that the process starts in."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"}
SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}

Event = Literal["file", "model", "reward"]
Deed = Literal["kill", "terminate", "interrupt", "size", "timer", "full"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """What happens to a process at the `at`-th event of a kind, counted from 1."""

    event: Event
    at: int
    deed: Deed = "kill"
    amount: float = 0
    """`size` and `full`: bytes that a file can have from then on, where one more ends the process
    or is an error; `timer`: seconds to live."""


@dataclass(kw_only=True)
class Ended:
    """A process after its end."""

    code: int
    """Exit code; below 0 the signal that ended it."""
    stderr: str
    events: dict[str, list[str]]
    """By kind, in order; empty where the process was killed."""
    struck: str | None
    """The event of its point, if that was reached."""
    seconds: float
    """From there to the end."""


@dataclass(kw_only=True)
class Watchdog:
    """Counts the events of this process; its point strikes at its own."""

    folder: str
    point: Point | None
    report: Any
    """A connection: what is sent outlives this process."""
    events: dict[str, list[str]] = field(
        default_factory=lambda: {"file": [], "model": [], "reward": []}
    )

    def happens(self, event: Event, what: str) -> None:
        self.events[event].append(what)
        if self.point and (event, len(self.events[event])) == (self.point.event, self.point.at):
            self.report.send((what, time.monotonic()))
            strike(self.point)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Python's audit hook: changes of files in the folder, each before it is made."""
        if event in CHANGES:
            path = _absolute(arguments[0], arguments[-1])
        elif event == "open" and arguments[2] & WRITES:
            path = arguments[0]
        else:
            return
        if isinstance(path, (str, os.PathLike)):
            name = os.path.abspath(path)
            if name.startswith(self.folder):
                self.happens("file", f"{event} {os.path.relpath(name, self.folder)}")

    def called(self, module: torch.nn.Module, _: Any) -> None:
        """torch's hook on every module."""
        if type(module).__name__.endswith("Transformer2DModel"):
            self.happens("model", "denoiser")


_watch: Watchdog | None = None
"""Of this process."""


def reward_called(prompt: str) -> None:
    """Counts a call of the reward, from within."""
    if _watch is not None:
        _watch.happens("reward", f"reward of {prompt}")


def strike(point: Point) -> None:
    """Does to this process what the point says."""
    if point.deed in SIGNALS:
        os.kill(os.getpid(), SIGNALS[point.deed])
    elif point.deed == "timer":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(point.amount, 1e-6))
    else:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if point.deed == "size" else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(point.amount), resource.RLIM_INFINITY))


def train(config: Path, folder: Path, *overrides: str, point: Point | None = None) -> Ended:
    """Runs `flowgrpo train` in `folder`, in a process of its own, to its end.

    It resumes where there is a run, as the Makefile does.
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
    """Calls ``target(report, *arguments)`` in a new process in `folder`; it has two minutes.

    Returns:
        What it sent, its stderr and its exit code.
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
    """Processes are forked from one that has imported everything and run nothing."""
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
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed process leaves behind
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    target(report, *arguments)


def _train(report: Any, arguments: list[str], point: Point | None) -> None:
    global _watch
    watch = _watch = Watchdog(folder=os.path.abspath(RUN), point=point, report=report)
    sys.addaudithook(watch.audit)
    register_module_forward_pre_hook(watch.called)
    register_optimizer_step_pre_hook(lambda *_: watch.happens("model", "optimizer"))
    sys.argv = ["flowgrpo", *arguments]
    try:
        main()
    finally:
        report.send(watch.events)


def _absolute(path: Any, folder_descriptor: Any) -> Any:
    """Where a path is relative to an open folder, as within shutil.rmtree: from the root."""
    if isinstance(folder_descriptor, int) and folder_descriptor >= 0:
        return os.path.join(os.readlink(f"/proc/self/fd/{folder_descriptor}"), path)
    return path
