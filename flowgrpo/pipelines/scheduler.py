"""Reads the steps of diffusers' schedulers in one common parametrisation.

Schedulers mix latents as x = a x0 + s eps, with signal a and noise s of their own:

- flow matching: a = 1 - sigma and s = sigma; some count sigma backwards,
- variance preserving: a = sqrt(alpha_bar) and s = sqrt(1 - alpha_bar),
- variance exploding: a = 1 and s = sigma, which is not bounded by 1.

Divided by their scale a + s, all of them are flow matching with noise fraction s / (a + s). The SDE
steps work in these *flow coordinates*.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(kw_only=True, frozen=True)
class Position:
    """Start and end of one scheduler step, in flow coordinates."""

    sigma: float
    """Noise fraction in [0, 1] before the step; 1 is pure noise."""
    sigma_next: float
    """Noise fraction in [0, 1] after the step."""
    scale: float
    """a + s of the latents before the step; 1 for flow matching."""
    scale_next: float
    """a + s of the latents after the step."""
    timestep: float
    """Timestep that the denoiser is conditioned on, in the scheduler's own unit."""


def position_of(scheduler: Any, timestep: Any) -> Position:
    """Returns the position of the step that the scheduler has just taken.

    Args:
        timestep: that of the step; only read if the scheduler has no step counter.
    """
    if has_sigma_table(scheduler):
        index = scheduler.step_index - 1  # the step has moved the counter on
        sigma, scale = _read_sigma_table(scheduler, index)
        sigma_next, scale_next = _read_sigma_table(scheduler, index + 1)
    else:
        after = _timestep_after(scheduler, int(timestep))
        sigma, scale = _read_alphas_cumprod(scheduler, int(timestep))
        sigma_next, scale_next = _read_alphas_cumprod(scheduler, after)
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
    """Returns latents (B, ...) and velocity eps - x0 (B, ...) in flow coordinates.

    Args:
        model_output: (B, ...) velocity, noise, clean latents or v, as the scheduler's config says.
        latents: (B, ...) before the step, in the scheduler's own scale.
    """
    prediction = prediction_type(scheduler)
    if prediction == "flow_prediction":
        return latents, -model_output if scheduler.config.get("invert_sigmas") else model_output
    x, output = latents.float(), model_output.float()
    noise = position.sigma * position.scale
    signal = position.scale - noise
    if hasattr(scheduler, "precondition_outputs"):  # EDM (arXiv 2206.00364), with its own skips
        denoised = scheduler.precondition_outputs(x, output, noise)
    elif prediction == "epsilon":
        denoised = (x - noise * output) / signal
    elif prediction == "v_prediction":
        # v = (a eps - s x0) / power; the power is 1 only if the variance is preserved.
        power = math.hypot(signal, noise)
        denoised = (signal * x / power - noise * output) / power
    else:
        denoised = output
    return x / position.scale, (x - signal * denoised) / noise - denoised


def previous_sample(result: Any) -> Tensor:
    """Returns the next latents from the result of a scheduler's step, a tuple or output object.

    diffusers counts timesteps upwards in noise, so it calls the less noisy latents the previous.
    """
    return result[0] if isinstance(result, tuple) else result.prev_sample


def with_previous_sample(result: Any, latents: Tensor) -> Any:
    """Returns the result of a scheduler's step with its next latents replaced."""
    if isinstance(result, tuple):
        return (latents, *result[1:])
    result.prev_sample = latents
    return result


def has_sigma_table(scheduler: Any) -> bool:
    """Whether a scheduler looks sigmas up by a step counter, not alphas_cumprod by timestep."""
    sigmas = getattr(scheduler, "sigmas", None)
    return sigmas is not None and len(sigmas) > 1 and hasattr(type(scheduler), "step_index")


def prediction_type(scheduler: Any) -> str:
    """Returns what the denoiser predicts, in diffusers' words; `flow_prediction` is a velocity."""
    prediction = scheduler.config.get("prediction_type", "flow_prediction")
    if (
        prediction == "flow_prediction"
        and has_sigma_table(scheduler)
        and scheduler.sigmas[0] > 1.001
    ):
        # Sigmas above 1 mean exploding variance, where dx/dsigma, which Euler steps, is the noise.
        return "epsilon"
    return prediction


def _read_sigma_table(scheduler: Any, index: int) -> tuple[float, float]:
    """Returns noise fraction and scale at an entry of the scheduler's sigmas."""
    sigma = float(scheduler.sigmas[index])
    if prediction_type(scheduler) == "flow_prediction":
        return (1 - sigma if scheduler.config.get("invert_sigmas") else sigma), 1.0
    signal, noise = 1.0, sigma  # exploding variance, unless the scheduler converts its sigmas
    if hasattr(scheduler, "_sigma_to_alpha_sigma_t"):
        signal, noise = map(float, scheduler._sigma_to_alpha_sigma_t(scheduler.sigmas[index]))
    return noise / (signal + noise), signal + noise


def _read_alphas_cumprod(scheduler: Any, timestep: int) -> tuple[float, float]:
    """Returns noise fraction and scale at a timestep of a variance-preserving scheduler."""
    # Below timestep 0 is the end of the last step, which has an alpha_bar of its own.
    end = getattr(scheduler, "final_alpha_cumprod", 1.0)
    alpha = float(scheduler.alphas_cumprod[timestep] if timestep >= 0 else end)
    signal, noise = math.sqrt(alpha), math.sqrt(1 - alpha)
    return noise / (signal + noise), signal + noise


def _timestep_after(scheduler: Any, timestep: int) -> int:
    """Returns the timestep where a step from `timestep` ends; negative after the last step."""
    if hasattr(scheduler, "previous_timestep"):
        return int(scheduler.previous_timestep(timestep))
    return timestep - scheduler.config.num_train_timesteps // scheduler.num_inference_steps
