"""Wall time by phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Wall time of a run, and seconds by phase since the last lap; a phase within a phase counts
    for itself alone."""

    def __init__(self, before: float = 0.0):
        """`before` are the seconds of earlier starts of the run."""
        self._start = time.perf_counter() - before
        self._phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start, inner = time.perf_counter(), sum(self._phases.values())
        try:
            yield
        finally:
            within = sum(self._phases.values()) - inner
            elapsed = time.perf_counter() - start - within
            self._phases[phase] = self._phases.get(phase, 0.0) + elapsed

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last lap."""
        phases, self._phases = self._phases, {}
        return {name: round(seconds, 3) for name, seconds in phases.items()}

    @property
    def total(self) -> float:
        return time.perf_counter() - self._start
