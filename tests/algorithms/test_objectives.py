"""GRPO's objective in closed form, and the contract of every objective."""

import inspect
from typing import get_args

import pytest
import torch
from torch.distributions import Normal
from torch.distributions import kl_divergence as torch_kl

from flowgrpo.algorithms.objectives import OBJECTIVES, StepBatch
from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.objective_config import GRPOObjective

STD = 0.3


def batch(log_prob, old_log_prob, advantages, **means):
    """A step of B samples of 4 latent dimensions."""
    zeros = torch.zeros(len(log_prob), 4)
    names = ("latents", "next_latents", "mean", "old_mean", "velocity")
    return StepBatch(
        advantages=advantages,
        log_prob=log_prob,
        old_log_prob=old_log_prob,
        std=STD,
        sigma=0.8,
        sigma_next=0.7,
        **{**dict.fromkeys(names, zeros), "reference_mean": None, **means},
    )


def loss_of(log_prob, old_log_prob, advantages, clip_range, kl_weight=0.0, **means):
    settings = GRPOObjective(clip_range=clip_range, kl_weight=kl_weight)
    return OBJECTIVES["grpo"](
        batch(log_prob, old_log_prob, advantages, **means), **settings.arguments
    )


def test_the_objective_at_ratio_one_is_the_negative_advantage():
    log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantage = torch.tensor([0.5, -0.7])
    loss = loss_of(log_prob, log_prob.detach(), advantage, (1e-4, 1e-4))
    assert torch.equal(loss.loss, -advantage)
    loss.loss.sum().backward()
    assert torch.equal(log_prob.grad, -advantage)


@pytest.mark.parametrize(
    ("advantage", "ratio", "moves"),
    [
        (1, 1.3, False),
        (1, 1.05, True),
        (1, 0.7, True),
        (-1, 0.7, False),
        (-1, 0.95, True),
        (-1, 1.3, True),
    ],
)
def test_clipping_stops_only_ratios_that_have_moved_far_enough(advantage, ratio, moves):
    log_prob = torch.tensor([ratio]).log().requires_grad_()
    loss = loss_of(log_prob, torch.zeros(1), torch.tensor([float(advantage)]), (0.1, 0.2))
    loss.loss.sum().backward()
    assert bool(log_prob.grad != 0) == moves
    assert bool(loss.metrics["clip_fraction_low"]) == (advantage < 0 and not moves)
    assert bool(loss.metrics["clip_fraction_high"]) == (advantage > 0 and not moves)


def test_low_and_high_bounds_are_separate():
    log_prob = torch.tensor([1.15, 0.85]).log()
    loss = loss_of(log_prob, torch.zeros(2), torch.tensor([1.0, -1.0]), (0.1, 0.2))
    assert loss.metrics["clip_fraction_high"].tolist() == [False, False]
    assert loss.metrics["clip_fraction_low"].tolist() == [False, True]


def test_advantages_are_bounded_by_five():
    loss = loss_of(torch.zeros(1), torch.zeros(1), torch.tensor([80.0]), (1e-4, 1e-4))
    assert loss.loss.item() == -5


def test_the_kl_term_is_that_of_torch_averaged_over_dimensions():
    mean, reference = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).unbind()
    zeros = torch.zeros(3)
    means = {"mean": mean, "reference_mean": reference}
    loss = loss_of(zeros, zeros, zeros, (1e-4, 1e-4), kl_weight=0.5, **means)
    expected = torch_kl(Normal(mean, STD), Normal(reference, STD)).mean(1)
    assert torch.allclose(loss.metrics["kl"], expected)
    assert torch.allclose(loss.loss, 0.5 * expected)


def test_without_a_weight_no_kl_is_measured():
    zeros = torch.zeros(3)
    assert "kl" not in loss_of(zeros, zeros, zeros, (1e-4, 1e-4)).metrics


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_takes_exactly_the_fields_of_its_config(name):
    annotation = GRPOConfig.model_fields["objective"].annotation
    settings = {
        cls.model_fields["name"].default: cls for cls in get_args(annotation) or [annotation]
    }
    assert settings.keys() == OBJECTIVES.keys()
    parameters = list(inspect.signature(OBJECTIVES[name]).parameters.values())
    assert [p.name for p in parameters[1:]] == [*settings[name]().arguments]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters[1:])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_returns_a_loss_and_metrics_per_sample(name):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(3, 3, generator=generator).unbind()
    loss = OBJECTIVES[name](
        batch(*values), **GRPOConfig(objective={"name": name}).objective.arguments
    )
    assert loss.loss.shape == (3,)
    assert loss.loss.isfinite().all()
    assert all(value.shape == (3,) for value in loss.metrics.values())
