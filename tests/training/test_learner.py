"""What the learner hands to an objective, and what it does with the loss."""

import pytest
import torch
from together import redness, settings

from flowgrpo import GRPOTrainer
from flowgrpo.algorithms import objectives
from flowgrpo.algorithms.objectives import StepLoss
from flowgrpo.algorithms.sde import SDE_STEPS, log_prob
from flowgrpo.training.metrics import MetricSums


@pytest.fixture
def seen(monkeypatch):
    """Batches that the objective gets, which then gives the negative log-prob as its loss."""
    batches = []

    def objective(batch, **arguments):
        batches.append(batch)
        return StepLoss(-batch.log_prob, {"number": torch.arange(len(batch.log_prob)).double()})

    monkeypatch.setitem(objectives.OBJECTIVES, "grpo", objective)
    return batches


def accumulated(folder, **changes):
    """A learner that has replayed one group of four samples, with what it summed."""
    from families import built

    sampling = {"groups_per_epoch": 1, "micro_batch_size": 2, **changes.pop("sampling", {})}
    args = settings(folder, sampling=sampling, train={"updates_per_epoch": 1}, **changes)
    run = GRPOTrainer(built("sd3"), redness, ["a cat"], args=args)
    with torch.no_grad():
        for parameter in run.policy.parameters.values():
            parameter.add_(0.01)
    (group,) = run.sample(run.plan.groups(0))
    sums = MetricSums()
    advantages = torch.linspace(-1, 1, 4, dtype=torch.float64)
    run.learner.accumulate([(group.rollouts, advantages)], run.plan.transitions_per_group, sums)
    return run, sums


@pytest.mark.parametrize("sde", ["flow_sde", "cps"])
def test_an_objective_gets_the_whole_step_as_the_policy_made_it(tmp_path, seen, sde):
    run, _ = accumulated(tmp_path, sampling={"sde": sde, "noise_level": 0.6})
    assert len(seen) == 2 * run.plan.window_size
    assert torch.cat([b.advantages for b in seen[:: run.plan.window_size]]).tolist() == [
        -1, pytest.approx(-1 / 3), pytest.approx(1 / 3), 1
    ]  # fmt: skip
    for batch in seen:
        mean, std = SDE_STEPS[sde](
            batch.latents, batch.velocity, batch.sigma, batch.sigma_next, noise_level=0.6
        )
        assert torch.equal(batch.mean, mean)
        assert batch.std == std
        assert torch.equal(batch.mean, batch.old_mean)
        assert torch.equal(batch.log_prob, log_prob(batch.next_latents, mean, std))
        assert torch.equal(batch.log_prob, batch.old_log_prob)
        assert batch.log_prob.requires_grad
        assert not batch.old_log_prob.requires_grad
        assert batch.reference_mean is None
        assert 1 >= batch.sigma > batch.sigma_next > 0


def test_the_reference_comes_with_a_weight_and_without_gradients(tmp_path, seen):
    accumulated(tmp_path, objective={"kl_weight": 0.1})
    for batch in seen:
        assert batch.reference_mean.shape == batch.mean.shape
        assert not torch.equal(batch.reference_mean, batch.mean)
        assert not batch.reference_mean.requires_grad


def test_the_gradient_is_that_of_the_mean_loss_over_transitions(tmp_path, seen):
    """The same loss, summed over all batches at once and divided by their count."""
    run, sums = accumulated(tmp_path)
    found = {name: p.grad.clone() for name, p in run.policy.parameters.items()}
    total = sums.to_message()
    assert (
        total["num_transitions"]
        == run.plan.transitions_per_group
        == sum(len(batch.log_prob) for batch in seen)
    )
    assert total["sums"]["loss"] == pytest.approx(
        -sum(float(batch.log_prob.double().sum()) for batch in seen)
    )
    assert total["sums"]["number"] == len(seen)  # 0 + 1 in each micro-batch of two
    doubled = 2 * run.plan.transitions_per_group
    for parameter in run.policy.parameters.values():
        parameter.grad = None
    (group,) = run.sample(run.plan.groups(0))
    batch = [(group.rollouts, torch.zeros(4, dtype=torch.float64))]
    run.learner.accumulate(batch, doubled, MetricSums())
    for name, parameter in run.policy.parameters.items():
        assert torch.allclose(parameter.grad, found[name] / 2, atol=1e-9)
