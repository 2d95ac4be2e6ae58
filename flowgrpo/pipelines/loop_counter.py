"""Counts the iterations of a denoising loop, and resets multistep solvers within it."""

from typing import Any


class LoopCounter:
    """Counts loop iterations: the steps of the pipeline's own scheduler. A deep copy of it that a
    pipeline steps alongside (a second stream of latents) is counted by itself."""

    def __init__(self, scheduler: Any):
        self.streams = [scheduler]
        self.counts = [0]
        self.fresh_states: dict[int, dict[str, Any]] = {}

    @property
    def iteration(self) -> int:
        return self.counts[0]

    def tick(self, scheduler: Any) -> tuple[int, int]:
        """(iteration, stream) of this call of step."""
        stream = self._stream(scheduler)
        if self.counts[stream] == 0:
            self.fresh_states[stream] = _solver_state(scheduler)
        self.counts[stream] += 1
        return self.counts[stream] - 1, stream

    def reset_solver(self, scheduler: Any) -> None:
        """Makes a multistep solver forget its past: its corrector would remove injected noise."""
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
    """What a scheduler remembers, without its counters: they move on."""
    counters = {"_step_index", "_begin_index", "step"}
    return _unshared({k: v for k, v in vars(scheduler).items() if k not in counters})


def _unshared(state: dict[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, list) else v for k, v in state.items()}
