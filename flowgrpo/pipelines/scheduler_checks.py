"""Refuses schedulers and steps that cannot be taped.

There is no list of supported schedulers: a scheduler's first step is compared with the step that
flowgrpo expects from what it reads of the scheduler.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from flowgrpo.algorithms.sde import SDEStep
from flowgrpo.pipelines.scheduler import (
    Position,
    flow_coordinates,
    has_sigma_table,
    prediction_type,
)

PREDICTIONS = ("flow_prediction", "epsilon", "v_prediction", "sample")
"""Types of prediction that `scheduler.flow_coordinates` converts."""


def check_scheduler(scheduler: Any) -> None:
    """Refuses a scheduler whose interface cannot be taped; `check_first_order_step` tests values.

    Raises:
        ValueError: its step does not take (model_output, timestep, sample), or needs more than one
            call of the denoiser.
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
    """Refuses a step of the window that cannot be stochastic.

    Raises:
        ValueError: it is the last step, or does not reduce the noise within (0, 1].
    """
    if not 0 < position.sigma_next < position.sigma <= 1:
        raise ValueError(
            f"step {index} goes from sigma {position.sigma:.4g} to {position.sigma_next:.4g}, but "
            "a stochastic step must fall within (0, 1] and the last step is always deterministic; "
            "set sampling.window.last to an earlier step."
        )


def check_first_order_step(
    sde_step: SDEStep,
    scheduler: Any,
    position: Position,
    model_output: Tensor,
    latents: Tensor,
    result: Tensor,
) -> None:
    """Checks that the scheduler is read correctly: a step without history must be the ODE's step.

    A multistep solver has none in its first step, and in the one after it was reset.

    Args:
        sde_step: the stochastic step, which is the ODE's at noise level 0.
        model_output: (B, ...) the denoiser's prediction.
        latents: (B, ...) before the step.
        result: (B, ...) after the scheduler's own step.

    Raises:
        ValueError: it differs: the scheduler draws noise, clips, or has another parametrisation.
    """
    x, velocity = flow_coordinates(scheduler, model_output, latents, position)
    expected = sde_step(x, velocity, position.sigma, position.sigma_next, 0.0).mean
    off = _rms(expected * position.scale_next - result.float())
    moved = _rms(result.float() - latents.float())
    rounding = torch.finfo(result.dtype).eps * max(_rms(latents.float()), _rms(result.float()))
    # Latents that are not finite are reported elsewhere, with what to do about them.
    if result.isfinite().all() and not off <= 0.05 * moved + rounding:
        raise ValueError(
            f"scheduler is {type(scheduler).__name__}, but its step from sigma "
            f"{position.sigma:.3g} is {off:.1e} away from the deterministic one: it draws noise of "
            "its own, clips, or has another parametrisation; set model.scheduler to DDIMScheduler "
            "or EulerDiscreteScheduler, for example, and model.scheduler_kwargs to "
            "{clip_sample: false} if it clips."
        )


def _is_known(scheduler: Any) -> bool:
    readable = has_sigma_table(scheduler) or hasattr(scheduler, "alphas_cumprod")
    return readable and prediction_type(scheduler) in PREDICTIONS


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
