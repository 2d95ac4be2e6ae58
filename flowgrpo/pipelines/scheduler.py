"""What a pipeline's own scheduler says and remembers: noise, scale, step counts, a solver's past.

Schedulers mix latents as x = a x0 + s eps, with a and s of their own: flow matching (1 - sigma and
sigma, also counted backwards), variance preserving (sqrt(alpha_bar), sqrt(1 - alpha_bar)) or
exploding (1 and sigma). Divided by their scale a + s they are all flow matching's, with noise
fraction s / (a + s): in these *flow coordinates* the kernels work.
"""

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowgrpo.algorithms.sde import SDEStep


@dataclass(kw_only=True, frozen=True)
class Position:
    """Where one step of a scheduler starts and ends, in flow coordinates."""

    sigma: float
    """Noise fraction in [0, 1]; 1 is pure noise."""
    sigma_next: float
    scale: float
    """a + s of the latents that the step starts from; 1 for flow matching."""
    scale_next: float
    timestep: float
    """What the denoiser is told, in the scheduler's own unit."""


def check_scheduler(scheduler: Any) -> None:
    """Refuses a scheduler whose steps cannot be taped; `check_first_step` refuses the rest.

    Raises:
        ValueError: its step is not step(model_output, timestep, sample), or calls the denoiser more
            than once.
    """
    name = type(scheduler).__name__
    arguments = list(inspect.signature(type(scheduler).step).parameters)[1:4]
    if arguments != ["model_output", "timestep", "sample"] or not _is_known(scheduler):
        raise ValueError(
            f"scheduler is {name}, but its steps cannot be read; use one with sigmas or "
            "alphas_cumprod whose step takes model_output, timestep and sample."
        )
    if getattr(scheduler, "order", 1) != 1:
        raise ValueError(
            f"scheduler is {name}, but must be of the first order or multistep; it has order "
            f"{scheduler.order}: several denoiser calls make one step."
        )


def check_stochastic(index: int, position: Position) -> None:
    """Raises ValueError where a step of the window cannot be stochastic, as the last one."""
    if not 0 < position.sigma_next < position.sigma <= 1:
        raise ValueError(
            f"step {index} goes from sigma {position.sigma:.4g} to {position.sigma_next:.4g}, but "
            "a stochastic step must fall within (0, 1] and the last step is always deterministic; "
            "set sampling.window.last to an earlier step."
        )


def check_first_step(
    kernel: SDEStep,
    scheduler: Any,
    position: Position,
    model_output: Tensor,
    latents: Tensor,
    result: Tensor,
) -> None:
    """Proves that the scheduler is read rightly: its first step must be the kernel's without noise.

    A multistep solver has no past there, so every deterministic scheduler takes the ODE's step.

    Raises:
        ValueError: it does not; it draws noise of its own, or has a parametrisation of its own.
    """
    x, velocity = flow_coordinates(scheduler, model_output, latents, position)
    expected = kernel(x, velocity, position.sigma, position.sigma_next, 0.0, 0.0).mean
    off = _rms(expected * position.scale_next - result.float())
    moved = _rms(result.float() - latents.float())
    rounding = torch.finfo(result.dtype).eps * max(_rms(latents.float()), _rms(result.float()))
    if result.isfinite().all() and not off <= 0.05 * moved + rounding:
        raise ValueError(
            f"scheduler is {type(scheduler).__name__}, but its first step is {off:.1e} away from "
            "the deterministic one: it draws noise of its own, clips, or is of another kind; set "
            "model.scheduler to DDIMScheduler or EulerDiscreteScheduler, say, and "
            "model.scheduler_kwargs to {clip_sample: false} if it clips."
        )


def position_of(scheduler: Any, timestep: Any) -> Position:
    """The step that the scheduler has just taken, by its own step counter where it has one."""
    if _has_table(scheduler):
        index = scheduler.step_index - 1
        (sigma, scale), (sigma_next, scale_next) = (
            _entry(scheduler, i) for i in (index, index + 1)
        )
    else:
        sigma, scale = _at(scheduler, int(timestep))
        sigma_next, scale_next = _at(scheduler, _previous(scheduler, int(timestep)))
    return Position(
        sigma=sigma,
        sigma_next=sigma_next,
        scale=scale,
        scale_next=scale_next,
        timestep=float(timestep),
    )


