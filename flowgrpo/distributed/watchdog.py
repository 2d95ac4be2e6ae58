"""Notices within a minute that another process of the run is gone, and ends this one.

A collective may wait for ever for a process that died, and a rollout may take longer than anyone
wants to wait. So every process beats once a second in a store that the first one keeps, and a
thread in each listens to the others.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from flowgrpo.core.errors import ProcessLost

BEAT = 1.0
"""Seconds between two signs of life."""


SILENCE = 30.0
"""Seconds after which a silent process counts as dead; it may also hang."""


GRACE = 5.0
"""Seconds that a failed message between processes waits for the reason to be known."""


class Watchdog:
    """Beats for this process and listens to the others.

    Args:
        rank: of this process; `count`: of all.
        broadcast: what the first process says, on all.
        on_loss: called with the reason's name and a sentence just before this process ends.
    """

    def __init__(
        self,
        rank: int,
        count: int,
        broadcast: Callable[[Any], Any],
        on_loss: Callable[[str, str], None] = lambda reason, sentence: None,
    ):
        self.rank, self.count, self.on_loss = rank, count, on_loss
        self._ended = threading.Event()
        self._store = _open_store(rank, count, broadcast)
        self._store.set(f"beat/{rank}", "0")
        broadcast(None)  # every process has beaten once
        self._thread = threading.Thread(target=self._listen, name="watch", daemon=True)
        self._thread.start()

    def report_failure(self, reason: str, message: str) -> None:
        """This process stops on an error: the others shall stop at once, and say why."""
        try:
            told = [self.rank, reason, f"process {self.rank} stopped: {message}"]
            self._store.set("failed", json.dumps(told))
        except RuntimeError:
            return  # the first process is gone with its store; the others notice by themselves
        time.sleep(2 * BEAT)  # else a first process takes the store along before all have read it

    def disarm(self) -> None:
        """From here on processes may leave."""
        self._ended.set()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _listen(self) -> None:
        beats: dict[int, tuple[bytes, float]] = {}
        count = 0
        while not self._ended.wait(BEAT):
            count += 1
            try:
                heard = self._heard(count, beats)
            except RuntimeError:
                heard = (ProcessLost.reason, "process 0 is gone")
            if heard and not self._ended.is_set():
                self._end(*heard)

    def _heard(self, count: int, beats: dict[int, tuple[bytes, float]]) -> tuple[str, str] | None:
        """Beats, and listens once; returns what is wrong with another process, if anything."""
        self._store.set(f"beat/{self.rank}", str(count))
        if self._store.check(["failed"]):
            rank, reason, sentence = json.loads(self._store.get("failed"))
            return None if rank == self.rank else (reason, sentence)
        now = time.monotonic()
        others = [rank for rank in range(self.count) if rank != self.rank]
        heard = self._store.multi_get([f"beat/{rank}" for rank in others])
        for rank, beat in zip(others, heard, strict=True):
            if rank not in beats or beats[rank][0] != beat:
                beats[rank] = (beat, now)
            elif now - beats[rank][1] > SILENCE:
                return ProcessLost.reason, f"process {rank} has been silent for {SILENCE:.0f} s"
        return None

    def _end(self, reason: str, sentence: str) -> None:
        try:
            print(
                f"flowgrpo: {sentence.rstrip('.')}; process {self.rank} stops, too. Go on with "
                "--resume.",
                file=sys.stderr,
                flush=True,
            )
            sys.stdout.flush()
            note = threading.Thread(target=self.on_loss, args=(reason, sentence), daemon=True)
            note.start()
            note.join(GRACE)  # the disk may be what is gone
        finally:
            os._exit(1)  # the main thread may wait in a collective that nothing can interrupt


@contextmanager
def explain_loss(watch: Watchdog | None) -> Iterator[None]:
    """Around messages between processes: one that fails waits for the watch to say why."""
    try:
        yield
    except RuntimeError as error:
        if watch is not None:
            time.sleep(GRACE)  # the watch ends this process here if another one told its reason
        raise ProcessLost(
            "another process of the run is gone, so this one stops, too; go on with --resume."
        ) from error


def _open_store(rank: int, count: int, broadcast: Callable[[Any], Any]) -> TCPStore:
    host = os.environ.get("MASTER_ADDR", "")
    wait = timedelta(seconds=SILENCE)
    if rank == 0:
        store = TCPStore(host or "localhost", 0, is_master=True, wait_for_workers=False)
        broadcast([host or socket.gethostname(), store.port])
    else:
        place, port = broadcast(None)
        store = TCPStore(place, port, is_master=False, timeout=wait)
    store.set_timeout(wait)
    return store
