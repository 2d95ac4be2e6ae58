"""Records a stock pipeline's denoising loop on a tape."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from flowgrpo.algorithms.sde import SDE_STEPS
from flowgrpo.pipelines.scheduler import (
    LoopCounter,
    check_first_step,
    check_stochastic,
    flow_coordinates,
    position_of,
)
from flowgrpo.pipelines.seams import loop_patched
from flowgrpo.policy.tape import (
    NoiseFunction,
    Step,
    Tape,
    detached_copy,
    previous_sample,
    step_gaussian,
    with_previous_sample,
)


@contextmanager
def record(
    pipe: Any,
    denoisers: dict[str, nn.Module],
    tape: Tape,
    noise: NoiseFunction,
    *,
    gradients: bool = False,
) -> Iterator[None]:
    """Within the block, a call of `pipe` is written to `tape`.

    With `gradients`, autograd is on during a window step's denoiser calls, as in play, and what
    they keep for it is dropped at once: a compiled denoiser rounds otherwise without.
    """
    clock = LoopCounter(pipe.scheduler)

    def forward(name: str, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if gradients and clock.iteration in tape.window:
            with torch.enable_grad():
                output = _detached(stock(*args, **kwargs))
        else:
            output = stock(*args, **kwargs)
        tape.recorded_forwards += 1
        if tape.window:
            kept = tape.outputs.setdefault((name, clock.iteration), [])
            # A window step runs again in play, and so do calls that hand out caches. What comes
            # after the window is never played.
            rerun = clock.iteration in tape.window or not _is_plain(output)
            over = clock.iteration > max(tape.window)
            kept.append(None if rerun or over else detached_copy(output))
        return output

    def step(
        scheduler: Any, model_output: Tensor, timestep: Any, sample: Tensor, *a: Any, **k: Any
    ):
        index, stream = clock.tick(scheduler)
        result = type(scheduler).step(scheduler, model_output, timestep, sample, *a, **k)
        if not tape.window:
            return result
        taped = Step(
            index=index,
            stream=stream,
            position=position_of(scheduler, timestep),
            latents=sample.clone(),
            next_latents=previous_sample(result),
        )
        _check_schedule(pipe, tape, taped)
        if index == 0 or index - 1 in tape.window:  # a solver has no past there
            check_first_step(
                SDE_STEPS[tape.sde],
                scheduler,
                taped.position,
                model_output,
                sample,
                taped.next_latents,
            )
        if index in tape.window:
            check_stochastic(index, taped.position)
            gaussian = step_gaussian(tape, taped, scheduler, model_output)
            drawn = gaussian.mean + gaussian.std * noise(index, stream, sample.shape).to(
                sample.device
            )
            # Rounded before its log-prob is taken: in bf16 the rounding alone would move the ratio.
            taped.next_latents = drawn.to(taped.next_latents.dtype)
            taped.mean, taped.std = gaussian.mean.detach(), gaussian.std
            taped.velocity_rms = _velocity_rms(scheduler, taped, model_output)
            clock.refresh(scheduler)
            result = with_previous_sample(result, taped.next_latents)
        taped.next_latents = taped.next_latents.clone()
        tape.steps[index, stream] = taped
        return result

    with loop_patched(pipe.scheduler, denoisers, step, forward):
        yield
    tape.iterations = clock.iteration
    if not clock.iteration:
        raise ValueError(
            f"{type(pipe).__name__} never calls its scheduler's step, but that is where noise "
            "goes; only pipelines with a standard denoising loop can be trained."
        )
    if tape.window and max(tape.window) > clock.iteration - 2:
        raise ValueError(
            f"step {max(tape.window)} is in the window, but the loop of {type(pipe).__name__} has "
            f"{clock.iteration} steps and the last is never trained; set sampling.window.last to "
            f"{clock.iteration - 2} at most."
        )


def _velocity_rms(scheduler: Any, taped: Step, model_output: Tensor) -> Tensor:
    _, velocity = flow_coordinates(scheduler, model_output, taped.latents, taped.position)
    return velocity.detach().float().flatten(1).square().mean(dim=1).sqrt()


def _check_schedule(pipe: Any, tape: Tape, taped: Step) -> None:
    """Each step must go on from where the one before ended, but for timesteps that are rounded."""
    before = tape.steps.get((taped.index - 1, taped.stream))
    if before is None:
        return
    moved = abs(taped.position.sigma - before.position.sigma)
    if moved < 0.5 * abs(before.position.sigma_next - before.position.sigma):
        raise ValueError(
            f"{type(pipe).__name__} steps twice from sigma {taped.position.sigma:.4g}, but must go "
            "on from step to step; set model.scheduler to DDIMScheduler, say, if its scheduler is "
            "the cause."
        )


def _is_plain(output: Any) -> bool:
    """Only tensors, in tuples or model outputs; a cache object must be made anew in play."""
    leaves: list[Any] = []
    tree_map(leaves.append, output)
    return all(isinstance(leaf, Tensor) or leaf is None for leaf in leaves)


def _detached(output: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
