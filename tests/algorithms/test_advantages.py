"""Advantages in closed form."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo.algorithms.advantages import advantages, batch_normalised, group_normalised, is_tied

NAMES = ["group", "batch", "none", "gdpo"]
rewards_of_a_group = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=2, max_size=24)


def advantages_of(groups, normalisation, scale=1.0):
    groups = [torch.tensor(g, dtype=torch.float64) * scale for g in groups]
    return advantages({"r": groups}, {"r": 1.0}, normalisation)


@pytest.mark.parametrize("normalisation", NAMES)
@given(constant=st.floats(allow_nan=False, allow_infinity=False), size=st.integers(1, 24))
@settings(max_examples=500, deadline=None)
def test_a_tied_group_has_advantages_of_exactly_zero(normalisation, constant, size):
    tied, live = advantages_of([[constant] * size, [0.0, 1.0]], normalisation)
    assert (tied == 0).all()
    assert is_tied(torch.full((size,), constant, dtype=torch.float64))
    assert live.abs().sum() > 0


@pytest.mark.parametrize("normalisation", NAMES)
@given(group=rewards_of_a_group)
@settings(max_examples=100, deadline=None)
def test_advantages_sum_to_zero_and_keep_the_order(normalisation, group):
    (values,) = advantages_of([group], normalisation)
    assert values.isfinite().all()
    assert values.sum().item() == pytest.approx(0, abs=1e-6 * (1 + max(map(abs, group))))
    best, worst = max(range(len(group)), key=group.__getitem__), group.index(min(group))
    assert values[best] >= values[worst]


def test_group_normalisation_in_closed_form():
    (values,) = group_normalised([torch.tensor([1.0, 2.0, 3.0])])
    assert torch.allclose(values, torch.tensor([-(1.5**0.5), 0, 1.5**0.5]).double(), atol=1e-5)


def test_batch_normalisation_keeps_the_proportions_between_groups():
    small, large = batch_normalised([torch.tensor([0.0, 1.0]), torch.tensor([0.0, 10.0])])
    assert torch.allclose(large, 10 * small)
    assert torch.cat([small, large]).square().mean().item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("normalisation", ["group", "batch", "gdpo"])
def test_advantages_do_not_depend_on_scale_and_shift_of_a_single_reward(normalisation):
    groups = [[0.1, 0.4, 0.2], [0.9, 0.3, 0.3]]
    moved = [[100 * r + 7 for r in group] for group in groups]
    plain, scaled = advantages_of(groups, normalisation), advantages_of(moved, normalisation)
    for a, b in zip(plain, scaled, strict=True):
        assert torch.allclose(a, b, atol=1e-3)


def test_gdpo_does_not_depend_on_the_scale_of_one_of_two_rewards():
    a = [torch.tensor([0.1, 0.4, 0.2]), torch.tensor([0.9, 0.3, 0.3])]
    b = [torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 5.0, 2.0])]
    weights = {"a": 1.0, "b": 0.5}
    plain = advantages({"a": a, "b": b}, weights, "gdpo")
    scaled = advantages({"a": a, "b": [100 * g for g in b]}, weights, "gdpo")
    for x, y in zip(plain, scaled, strict=True):
        assert torch.allclose(x, y, atol=1e-3)


def test_weights_add_up_rewards():
    a, b = [torch.tensor([0.0, 1.0])], [torch.tensor([2.0, 0.0])]
    (values,) = advantages({"a": a, "b": b}, {"a": 2.0, "b": 0.5}, "none")
    assert values.tolist() == [-0.5, 0.5]
