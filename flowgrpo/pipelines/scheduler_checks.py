"""Refuses schedulers and steps that cannot be taped.

There is no list of supported schedulers: what a scheduler does in its first step is compared with
what flowgrpo reads from it.
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
    sde_step: SDEStep,
    scheduler: Any,
    position: Position,
    model_output: Tensor,
    latents: Tensor,
    result: Tensor,
) -> None:
    """Proves that the scheduler is read rightly: its first step must be the noiseless step.

    A multistep solver has no past there, so every deterministic scheduler takes the ODE's step.

    Raises:
        ValueError: it does not; it draws noise of its own, or has a parametrisation of its own.
    """
    x, velocity = flow_coordinates(scheduler, model_output, latents, position)
    expected = sde_step(x, velocity, position.sigma, position.sigma_next, 0.0).mean
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


def _is_known(scheduler: Any) -> bool:
    readable = has_sigma_table(scheduler) or hasattr(scheduler, "alphas_cumprod")
    return readable and prediction_type(scheduler) in PREDICTIONS


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
