"""SIGTERM and SIGINT end a run where nothing is lost; a second one ends it at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class InterruptRequest:
    """The signal that asked to stop, 0 as long as there is none."""

    def __init__(self) -> None:
        self.signal = 0

    @property
    def made(self) -> bool:
        return self.signal != 0

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
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
