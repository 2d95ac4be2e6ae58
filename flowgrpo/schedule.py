"""What a pipeline's own scheduler says and remembers: sigmas, step counts, a solver's past."""

from typing import Any


def check_scheduler(scheduler: Any) -> None:
    """Refuses a scheduler whose steps the kernels do not describe.

    Raises:
        ValueError: it is no first-order flow-matching scheduler from sigma 1 to 0 that predicts
            velocity, or it draws noise of its own.
    """
    config = scheduler.config
    velocity = config.get("prediction_type", "flow_prediction") == "flow_prediction"
    flow = not hasattr(scheduler, "alphas_cumprod") or config.get("use_flow_sigmas", False)
    odd = [name for name in ("invert_sigmas", "stochastic_sampling") if config.get(name, False)]
    first_order = getattr(scheduler, "order", 1) == 1
    if not (velocity and flow and first_order and hasattr(scheduler, "sigmas")) or odd:
        raise ValueError(
            f"scheduler is {' with '.join([type(scheduler).__name__, *odd])}, but must be a "
            "first-order flow-matching one from sigma 1 to 0; use a pipeline that has one."
        )


def check_stochastic(index: int, sigma: float, sigma_next: float) -> None:
    """Raises ValueError where a step of the window cannot be stochastic, as the last one."""
    if not 0 < sigma_next < sigma <= 1:
        raise ValueError(
            f"step {index} goes from sigma {sigma:.4g} to {sigma_next:.4g}, but a "
            "stochastic step must fall within (0, 1] and the last step is always deterministic; "
            "use an earlier window or another scheduler."
        )


def position_of(scheduler: Any, timestep: Any) -> dict[str, Any]:
    """Sigmas of the step that the scheduler has just taken, by its own step counter."""
    index = scheduler.step_index - 1
    return {
        "sigma": float(scheduler.sigmas[index]),
        "sigma_next": float(scheduler.sigmas[index + 1]),
        "timestep": float(timestep),
    }


class LoopClock:
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

    def refresh(self, scheduler: Any) -> None:
        """A multistep solver forgets its past, so that it does not correct injected noise away."""
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
