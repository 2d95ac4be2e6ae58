"""SDE steps: one reverse step of a flow-matching sampler as a Gaussian (mean, std).

Notation: sigma in [0, 1] is the noise fraction (1 = pure noise), latents
x = (1 - sigma) x0 + sigma eps, velocity v = dx/dsigma = eps - x0. A step goes from s = `sigma` to
n = `sigma_next` < s, so dt = n - s is negative; a is `noise_level`. From x and v follow the two
ends of the straight path, `denoised` = x - s v and `noise` = x + (1 - s) v.

Latents of another parametrisation are first divided by their scale
(`pipelines.scheduler.flow_coordinates`), so the same steps serve every scheduler.

All steps have the signature of `SDEStep`, are pure, compute in float32 and take any latent layout.
With `noise_level` 0 every one of them is the ODE step, with std 0.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Gaussian(NamedTuple):
    """A diagonal Gaussian over latents: `mean` has their shape, `std` is one number per step."""

    mean: Tensor
    std: float


SDEStep = Callable[[Tensor, Tensor, float, float, float], Gaussian]
"""(latents, velocity, sigma, sigma_next, noise_level) -> Gaussian."""


def path_ends(latents: Tensor, velocity: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
    """Returns `denoised` and `noise`, the ends of the path, each with the shape of `latents`."""
    return latents - sigma * velocity, latents + (1 - sigma) * velocity


def flow_sde(
    latents: Tensor, velocity: Tensor, sigma: float, sigma_next: float, noise_level: float
) -> Gaussian:
    """Euler-Maruyama step of Flow-GRPO's SDE (arXiv 2505.05470, eq. 9).

    mean = x + [v + g^2 / (2 s) (x + (1 - s) v)] dt and std = g sqrt(-dt) with
    g = a sqrt(s / (1 - s)).
    """
    x, v = latents.float(), velocity.float()
    dt = sigma_next - sigma
    # g is infinite at sigma = 1, so `sigma_next` stands in its denominator there: in the first step
    # that is the schedule's second sigma, as in the authors' code. Some solvers start just below 1.
    g_squared = noise_level**2 * sigma / (1 - (sigma_next if sigma > 0.999 else sigma))
    drift = g_squared / (2 * sigma)
    mean = x * (1 + drift * dt) + v * (1 + drift * (1 - sigma)) * dt
    return Gaussian(mean, math.sqrt(-g_squared * dt))


def dance_sde(
    latents: Tensor, velocity: Tensor, sigma: float, sigma_next: float, noise_level: float
) -> Gaussian:
    """Euler-Maruyama step of DanceGRPO's SDE, whose diffusion is constant (arXiv 2505.07818).

    mean = x + (v - a^2 / 2 score) dt and std = a sqrt(-dt) with
    score = -(x - (1 - s) denoised) / s^2.
    """
    x, v = latents.float(), velocity.float()
    dt = sigma_next - sigma
    denoised, _ = path_ends(x, v, sigma)
    score = -(x - (1 - sigma) * denoised) / sigma**2
    mean = x + v * dt - noise_level**2 / 2 * score * dt
    return Gaussian(mean, noise_level * math.sqrt(-dt))


def cps(
    latents: Tensor, velocity: Tensor, sigma: float, sigma_next: float, noise_level: float
) -> Gaussian:
    """Coefficients-preserving step (arXiv 2509.05952): new noise replaces part of the old.

    mean = (1 - n) denoised + n cos(a pi/2) noise and std = n sin(a pi/2), so the total noise at
    `sigma_next` is exactly n. The noise level a must be in [0, 1].
    """
    angle = noise_level * math.pi / 2
    mean = _renoised(latents, velocity, sigma, sigma_next, math.cos(angle))
    return Gaussian(mean, sigma_next * math.sin(angle))


def exact_sde(
    latents: Tensor, velocity: Tensor, sigma: float, sigma_next: float, noise_level: float
) -> Gaussian:
    """Flow-GRPO's SDE integrated exactly over the step, with `denoised` held constant.

    `flow_sde` is the Euler-Maruyama step of the same SDE. mean = (1 - n) denoised + n c noise and
    std = n sqrt(1 - c^2) with c = [(n / (1 - n)) / (s / (1 - s))]^(a^2 / 2), which is 0 at s = 1.
    The total noise at `sigma_next` is exactly n.
    """
    kept = _noise_ratio(sigma, sigma_next) ** (noise_level**2 / 2)
    mean = _renoised(latents, velocity, sigma, sigma_next, kept)
    return Gaussian(mean, sigma_next * math.sqrt(1 - kept**2))


def ddim(
    latents: Tensor, velocity: Tensor, sigma: float, sigma_next: float, noise_level: float
) -> Gaussian:
    """DDIM's step with eta = a in [0, 1] (arXiv 2010.02502, eq. 12 and 16); 1 is DDPM's step.

    std = a n sqrt(1 - [((1 - s) n) / ((1 - n) s)]^2) and mean = (1 - n) denoised +
    sqrt(n^2 - std^2) noise. They hold in every parametrisation, since they depend only on ratios of
    signal and noise. DDPO (arXiv 2305.13301) trains with this step.
    """
    redrawn = noise_level * math.sqrt(1 - _noise_ratio(sigma, sigma_next) ** 2)
    mean = _renoised(latents, velocity, sigma, sigma_next, math.sqrt(1 - redrawn**2))
    return Gaussian(mean, sigma_next * redrawn)


def _noise_ratio(sigma: float, sigma_next: float) -> float:
    """The ratio n / (1 - n) divided by s / (1 - s): in [0, 1), and 0 at s = 1."""
    return sigma_next * (1 - sigma) / ((1 - sigma_next) * sigma)


def _renoised(
    latents: Tensor, velocity: Tensor, sigma: float, sigma_next: float, kept: float
) -> Tensor:
    """Returns the mean of a step that keeps the share `kept` of the old noise."""
    denoised, noise = path_ends(latents.float(), velocity.float(), sigma)
    return (1 - sigma_next) * denoised + sigma_next * kept * noise


SDE_STEPS: dict[str, SDEStep] = {
    "flow_sde": flow_sde,
    "cps": cps,
    "dance_sde": dance_sde,
    "exact_sde": exact_sde,
    "ddim": ddim,
}
"""Step functions by the name in the config."""


def log_prob(latents: Tensor, mean: Tensor, std: float) -> Tensor:
    """Log-density (B,) of latents (B, ...) under N(mean, std^2), averaged over latent dimensions.

    Averaged rather than summed over the D dimensions, as in Flow-GRPO: the exponential of a
    difference is the likelihood ratio to the power 1/D, and clip ranges are in these units.
    """
    squared = (latents.float() - mean).square() / (2 * std**2)
    return -squared.flatten(1).mean(1) - math.log(std) - math.log(2 * math.pi) / 2


def kl_divergence(mean: Tensor, mean_reference: Tensor, std: float) -> Tensor:
    """KL(N(mean, std^2) || N(mean_reference, std^2)) (B,), averaged over latent dimensions."""
    return ((mean - mean_reference).square() / (2 * std**2)).flatten(1).mean(1)
