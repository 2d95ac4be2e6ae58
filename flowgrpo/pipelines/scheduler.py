"""What a pipeline's own scheduler says and remembers: noise, scale, step counts, a solver's past.

Schedulers mix latents as x = a x0 + s eps, with a and s of their own: flow matching (1 - sigma and
sigma, also counted backwards), variance preserving (sqrt(alpha_bar), sqrt(1 - alpha_bar)) or
exploding (1 and sigma). Divided by their scale a + s they are all flow matching's, with noise
fraction s / (a + s): in these *flow coordinates* the kernels work.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor


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


def position_of(scheduler: Any, timestep: Any) -> Position:
    """The step that the scheduler has just taken, by its own step counter where it has one."""
    if has_sigma_table(scheduler):
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


def flow_coordinates(
    scheduler: Any, model_output: Tensor, latents: Tensor, position: Position
) -> tuple[Tensor, Tensor]:
    """Latents and velocity (eps - x0) in flow coordinates, from what the denoiser predicted.

    Args:
        model_output: (B, ...) velocity, noise, clean latents or v, as the scheduler's config says.
        latents: (B, ...) in the scheduler's own scale.
    """
    prediction = prediction_type(scheduler)
    if prediction == "flow_prediction":
        return latents, -model_output if scheduler.config.get("invert_sigmas") else model_output
    x, output = latents.float(), model_output.float()
    noise = position.sigma * position.scale
    signal = position.scale - noise
    if hasattr(scheduler, "precondition_outputs"):
        denoised = scheduler.precondition_outputs(x, output, noise)
    elif prediction == "epsilon":
        denoised = (x - noise * output) / signal
    elif prediction == "v_prediction":
        power = math.hypot(signal, noise)
        denoised = (signal * x / power - noise * output) / power
    else:
        denoised = output
    return x / position.scale, (x - signal * denoised) / noise - denoised


def previous_sample(result: Any) -> Tensor:
    """The next latents in what a scheduler's step returned: a tuple, or an output object."""
    return result[0] if isinstance(result, tuple) else result.prev_sample


def with_previous_sample(result: Any, latents: Tensor) -> Any:
    """What a scheduler's step returned, with other next latents."""
    if isinstance(result, tuple):
        return (latents, *result[1:])
    result.prev_sample = latents
    return result


def has_sigma_table(scheduler: Any) -> bool:
    """Whether it looks sigmas up by a step counter, rather than alphas_cumprod by timestep."""
    sigmas = getattr(scheduler, "sigmas", None)
    return sigmas is not None and len(sigmas) > 1 and hasattr(type(scheduler), "step_index")


def prediction_type(scheduler: Any) -> str:
    prediction = scheduler.config.get("prediction_type", "flow_prediction")
    if (
        prediction == "flow_prediction"
        and has_sigma_table(scheduler)
        and scheduler.sigmas[0] > 1.001
    ):
        return "epsilon"  # Euler steps dx/dsigma of exploding variance, where sigma has no bound.
    return prediction


def _entry(scheduler: Any, index: int) -> tuple[float, float]:
    """Noise fraction and scale of an entry of the table of sigmas."""
    sigma = float(scheduler.sigmas[index])
    if prediction_type(scheduler) == "flow_prediction":
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
