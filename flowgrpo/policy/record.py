"""Records a stock pipeline's denoising loop on a tape.

Outside the stochastic window the scheduler's own step counts, bit-equal to the stock pipeline.
Inside it, the next latents are drawn from a Gaussian, which is recorded. Denoiser outputs that a
replay will not compute again are kept.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from flowgrpo.algorithms.sde import SDE_STEPS
from flowgrpo.core.devices import detached_copy
from flowgrpo.pipelines.loop_counter import LoopCounter
from flowgrpo.pipelines.scheduler import position_of, previous_sample, with_previous_sample
from flowgrpo.pipelines.scheduler_checks import check_first_order_step, check_stochastic
from flowgrpo.pipelines.seams import patched_loop
from flowgrpo.policy.tape import NoiseFunction, Step, Tape


@contextmanager
def record(
    pipe: Any,
    models: Mapping[str, nn.Module],
    tape: Tape,
    noise: NoiseFunction,
    *,
    gradients: bool = False,
) -> Iterator[None]:
    """Within the block, a call of `pipe` is written to `tape`.

    Args:
        models: every model whose outputs the loop uses, by name.
        tape: an empty tape.
        noise: draws the noise of window steps.
        gradients: whether autograd is on during denoiser calls of window steps, as in a replay,
            because a compiled denoiser rounds differently without; the graph is dropped at once.

    Raises:
        ValueError: the pipeline has no standard denoising loop, or the window does not fit it.
    """
    recorder = _Recorder(pipe, tape, noise, gradients)
    with patched_loop(pipe.scheduler, models, recorder.step, recorder.forward):
        yield
    recorder.finish()


class _Recorder:
    """The methods that replace those of a loop while it is recorded."""

    def __init__(self, pipe: Any, tape: Tape, noise: NoiseFunction, gradients: bool):
        self.name = type(pipe).__name__
        self.tape, self.noise, self.gradients = tape, noise, gradients
        self.counter = LoopCounter(pipe.scheduler)

    def forward(self, name: str, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A denoiser's forward: runs it, and keeps a copy of the output if a replay needs one."""
        tape, iteration = self.tape, self.counter.iteration
        if self.gradients and iteration in tape.window:
            with torch.enable_grad():
                output = _detached(stock(*args, **kwargs))
        else:
            output = stock(*args, **kwargs)
        tape.recorded_forwards += 1
        if tape.window:
            kept = tape.outputs.setdefault((name, iteration), [])
            # Window steps run again in a replay, and so do calls that return a cache, which belongs
            # to its own run. Nothing after the window is ever replayed.
            runs_again = iteration in tape.window or not _is_plain(output)
            is_after = iteration > max(tape.window)
            kept.append(None if runs_again or is_after else detached_copy(output))
        return output

    def step(
        self,
        scheduler: Any,
        model_output: Tensor,
        timestep: Any,
        sample: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The scheduler's step: the stock step outside the window, a Gaussian draw inside it."""
        tape = self.tape
        index, stream = self.counter.tick(scheduler)
        stock = type(scheduler).step
        result = stock(scheduler, model_output, timestep, sample, *args, **kwargs)
        if not tape.window:
            return result
        step = Step(
            index=index,
            stream=stream,
            position=position_of(scheduler, timestep),
            latents=sample.clone(),
            next_latents=previous_sample(result),
        )
        self._check(step, scheduler, model_output)
        if index in tape.window:
            self._draw(step, scheduler, model_output)
            result = with_previous_sample(result, step.next_latents)
        step.next_latents = step.next_latents.clone()
        tape.steps[step.key] = step
        return result

    def finish(self) -> None:
        """Checks that the finished loop has steps, and that the window fits it."""
        tape, iterations = self.tape, self.counter.iteration
        tape.iterations = iterations
        if not iterations:
            raise ValueError(
                f"{self.name} never calls its scheduler's step, but noise is added there; only "
                "pipelines with a standard denoising loop can be trained."
            )
        if tape.window and max(tape.window) > iterations - 2:
            raise ValueError(
                f"step {max(tape.window)} is in the window, but the loop of {self.name} has "
                f"{iterations} steps and the last is never trained; set sampling.window.last to "
                f"{iterations - 2} at most."
            )

    def _check(self, step: Step, scheduler: Any, model_output: Tensor) -> None:
        """Checks that flowgrpo reads the scheduler's steps correctly."""
        _check_progress(self.name, self.tape.steps.get((step.index - 1, step.stream)), step)
        # A multistep solver has no history in its first step, nor after a window step, which resets
        # it; so these must be the deterministic step. Later steps may be of higher order.
        if step.index == 0 or step.index - 1 in self.tape.window:
            check_first_order_step(
                SDE_STEPS[self.tape.sde],
                scheduler,
                step.position,
                model_output,
                step.latents,
                step.next_latents,
            )

    def _draw(self, step: Step, scheduler: Any, model_output: Tensor) -> None:
        """Draws the next latents of a window step, and records their Gaussian."""
        check_stochastic(step.index, step.position)
        mean, std, velocity = self.tape.transition(step, scheduler, model_output)
        noise = self.noise(step.index, step.stream, step.latents.shape).to(step.latents.device)
        # Rounded before any log-prob is computed: in bf16 the rounding alone would move the ratio.
        step.next_latents = (mean + std * noise).to(step.next_latents.dtype)
        step.mean, step.std = mean.detach(), std
        step.velocity_rms = velocity.detach().float().flatten(1).square().mean(dim=1).sqrt()
        self.counter.reset_solver(scheduler)


def _check_progress(name: str, before: Step | None, step: Step) -> None:
    """Checks that a step starts where the one before ended, except for rounded timesteps."""
    if before is None:
        return
    moved = abs(step.position.sigma - before.position.sigma)
    if moved < 0.5 * abs(before.position.sigma_next - before.position.sigma):
        raise ValueError(
            f"{name} steps twice from sigma {step.position.sigma:.4g}, but each step must start "
            "where the one before ended; if its scheduler is the cause, set model.scheduler to "
            "DDIMScheduler, for example."
        )


def _is_plain(output: Any) -> bool:
    """Whether an output holds nothing but tensors, in tuples or model outputs."""
    return all(isinstance(leaf, Tensor) or leaf is None for leaf in tree_leaves(output))


def _detached(output: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
