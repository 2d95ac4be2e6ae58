"""Each SDE step is the Gaussian of its paper, checked against independent derivations."""

import math
from itertools import pairwise

import pytest
import torch
from diffusers import UniPCMultistepScheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Normal
from torch.distributions import kl_divergence as torch_kl

from flowgrpo.algorithms.sde import (
    SDE_STEPS,
    cps,
    dance_sde,
    flow_sde,
    kl_divergence,
    log_prob,
)

STOCHASTIC = ["flow_sde", "dance_sde", "cps", "exact_sde", "ddim"]


def inputs(seed=0, shape=(2, 3, 4)):
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(shape, generator=generator)
    return latents, torch.randn(shape, generator=generator)


def schedule(steps, shift):
    sigmas = torch.linspace(1, 1 / 1000, steps, dtype=torch.float64)
    shifted = shift * sigmas / (1 + (shift - 1) * sigmas)
    return [*shifted.tolist(), 0.0]


sigma_pairs = st.tuples(st.floats(0.02, 0.98), st.floats(0.05, 0.95)).map(
    lambda pair: (pair[0], pair[0] * pair[1])
)


@pytest.mark.parametrize("sde", STOCHASTIC)
@given(sigmas=sigma_pairs)
@settings(max_examples=30, deadline=None)
def test_noise_level_zero_is_the_ode(sde, sigmas):
    x, v = inputs()
    mean, std = SDE_STEPS[sde](x, v, *sigmas, 0.0)
    expected = x + v * (sigmas[1] - sigmas[0])
    assert std == 0
    assert torch.allclose(mean, expected, atol=1e-6)


@given(sigmas=sigma_pairs, noise_level=st.floats(0.05, 1.5))
@settings(max_examples=50, deadline=None)
def test_flow_sde_is_the_euler_maruyama_step_of_its_sde(sigmas, noise_level):
    """dx = (v + g^2/(2s) (x + (1-s) v)) dt + g dw in reverse time, re-derived in float64."""
    (s, n), (x, v) = sigmas, inputs()
    mean, std = flow_sde(x, v, s, n, noise_level)
    g = noise_level * math.sqrt(s / (1 - s))
    x64, v64 = x.double(), v.double()
    score = -(x64 + (1 - s) * v64) / s
    expected = x64 + (v64 - g**2 / 2 * score) * (n - s)
    assert torch.allclose(mean.double(), expected, atol=1e-4, rtol=1e-4)
    assert std == pytest.approx(g * math.sqrt(s - n))


@given(sigmas=sigma_pairs, noise_level=st.floats(0.05, 1.5))
@settings(max_examples=50, deadline=None)
def test_dance_sde_is_the_euler_maruyama_step_of_its_sde(sigmas, noise_level):
    (s, n), (x, v) = sigmas, inputs()
    mean, std = dance_sde(x, v, s, n, noise_level)
    x64, v64 = x.double(), v.double()
    epsilon = x64 + (1 - s) * v64
    expected = x64 + (v64 + noise_level**2 / 2 * epsilon / s) * (n - s)
    assert torch.allclose(mean.double(), expected, atol=1e-3, rtol=1e-4)
    assert std == pytest.approx(noise_level * math.sqrt(s - n))


@given(sigmas=sigma_pairs, noise_level=st.floats(0.01, 1.0))
@settings(max_examples=50, deadline=None)
def test_cps_keeps_the_total_noise_at_the_next_sigma(sigmas, noise_level):
    """With the true velocity of one point x0, the next latents are (1-n) x0 + noise of std n."""
    s, n = sigmas
    x0, eps = torch.tensor([0.7]), torch.tensor([1.3])
    x, v = (1 - s) * x0 + s * eps, eps - x0
    mean, std = cps(x, v, s, n, noise_level)
    kept = ((mean - (1 - n) * x0) / eps).item()
    assert kept**2 + std**2 == pytest.approx(n**2, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("sde", STOCHASTIC)
@pytest.mark.parametrize("steps", [5, 10, 40])
def test_a_solver_that_starts_just_below_one_has_bounded_stds(sde, steps):
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    scheduler.set_timesteps(steps)
    sigmas = scheduler.sigmas.tolist()
    assert sigmas[0] < 1
    x, v = inputs()
    for s, n in pairwise(sigmas[:-1]):
        assert 0 < SDE_STEPS[sde](x, v, s, n, 0.7).std < 2


@pytest.mark.parametrize("sde", ["flow_sde", "dance_sde"])
def test_many_small_steps_reach_the_data_distribution(sde):
    """x0 ~ N(1, 0.5^2), for which the velocity is known; 400 steps must land on that Gaussian."""
    generator = torch.Generator().manual_seed(0)
    mu, std_data = 1.0, 0.5
    sigmas = torch.linspace(1, 0, 401, dtype=torch.float64).tolist()
    x = torch.randn(20_000, 1, generator=generator)
    for s, n in pairwise(sigmas):
        variance = (1 - s) ** 2 * std_data**2 + s**2
        residual = (x - (1 - s) * mu) / variance
        denoised = mu + (1 - s) * std_data**2 * residual
        noise = s * residual
        # The last step is deterministic in every schedule; noise level 0 makes it so.
        noise_level = 0.0 if n == 0 else 0.7
        mean, std = SDE_STEPS[sde](x, noise - denoised, s, n, noise_level)
        x = mean + std * torch.randn(x.shape, generator=generator)
    assert x.mean().item() == pytest.approx(mu, abs=0.03)
    assert x.std().item() == pytest.approx(std_data, abs=0.03)


@pytest.mark.parametrize("sde", STOCHASTIC)
@pytest.mark.parametrize("shift", [1.0, 3.0, 7.0])
@pytest.mark.parametrize("steps", [2, 6, 28])
def test_every_stochastic_step_has_a_finite_positive_std(sde, shift, steps):
    sigmas = schedule(steps, shift)
    x, v = inputs()
    for s, n in pairwise(sigmas[:-1]):
        mean, std = SDE_STEPS[sde](x, v, s, n, 0.7)
        assert 0 < std < 2
        assert mean.isfinite().all()


def test_sigma_one_uses_the_second_sigma_of_the_schedule():
    x, v = inputs()
    _, std = flow_sde(x, v, 1.0, 0.9, 0.7)
    assert std == pytest.approx(0.7 * math.sqrt(1 / (1 - 0.9)) * math.sqrt(0.1))


def test_log_prob_is_the_normal_density_averaged_over_dimensions():
    x, mean = inputs()
    expected = Normal(mean.double(), 0.3).log_prob(x.double()).flatten(1).mean(1)
    assert torch.allclose(log_prob(x, mean, 0.3).double(), expected, atol=1e-5)


def test_kl_is_that_of_torch_averaged_over_dimensions():
    a, b = inputs()
    expected = torch_kl(Normal(a.double(), 0.3), Normal(b.double(), 0.3)).flatten(1).mean(1)
    assert torch.allclose(kl_divergence(a, b, 0.3).double(), expected, rtol=1e-5)


@pytest.mark.parametrize("sde", STOCHASTIC)
def test_the_mean_falls_as_the_velocity_rises(sde):
    """The velocity points towards noise, and a step goes the other way: d mean / dv < 0."""
    x, v = inputs()
    before = SDE_STEPS[sde](x, v, 0.6, 0.5, 0.5).mean
    assert (SDE_STEPS[sde](x, v + 1, 0.6, 0.5, 0.5).mean < before).all()