def second_sigma(scheduler: Any) -> float:
    """Noise fraction of the schedule's second entry."""
    if _has_table(scheduler):
        return _entry(scheduler, 1)[0]
    return _at(scheduler, int(scheduler.timesteps[1]))[0]


def flow_coordinates(
    scheduler: Any, model_output: Tensor, latents: Tensor, position: Position
) -> tuple[Tensor, Tensor]:
    """Latents and velocity (eps - x0) in flow coordinates, from what the denoiser predicted.

    Args:
        model_output: (B, ...) velocity, noise, clean latents or v, as the scheduler's config says.
        latents: (B, ...) in the scheduler's own scale.
    """
    kind = _prediction_type(scheduler)
    if kind == "flow_prediction":
        return latents, -model_output if scheduler.config.get("invert_sigmas") else model_output
    x, output = latents.float(), model_output.float()
    noise = position.sigma * position.scale
    signal = position.scale - noise
    if hasattr(scheduler, "precondition_outputs"):
        denoised = scheduler.precondition_outputs(x, output, noise)
    elif kind == "epsilon":
        denoised = (x - noise * output) / signal
    elif kind == "v_prediction":
        power = math.hypot(signal, noise)
        denoised = (signal * x / power - noise * output) / power
    else:
        denoised = output
    return x / position.scale, (x - signal * denoised) / noise - denoised


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


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _has_table(scheduler: Any) -> bool:
    """Whether it looks sigmas up by a step counter, rather than alphas_cumprod by timestep."""
    sigmas = getattr(scheduler, "sigmas", None)
    return sigmas is not None and len(sigmas) > 1 and hasattr(type(scheduler), "step_index")


def _is_known(scheduler: Any) -> bool:
    kinds = ("flow_prediction", "epsilon", "v_prediction", "sample")
    readable = _has_table(scheduler) or hasattr(scheduler, "alphas_cumprod")
    return readable and _prediction_type(scheduler) in kinds


def _prediction_type(scheduler: Any) -> str:
    kind = scheduler.config.get("prediction_type", "flow_prediction")
    if kind == "flow_prediction" and _has_table(scheduler) and scheduler.sigmas[0] > 1.001:
        return "epsilon"  # Euler steps dx/dsigma of exploding variance, where sigma has no bound.
    return kind


def _entry(scheduler: Any, index: int) -> tuple[float, float]:
    """Noise fraction and scale of an entry of the table of sigmas."""
    sigma = float(scheduler.sigmas[index])
    if _prediction_type(scheduler) == "flow_prediction":
        return (1 - sigma if scheduler.config.get("invert_sigmas") else sigma), 1.0
    signal, noise = 1.0, sigma
    if hasattr(scheduler, "_sigma_to_alpha_sigma_t"):
        signal, noise = map(float, scheduler._sigma_to_alpha_sigma_t(scheduler.sigmas[index]))
    return noise / (signal + noise), signal + noise


def _at(scheduler: Any, timestep: int) -> tuple[float, float]:
    """Noise fraction and scale at a timestep of a variance-preserving scheduler."""
    end = getattr(scheduler, "final_alpha_cumprod", 1.0)
    alpha = float(scheduler.alphas_cumprod[timestep] if timestep >= 0 else end)
    signal, noise = math.sqrt(alpha), math.sqrt(1 - alpha)
    return noise / (signal + noise), signal + noise


def _previous(scheduler: Any, timestep: int) -> int:
    if hasattr(scheduler, "previous_timestep"):
        return int(scheduler.previous_timestep(timestep))
    return timestep - scheduler.config.num_train_timesteps // scheduler.num_inference_steps


def _solver_state(scheduler: Any) -> dict[str, Any]:
    """What a scheduler remembers, without its counters: they move on."""
    counters = {"_step_index", "_begin_index", "step"}
    return _unshared({k: v for k, v in vars(scheduler).items() if k not in counters})


def _unshared(state: dict[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, list) else v for k, v in state.items()}
