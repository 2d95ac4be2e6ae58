"""Threads in which trackers run, so that none of them can delay or end a run."""

import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from accelerate import tracking

Entry = Callable[[tracking.GeneralTracker], None]
"""A call of a tracker that waits in a queue."""


THREAD_PREFIX = "tracker-"


class TrackerWorker:
    """One tracker with a thread and a bounded queue of its own; nothing else touches the tracker.

    If it fails, hangs or falls behind, it is switched off with one warning.

    Args:
        name: as in the config.
        start: makes and starts the tracker; called in the thread, since it may wait for a network.
        settings: the flattened config.
        max_entries: number of entries that may wait.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], tracking.GeneralTracker],
        settings: dict[str, Any],
        max_entries: int,
    ):
        self.name = name
        self._entries: queue.Queue[Entry | None] = queue.Queue(max_entries)
        self._off = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(start, settings), name=f"{THREAD_PREFIX}{name}", daemon=True
        )
        self._thread.start()

    def put(self, entry: Entry | None) -> None:
        """Queues an entry without waiting; None ends the thread."""
        if self._off.is_set():
            return
        try:
            self._entries.put_nowait(entry)
        except queue.Full:
            self._switch_off(f"is {self._entries.maxsize} entries behind")

    def join(self, timeout: float) -> None:
        """Waits until the thread has ended, for at most `timeout` seconds."""
        if self._off.is_set():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._switch_off("did not finish in time")

    def _run(self, start: Callable[[], tracking.GeneralTracker], settings: dict[str, Any]) -> None:
        try:
            tracker = start()
            tracker.store_init_configuration(settings)
            while (entry := self._entries.get()) is not None and not self._off.is_set():
                entry(tracker)
            tracker.finish()
        except BaseException as error:  # SystemExit too, since some trackers call sys.exit
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._switch_off(f"failed ({reason})")

    def _switch_off(self, reason: str) -> None:
        if not self._off.is_set():
            self._off.set()
            print(
                f"warning: tracker {self.name} {reason} and is now off; metrics.jsonl is not "
                "affected.",
                file=sys.stderr,
            )


def exit_if_hung(code: int) -> None:
    """Ends the process at once with exit code `code` if a tracker still hangs; else returns.

    The exit hooks of a tracker may hang as it does (wandb waits for its network), so they are
    skipped. Everything of the run is on disk by then.
    """
    if any(thread.name.startswith(THREAD_PREFIX) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
