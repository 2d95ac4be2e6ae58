"""The seams: record a stock pipeline's denoising loop, and play it again with gradients.

The pipeline is the policy and stays as it is. For the duration of one call two methods are replaced
on its *instances*, the scheduler's `step` and each denoiser's `forward`, and put back afterwards:

- recording: outside the stochastic window the scheduler's own step decides (bit-equal to the stock
  pipeline); inside it, one Gaussian step is drawn and written down. Denoiser outputs are kept.
- playing: the whole loop runs again on the taped latents. In the window the denoiser really runs,
  with gradients, and the Gaussian of that step goes to the caller; elsewhere the taped output
  stands in.
  The call is left after the last window step, since nothing later is trained.

So guidance, embeddings, packing and loop counters are the pipeline's own code in training too.
Letters in shapes: B images of a micro-batch, `...` the pipeline's own latent layout.
"""

import functools
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from flowgrpo.kernels import KERNELS, Gaussian
from flowgrpo.placement import moved
from flowgrpo.schedule import (
    LoopClock,
    Position,
    check_first_step,
    check_stochastic,
    flow_coordinates,
    position_of,
    second_sigma,
)
from flowgrpo.sharding import is_sharded

NoiseFunction = Callable[[int, int, torch.Size], Tensor]
"""(step, stream, shape of the latents) -> standard normal noise, float32."""

StepFunction = Callable[["Step", Gaussian], None]
"""Called in play for each window step, with the taped step and the current weights' Gaussian; where
several latents are stepped together, both hold them all (B, D)."""


@dataclass(kw_only=True)
class Step:
    """What happened in one step of the loop, for one stream of latents."""

    index: int
    """Iteration of the loop, from 0."""
    stream: int
    """Which latents, where a pipeline steps several together; 0 for its own scheduler's."""
    position: Position
    latents: Tensor
    """(B, ...) what the step started from."""
    next_latents: Tensor
    """(B, ...) what it gave, in the pipeline's dtype."""
    mean: Tensor | None = None
    """(B, ...) float32 centre of the Gaussian; None outside the window."""
    std: float = 0.0
    velocity_rms: Tensor | None = None
    """(B,) root mean square of the velocity, in the window."""

    def to(self, device: torch.device) -> "Step":
        return replace(self, **moved(vars(self), device))

    @property
    def key(self) -> tuple[int, int]:
        return self.index, self.stream


@dataclass(kw_only=True)
class Tape:
    """A recorded run of one pipeline call over B images of one prompt."""

    kind: str
    noise_level: float
    window: Collection[int]
    """Steps that are stochastic, and trained; empty for a run of the stock sampler."""
    steps: dict[tuple[int, int], Step] = field(default_factory=dict)
    """By (iteration, stream); stream 0 is the pipeline's own scheduler."""
    outputs: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    """Denoiser outputs by (module name, iteration), in order of call."""

    iterations: int = 0
    """Of the pipeline's loop."""
    recorded_forwards: int = 0
    replayed_forwards: int = 0
    """Denoiser calls that really ran, over all plays."""

    def to(self, device: torch.device | str) -> "Tape":
        """The same tape with its tensors on `device`; what is there already is shared."""
        place = torch.device(device)
        steps = {key: step.to(place) for key, step in self.steps.items()}
        return replace(self, steps=steps, outputs=moved(self.outputs, place))

    @property
    def window_steps(self) -> list[Step]:
        return [step for (index, _), step in sorted(self.steps.items()) if index in self.window]


class ReplayError(RuntimeError):
    """The loop did not play back as it was recorded; training on it would be biased."""

    reason = "replay"


