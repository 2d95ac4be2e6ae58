"""Replays a taped denoising loop with gradients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo.algorithms.sde import Gaussian
from flowgrpo.core.errors import ReplayError
from flowgrpo.pipelines.scheduler import LoopCounter, Position, position_of
from flowgrpo.pipelines.seams import loop_patched
from flowgrpo.policy.tape import (
    Step,
    StepFunction,
    Tape,
    detached_copy,
    step_gaussian,
    with_previous_sample,
)


class _LastStepPlayed(BaseException):
    """Leaves the pipeline's call once nothing is left to train. Not an Exception: no `except
    Exception` inside a pipeline may swallow it."""


@contextmanager
def play(
    pipe: Any,
    denoisers: dict[str, nn.Module],
    tape: Tape,
    on_step: StepFunction,
    *,
    gradients: bool = True,
) -> Iterator[None]:
    """Within the block, a call of `pipe` plays `tape` and hands every window step to `on_step`.

    With `gradients`, autograd is on from a window step's first denoiser call to its scheduler step,
    also under the `no_grad` of the pipeline's own call. `on_step` may run backward: each step
    starts from taped latents, so its graph is its own.

    Raises:
        ReplayError: the schedule or the latents differ from the tape.
    """
    clock = LoopCounter(pipe.scheduler)
    streams = max(stream for _, stream in tape.steps) + 1
    stepped: list[tuple[Step, Gaussian]] = []
    calls: dict[tuple[str, int], int] = {}

    def forward(name: str, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        key = (name, clock.iteration)
        position = calls[key] = calls.get(key, -1) + 1
        kept = tape.outputs.get(key, [])
        if position >= len(kept):
            raise ReplayError(
                f"{name} is called {position + 1} times in step {clock.iteration}, but {len(kept)} "
                "times in the rollout; the loop must not depend on anything but its inputs."
            )
        if kept[position] is not None:
            return detached_copy(kept[position])
        tape.replayed_forwards += 1
        torch.set_grad_enabled(gradients and clock.iteration in tape.window)
        return stock(*args, **kwargs)

    def step(
        scheduler: Any, model_output: Tensor, timestep: Any, sample: Tensor, *a: Any, **k: Any
    ):
        index, stream = clock.tick(scheduler)
        taped = tape.steps[index, stream]
        with torch.no_grad():
            result = type(scheduler).step(scheduler, model_output, timestep, sample, *a, **k)
        _check_replay(pipe, taped, position_of(scheduler, timestep), sample)
        if index in tape.window:
            stepped.append((taped, step_gaussian(tape, taped, scheduler, model_output)))
            if len(stepped) == streams:
                on_step(*_joined(stepped))
                stepped.clear()
                torch.set_grad_enabled(False)
                _detach_state(pipe)
                if index == max(tape.window):
                    raise _LastStepPlayed
        return with_previous_sample(result, taped.next_latents.clone())

    was_enabled = torch.is_grad_enabled()
    try:
        with loop_patched(pipe.scheduler, denoisers, step, forward):
            yield
    except _LastStepPlayed:
        pass
    finally:
        torch.set_grad_enabled(was_enabled)


def _joined(stepped: list[tuple[Step, Gaussian]]) -> tuple[Step, Gaussian]:
    """Latents that are stepped together as one, (B, D), in units of the first one's std: of the
    log-prob that moves a constant, and no ratio."""
    if len(stepped) == 1:
        return stepped[0]
    first, std = stepped[0][0], stepped[0][1].std

    def flat(tensors: list[Tensor]) -> Tensor:
        units = [std / gaussian.std for _, gaussian in stepped]
        parts = [t.float().flatten(1) * u for t, u in zip(tensors, units, strict=True)]
        return torch.cat(parts, dim=1)

    steps = [step for step, _ in stepped]
    joint = replace(
        first,
        latents=flat([step.latents for step in steps]),
        next_latents=flat([step.next_latents for step in steps]),
        mean=flat([step.mean for step in steps if step.mean is not None]),
    )
    return joint, Gaussian(flat([gaussian.mean for _, gaussian in stepped]), std)


def _detach_state(owner: Any, depth: int = 4) -> None:
    """What a pipeline's own objects carry to the next step, as a guider's momentum, is state there:
    no gradient flows back into the step that it came from."""
    if isinstance(owner, (nn.Module, type)) or type(owner).__module__.startswith("transformers"):
        return
    values: Any = owner if isinstance(owner, (dict, list)) else getattr(owner, "__dict__", {})
    for key, value in list(values.items() if isinstance(values, dict) else enumerate(values)):
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                values[key] = value.detach()
        elif depth:
            _detach_state(value, depth - 1)


def _check_replay(pipe: Any, taped: Step, position: Position, sample: Tensor) -> None:
    where = f"{type(pipe).__name__} step {taped.index}"
    if position != taped.position:
        raise ReplayError(
            f"{where} has {position}, but its rollout had {taped.position}; the schedule must not "
            "change between rollout and replay."
        )
    if not torch.equal(sample, taped.latents):
        difference = (sample.float() - taped.latents.float()).abs().max().item()
        raise ReplayError(
            f"{where} starts {difference:.1e} away from its rollout's latents; the loop must not "
            "draw random numbers of its own."
        )
