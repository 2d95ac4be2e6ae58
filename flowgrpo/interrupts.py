"""SIGTERM and SIGINT end a run where nothing is lost; a second one ends it at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(SystemExit):
    """A run that was asked to stop, and has saved what it had. Its code is 128 + the signal's."""

    together = True
    """All processes leave at the same point."""

    def __init__(self, signal_number: int, message: str):
        super().__init__(128 + signal_number)
        self.message = message

    def __str__(self) -> str:
        return self.message


class Request:
    """The signal that asked to stop, 0 as long as there is none."""

    def __init__(self) -> None:
        self.signal = 0

    @property
    def made(self) -> bool:
        return self.signal != 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within the block signals are noted; in another than the main thread there is nothing to
        note, since Python gives signals to that one."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.signal = 0
        found = {number: signal.getsignal(number) for number in SIGNALS}
        before = {number: handler or signal.SIG_DFL for number, handler in found.items()}

        def note(number: int, frame: FrameType | None) -> None:
            self.signal = number
            for each, handler in before.items():
                signal.signal(each, handler)

        for number in SIGNALS:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
