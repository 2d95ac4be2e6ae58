"""SIGTERM and SIGINT end a run at a point where no work is lost; a second one ends it at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class InterruptRequest:
    """The signal that requested a stop, if any."""

    def __init__(self) -> None:
        self.signal = 0
        """Its number; 0 as long as there is none."""

    @property
    def is_set(self) -> bool:
        return self.signal != 0

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Within the block a first signal is recorded, and a second one acts as it did before.

        Does nothing outside the main thread, which is the only one that Python gives signals to.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.signal = 0
        found = {number: signal.getsignal(number) for number in SIGNALS}
        before = {number: handler or signal.SIG_DFL for number, handler in found.items()}

        def record(number: int, frame: FrameType | None) -> None:
            self.signal = number
            for each, handler in before.items():
                signal.signal(each, handler)

        for number in SIGNALS:
            signal.signal(number, record)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