class _LastStepPlayed(BaseException):
    """Leaves the pipeline's call once nothing is left to train. Not an Exception: no `except
    Exception` inside a pipeline may swallow it."""


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
    clock = LoopClock(pipe.scheduler)

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
            kept.append(None if rerun or over else _copy(output))
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
            next_latents=_previous_sample(result),
        )
        _check_schedule(pipe, tape, taped)
        if index == 0 or index - 1 in tape.window:  # a solver has no past there
            check_first_step(
                KERNELS[tape.kind],
                scheduler,
                taped.position,
                model_output,
                sample,
                taped.next_latents,
            )
        if index in tape.window:
            check_stochastic(index, taped.position)
            gaussian = _gaussian(tape, taped, scheduler, model_output)
            drawn = gaussian.mean + gaussian.std * noise(index, stream, sample.shape).to(
                sample.device
            )
            # Rounded before its log-prob is taken: in bf16 the rounding alone would move the ratio.
            taped.next_latents = drawn.to(taped.next_latents.dtype)
            taped.mean, taped.std = gaussian.mean.detach(), gaussian.std
            taped.velocity_rms = _velocity_rms(scheduler, taped, model_output)
            clock.refresh(scheduler)
            result = _with_previous_sample(result, taped.next_latents)
        taped.next_latents = taped.next_latents.clone()
        tape.steps[index, stream] = taped
        return result

    with _installed(pipe.scheduler, denoisers, step, forward):
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
    clock = LoopClock(pipe.scheduler)
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
            return _copy(kept[position])
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
            stepped.append((taped, _gaussian(tape, taped, scheduler, model_output)))
            if len(stepped) == streams:
                on_step(*_joined(stepped))
                stepped.clear()
                torch.set_grad_enabled(False)
                _detach_state(pipe)
                if index == max(tape.window):
                    raise _LastStepPlayed
        return _with_previous_sample(result, taped.next_latents.clone())

    was_enabled = torch.is_grad_enabled()
    try:
        with _installed(pipe.scheduler, denoisers, step, forward):
            yield
    except _LastStepPlayed:
        pass
    finally:
        torch.set_grad_enabled(was_enabled)


@contextmanager
def _installed(
    scheduler: Any, denoisers: dict[str, nn.Module], step: Callable, forward: Callable
) -> Iterator[None]:
    """`step` and `forward` stand in for the stock methods, on these instances only."""
    # A bound method, not a closure: deepcopy of the scheduler rebinds it to the copy. `wraps` keeps
    # the signature, which pipelines inspect.
    wrapped = functools.wraps(type(scheduler).step)(step)
    with ExitStack() as stack:
        stack.enter_context(swapped(scheduler, "step", types.MethodType(wrapped, scheduler)))
        for name, module in denoisers.items():
            # Above the hooks of a sharded module: a taped output must gather nothing.
            seam = "_call_impl" if is_sharded(module) else "forward"
            stock = getattr(module, seam)
            taped = functools.wraps(stock)(partial(forward, name, stock))
            stack.enter_context(swapped(module, seam, taped))
        yield


@contextmanager
def swapped(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    """Within the block `owner.attribute` is `value`; afterwards the instance is as it was."""
    absent = object()
    before = vars(owner).get(attribute, absent)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        if before is absent:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, before)


def _gaussian(tape: Tape, taped: Step, scheduler: Any, model_output: Tensor) -> Gaussian:
    at = taped.position
    x, velocity = flow_coordinates(scheduler, model_output, taped.latents, at)
    mean, std = KERNELS[tape.kind](
        x, velocity, at.sigma, at.sigma_next, second_sigma(scheduler), tape.noise_level
    )
    return Gaussian(mean * at.scale_next, std * at.scale_next)


def _velocity_rms(scheduler: Any, taped: Step, model_output: Tensor) -> Tensor:
    _, velocity = flow_coordinates(scheduler, model_output, taped.latents, taped.position)
    return velocity.detach().float().flatten(1).square().mean(dim=1).sqrt()


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


def _previous_sample(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result.prev_sample


def _with_previous_sample(result: Any, latents: Tensor) -> Any:
    if isinstance(result, tuple):
        return (latents, *result[1:])
    result.prev_sample = latents
    return result


def _is_plain(output: Any) -> bool:
    """Only tensors, in tuples or model outputs; a cache object must be made anew in play."""
    leaves: list[Any] = []
    tree_map(leaves.append, output)
    return all(isinstance(leaf, Tensor) or leaf is None for leaf in leaves)


def _detached(output: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)


def _copy(output: Any) -> Any:
    return tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, output
    )
