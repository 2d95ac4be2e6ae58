"""Replays a taped denoising loop with gradients.

The stock pipeline's loop runs again on the taped latents. In the window the denoiser runs, and the
step's Gaussian is passed to the caller; elsewhere the taped output replaces it. The call is left
after the last window step, since nothing later is trained. So guidance, embeddings, packing and
loop counters are the pipeline's own code in training too.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo.core.devices import detached_copy
from flowgrpo.core.errors import ReplayError
from flowgrpo.pipelines.loop_counter import LoopCounter
from flowgrpo.pipelines.scheduler import Position, position_of, with_previous_sample
from flowgrpo.pipelines.seams import patched_loop
from flowgrpo.policy.tape import Step, StepFunction, Tape, Transition


@contextmanager
def play(
    pipe: Any,
    models: Mapping[str, nn.Module],
    tape: Tape,
    on_step: StepFunction,
    *,
    gradients: bool = True,
) -> Iterator[None]:
    """Within the block, a call of `pipe` replays `tape` and passes every window step to `on_step`.

    Args:
        models: the models of the recording, by name.
        on_step: may run backward. Each step starts from taped latents, so its graph is separate.
        gradients: whether autograd is on from a window step's first denoiser call to its scheduler
            step, although the pipeline's call runs under `no_grad`.

    Raises:
        ReplayError: the schedule or the latents differ from the tape.
    """
    player = _Player(pipe, tape, on_step, gradients)
    was_enabled = torch.is_grad_enabled()
    try:
        with patched_loop(pipe.scheduler, models, player.step, player.forward):
            yield
    except _LastStepPlayed:
        pass
    finally:
        torch.set_grad_enabled(was_enabled)


class _LastStepPlayed(BaseException):
    """Leaves the pipeline's call once nothing is left to train. Not an Exception, so that no
    `except Exception` in a pipeline swallows it."""


class _Player:
    """The methods that replace those of a loop while it is replayed."""

    def __init__(self, pipe: Any, tape: Tape, on_step: StepFunction, gradients: bool):
        self.pipe, self.tape, self.on_step, self.gradients = pipe, tape, on_step, gradients
        self.counter = LoopCounter(pipe.scheduler)
        self.num_streams = max(stream for _, stream in tape.steps) + 1
        self.stepped: list[tuple[Step, Transition]] = []
        """Streams of the current window step that have been stepped so far."""
        self.calls: dict[tuple[str, int], int] = {}
        """Number of denoiser calls so far, by (module name, iteration)."""

    def forward(self, name: str, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A denoiser's forward: runs in the window; elsewhere returns the taped output."""
        tape, iteration = self.tape, self.counter.iteration
        kept = tape.outputs.get((name, iteration), [])
        number = self.calls.get((name, iteration), 0)
        self.calls[name, iteration] = number + 1
        if number >= len(kept):
            raise ReplayError(
                f"{name} is called {number + 1} times in step {iteration}, but {len(kept)} times "
                "in its rollout; the loop must depend on nothing but its inputs."
            )
        if kept[number] is not None:
            return detached_copy(kept[number])
        tape.replayed_forwards += 1
        # Switched on here and off in `_hand_over`, not just for this call: what the pipeline does
        # in between (guidance, rescaling) must be part of the graph, but runs under no_grad.
        torch.set_grad_enabled(self.gradients and iteration in tape.window)
        return stock(*args, **kwargs)

    def step(
        self,
        scheduler: Any,
        model_output: Tensor,
        timestep: Any,
        sample: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The scheduler's step: advances its counters, and returns the taped next latents."""
        tape = self.tape
        index, stream = self.counter.tick(scheduler)
        taped = tape.steps[index, stream]
        with torch.no_grad():
            stock = type(scheduler).step
            result = stock(scheduler, model_output, timestep, sample, *args, **kwargs)
        self._check(taped, position_of(scheduler, timestep), sample)
        if index in tape.window:
            self.stepped.append((taped, tape.transition(taped, scheduler, model_output)))
            if len(self.stepped) == self.num_streams:
                self._hand_over(index)
        return with_previous_sample(result, taped.next_latents.clone())

    def _hand_over(self, index: int) -> None:
        """Passes a complete window step to `on_step`, and ends its graph."""
        self.on_step(*_joined(self.stepped))
        self.stepped.clear()
        torch.set_grad_enabled(False)
        _detach_state(self.pipe)
        if index == max(self.tape.window):
            raise _LastStepPlayed

    def _check(self, taped: Step, position: Position, sample: Tensor) -> None:
        """Checks that a step has the schedule and the latents of its rollout."""
        where = f"{type(self.pipe).__name__} step {taped.index}"
        if position != taped.position:
            raise ReplayError(
                f"{where} has {position}, but its rollout had {taped.position}; the schedule must "
                "not change between rollout and replay."
            )
        if not torch.equal(sample, taped.latents):
            difference = (sample.float() - taped.latents.float()).abs().max().item()
            raise ReplayError(
                f"{where} starts {difference:.1e} away from its rollout's latents; the loop must "
                "not draw random numbers of its own."
            )


def _joined(stepped: list[tuple[Step, Transition]]) -> tuple[Step, Transition]:
    """Joins streams that are stepped together, for example video and audio, into one step (B, D).

    Every stream is scaled to the std of the first, so that a single std holds for all: this shifts
    the log-prob by a constant, which cancels in ratios.
    """
    if len(stepped) == 1:
        return stepped[0]
    steps = [step for step, _ in stepped]
    transitions = [transition for _, transition in stepped]
    std = transitions[0].std
    scales = [std / transition.std for transition in transitions]

    def flat(tensors: list[Tensor], factors: list[float]) -> Tensor:
        parts = [t.float().flatten(1) * f for t, f in zip(tensors, factors, strict=True)]
        return torch.cat(parts, dim=1)

    joint = replace(
        steps[0],
        latents=flat([step.latents for step in steps], scales),
        next_latents=flat([step.next_latents for step in steps], scales),
        mean=flat([step.mean for step in steps if step.mean is not None], scales),
    )
    mean = flat([transition.mean for transition in transitions], scales)
    velocity = flat([transition.velocity for transition in transitions], [1.0] * len(scales))
    return joint, Transition(mean, std, velocity)


def _detach_state(owner: Any, depth: int = 4) -> None:
    """Detaches tensors that a pipeline's own objects carry to the next step, such as a guider's
    momentum: no gradient can flow back into the step they come from, whose graph is gone.
    """
    if isinstance(owner, (nn.Module, type)) or type(owner).__module__.startswith("transformers"):
        return
    values: Any = owner if isinstance(owner, (dict, list)) else getattr(owner, "__dict__", {})
    for key, value in list(values.items() if isinstance(values, dict) else enumerate(values)):
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                values[key] = value.detach()
        elif depth:
            _detach_state(value, depth - 1)
