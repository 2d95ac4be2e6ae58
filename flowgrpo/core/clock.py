"""Wall time by phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Wall time of a run, and seconds per phase since the last lap.

    The time of a nested phase does not count for the phase around it.

    Args:
        before: wall time in seconds of earlier starts of the run.
    """

    def __init__(self, before: float = 0.0):
        self._start = time.perf_counter() - before
        self._phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start, counted = time.perf_counter(), sum(self._phases.values())
        try:
            yield
        finally:
            nested = sum(self._phases.values()) - counted
            elapsed = time.perf_counter() - start - nested
            self._phases[phase] = self._phases.get(phase, 0.0) + elapsed

    def lap(self) -> dict[str, float]:
        """Returns the seconds per phase since the last lap, and starts the next one."""
        phases, self._phases = self._phases, {}
        return {name: round(seconds, 3) for name, seconds in phases.items()}

    @property
    def total(self) -> float:
        """Wall time of the run in seconds, earlier starts included."""
        return time.perf_counter() - self._start
