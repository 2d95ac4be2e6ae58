"""Evaluations show the result, leave training alone, and have honest intervals."""

import pytest
import torch
from tiny_run import metrics, trainer

from flowgrpo.data.prompts import evenly_spaced
from flowgrpo.evaluation.statistics import paired_bootstrap


def test_evaluation_shows_the_average_and_leaves_training_alone(tmp_path):
    run = trainer(tmp_path / "run", train={"epochs": 3, "ema": 0.5}, evaluation={"every": 1})
    plain = trainer(tmp_path / "plain", train={"epochs": 3})
    state = torch.get_rng_state()
    run.train()
    assert torch.equal(torch.get_rng_state(), state)
    plain.train()
    assert metrics(tmp_path / "run") == metrics(tmp_path / "plain")
    assert sorted(run.folder.evaluations()) == [0, 1, 2, 3]
    for name, parameter in run.policy.parameters.items():
        assert torch.equal(parameter, run.learner.average[name])
    live = plain.policy.parameters
    assert any(not torch.equal(live[n], p) for n, p in run.policy.parameters.items())


def test_a_part_of_a_prompt_file_is_taken_from_all_over_it():
    assert evenly_spaced(list("abcdefg"), 3) == ["a", "c", "e"]
    assert evenly_spaced(list("abc"), 3) == evenly_spaced(list("abc"), None) == list("abc")


def test_evaluation_does_not_depend_on_the_other_prompts(tmp_path):
    both = trainer(tmp_path / "a", test=["a fox", "an owl"], train={"epochs": 0}).train()
    one = trainer(tmp_path / "b", test=["an owl"], train={"epochs": 0}).train()
    fox = trainer(tmp_path / "c", test=["a fox"], train={"epochs": 0}).train()
    mean = (one["base"]["test_prompts"] + fox["base"]["test_prompts"]) / 2
    assert both["base"]["test_prompts"] == pytest.approx(mean, abs=1e-12)


def test_the_bootstrap_interval_covers_a_known_gain():
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(200, 2, generator=generator, dtype=torch.float64)
    gain = 0.1 + 0.05 * torch.randn(200, 1, generator=generator, dtype=torch.float64)
    low, high = paired_bootstrap(base, base + gain)
    assert low < 0.1 < high
    assert high - low == pytest.approx(2 * 1.96 * 0.05 / 200**0.5, rel=0.2)
