"""Counts the iterations of a denoising loop, and resets multistep solvers within it."""

from typing import Any


class LoopCounter:
    """Counts the iterations of a loop, which are the steps of the pipeline's own scheduler.

    A pipeline may step a deep copy of the scheduler alongside, for a second stream of latents; its
    steps are counted separately.
    """

    def __init__(self, scheduler: Any):
        self.streams = [scheduler]
        """Schedulers in the order of their first step; index 0 is the pipeline's own."""
        self.counts = [0]
        """Number of steps of each stream."""
        self.fresh_states: dict[int, dict[str, Any]] = {}
        """Solver state of each stream before its first step."""

    @property
    def iteration(self) -> int:
        """Index of the current iteration, from 0."""
        return self.counts[0]

    def tick(self, scheduler: Any) -> tuple[int, int]:
        """Counts a call of `scheduler.step`; returns its (iteration, stream)."""
        stream = self._stream(scheduler)
        if self.counts[stream] == 0:
            self.fresh_states[stream] = _solver_state(scheduler)
        self.counts[stream] += 1
        return self.counts[stream] - 1, stream

    def reset_solver(self, scheduler: Any) -> None:
        """Resets the history of a multistep solver, whose corrector would remove injected noise."""
        stream = self._stream(scheduler)
        vars(scheduler).update(_unshared(self.fresh_states[stream]))

    def _stream(self, scheduler: Any) -> int:
        for stream, known in enumerate(self.streams):
            if known is scheduler:
                return stream
        self.streams.append(scheduler)
        self.counts.append(0)
        return len(self.streams) - 1


def _solver_state(scheduler: Any) -> dict[str, Any]:
    """Returns the attributes of a scheduler, except its counters, which a reset must not move."""
    counters = {"_step_index", "_begin_index", "step"}
    return _unshared({k: v for k, v in vars(scheduler).items() if k not in counters})


def _unshared(state: dict[str, Any]) -> dict[str, Any]:
    """Copies the lists of a state, to which a solver writes in place."""
    return {k: list(v) if isinstance(v, list) else v for k, v in state.items()}
