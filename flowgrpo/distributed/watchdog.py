"""Notices within a minute that another process of the run is gone, and ends this one.

A collective may wait forever for a process that died, and a rollout may take long. So every process
sends heartbeats to a store that rank 0 keeps, and a thread in each checks those of the others.
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

HEARTBEAT_INTERVAL = 1.0
"""Time in seconds between two heartbeats of a process."""


HEARTBEAT_TIMEOUT = 30.0
"""Time in seconds without a heartbeat after which a process counts as dead; it may also hang."""


GRACE_PERIOD = 5.0
"""Time in seconds that a failed collective waits for the watchdog to learn the reason."""

Failure = tuple[str, str]
"""Short name of the reason, and a message."""


class Watchdog:
    """Sends the heartbeats of this process and checks those of the others, in a thread.

    Args:
        rank: index of this process.
        world_size: number of processes.
        broadcast: collective that returns the value of rank 0.
        on_process_lost: called with the reason's short name and a message just before this
            process ends.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        broadcast: Callable[[Any], Any],
        on_process_lost: Callable[[str, str], None] = lambda reason, message: None,
    ):
        self.rank, self.world_size, self.on_process_lost = rank, world_size, on_process_lost
        self._disarmed = threading.Event()
        self._store = _open_store(rank, broadcast)
        self._store.set(f"beat/{rank}", "0")
        broadcast(None)  # multi_get would wait for a process that has never sent a heartbeat
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def report_failure(self, reason: str, message: str) -> None:
        """Makes the other processes stop at once, with the error that stops this one."""
        try:
            failure = [self.rank, reason, f"process {self.rank} stopped: {message}"]
            self._store.set("failed", json.dumps(failure))
        except RuntimeError:
            return  # rank 0 is gone, and its store too: the others notice by themselves
        time.sleep(2 * HEARTBEAT_INTERVAL)  # the store ends with rank 0: let all read it first

    def disarm(self) -> None:
        """Lets other processes end from now on."""
        self._disarmed.set()

    def stop(self) -> None:
        """Disarms the watchdog and waits for its thread."""
        self.disarm()
        self._thread.join()

    def _watch(self) -> None:
        heartbeats: dict[int, tuple[bytes, float]] = {}
        count = 0
        while not self._disarmed.wait(HEARTBEAT_INTERVAL):
            count += 1
            try:
                failure = self._find_failure(count, heartbeats)
            except RuntimeError:
                failure = (ProcessLost.reason, "process 0 is gone")
            if failure and not self._disarmed.is_set():
                self._end(*failure)

    def _find_failure(
        self, count: int, heartbeats: dict[int, tuple[bytes, float]]
    ) -> Failure | None:
        """Sends heartbeat number `count`; returns the failure of another process, if any.

        Args:
            heartbeats: the last heartbeat of each rank and when it was first seen; updated.
        """
        self._store.set(f"beat/{self.rank}", str(count))
        if self._store.check(["failed"]):
            rank, reason, message = json.loads(self._store.get("failed"))
            return None if rank == self.rank else (reason, message)
        now = time.monotonic()
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        latest = self._store.multi_get([f"beat/{rank}" for rank in others])
        for rank, heartbeat in zip(others, latest, strict=True):
            if rank not in heartbeats or heartbeats[rank][0] != heartbeat:
                heartbeats[rank] = (heartbeat, now)
            elif now - heartbeats[rank][1] > HEARTBEAT_TIMEOUT:
                message = f"process {rank} has been silent for {HEARTBEAT_TIMEOUT:.0f} s"
                return ProcessLost.reason, message
        return None

    def _end(self, reason: str, message: str) -> None:
        try:
            print(
                f"flowgrpo: {message.rstrip('.')}; process {self.rank} also stops. Continue with "
                "--resume.",
                file=sys.stderr,
                flush=True,
            )
            sys.stdout.flush()
            callback = threading.Thread(
                target=self.on_process_lost, args=(reason, message), daemon=True
            )
            callback.start()
            callback.join(GRACE_PERIOD)  # it writes to a disk that may be what failed
        finally:
            os._exit(1)  # the main thread may wait in a collective that nothing can interrupt


@contextmanager
def explain_lost_process(watchdog: Watchdog | None) -> Iterator[None]:
    """Raises ProcessLost if a collective in the block fails, unless the watchdog ends the process
    first, with the reason that another process reported."""
    try:
        yield
    except RuntimeError as error:
        if watchdog is not None:
            time.sleep(GRACE_PERIOD)
        raise ProcessLost(
            "another process of the run is gone, so this one also stops; continue with --resume."
        ) from error


def _open_store(rank: int, broadcast: Callable[[Any], Any]) -> TCPStore:
    """Opens the store of rank 0, whose host and port are broadcast."""
    host = os.environ.get("MASTER_ADDR", "")
    timeout = timedelta(seconds=HEARTBEAT_TIMEOUT)
    if rank == 0:
        store = TCPStore(host or "localhost", 0, is_master=True, wait_for_workers=False)
        broadcast([host or socket.gethostname(), store.port])
    else:
        main_host, port = broadcast(None)
        store = TCPStore(main_host, port, is_master=False, timeout=timeout)
    store.set_timeout(timeout)
    return store
