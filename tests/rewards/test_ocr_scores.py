"""Edit similarity and likelihood, against their definitions computed by brute force."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.ocr import (
    FLOOR,
    TEMPERATURE,
    ctc_log_likelihood,
    edit_similarity,
    frames_needed,
    likelihood,
    normalise,
)

TEXT = st.text("abcAB '-é1", max_size=8)


def _levenshtein(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(
        _levenshtein(a[1:], b) + 1,
        _levenshtein(a, b[1:]) + 1,
        _levenshtein(a[1:], b[1:]) + (a[0] != b[0]),
    )


@settings(deadline=None, max_examples=60)
@given(st.text("abc", max_size=5), st.text("abc", max_size=5))
def test_edit_similarity_equals_the_recursive_definition(a, b):
    expected = 1 - _levenshtein(a, b) / max(len(a), len(b), 1)
    assert edit_similarity(a, b) == pytest.approx(expected, abs=1e-12)


@given(TEXT, TEXT)
def test_edit_similarity_is_symmetric_within_0_and_1_and_1_only_for_the_same_text(a, b):
    similarity = edit_similarity(a, b)
    assert 0 <= similarity <= 1
    assert similarity == edit_similarity(b, a)
    assert (similarity == 1) == (normalise(a) == normalise(b))


@given(st.text("abc", min_size=1, max_size=6), st.text("abc", min_size=1, max_size=6))
def test_extra_text_around_the_target_lowers_edit_similarity(target, extra):
    closed_form = len(target) / (len(target) + len(extra))
    assert edit_similarity(target + extra, target) == pytest.approx(closed_form)
    assert edit_similarity(extra + target, target) == pytest.approx(closed_form)


def _collapse(path: tuple[int, ...]) -> list[int]:
    return [label for label, _ in itertools.groupby(path) if label]


@pytest.mark.parametrize("labels", [[1], [1, 2], [1, 1], [2, 1, 2]])
def test_ctc_equals_the_sum_over_every_path(labels):
    probs = np.random.default_rng(0).dirichlet(np.ones(4), 5)
    paths = itertools.product(range(4), repeat=5)
    total = math.fsum(
        math.prod(probs[t, label] for t, label in enumerate(path))
        for path in paths
        if _collapse(path) == labels
    )
    assert ctc_log_likelihood(np.log(probs), labels) == pytest.approx(math.log(total), abs=1e-12)


def test_likelihood_equals_brute_force_over_normalised_characters():
    characters = ["blank", "a", "A", "b", "Ｂ", "c", " "]
    probs = np.random.default_rng(1).dirichlet(np.ones(7), 4)
    merged = np.stack([probs[:, 0], probs[:, 1:3].sum(1), probs[:, 3:5].sum(1)], 1)
    floored = (1 - 3 * FLOOR) * merged + FLOOR
    total = math.fsum(
        math.prod(floored[t, label] for t, label in enumerate(path))
        for path in itertools.product(range(3), repeat=4)
        if _collapse(path) == [1, 2]
    )
    expected = math.exp(math.log(total) / (2 * TEMPERATURE))
    assert likelihood(probs, characters, "Ab") == pytest.approx(expected, abs=1e-12)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.text("abc", min_size=1, max_size=3))
def test_likelihood_is_at_most_1_and_never_0(seed, target):
    concentrated = np.full(4, 0.01)
    probs = np.random.default_rng(seed).dirichlet(concentrated, 6)
    worst = math.exp(6 * math.log(FLOOR) / (len(target) * TEMPERATURE))
    assert worst <= likelihood(probs, ["blank", "a", "b", "c"], target) <= 1


def test_a_certain_reading_scores_1_and_a_certain_misreading_costs_the_floor():
    certain = np.eye(4)[[1, 0, 2, 0, 3]]
    characters = ["blank", "a", "b", "c"]
    assert likelihood(certain, characters, "abc") == pytest.approx(1, abs=1e-4)
    expected = math.exp(math.log(FLOOR) / (3 * TEMPERATURE))
    assert likelihood(certain, characters, "aac") == pytest.approx(expected, rel=0.02)


def test_a_target_of_unknown_characters_is_refused():
    with pytest.raises(ValueError, match="lacks ж; use characters"):
        likelihood(np.full((3, 2), 0.5), ["blank", "a"], "aж")


def test_frames_needed_is_the_shortest_path_of_ctc():
    for text in ("abc", "aab", "aaa"):
        labels = [" abc".index(c) for c in text]
        shortest = np.log(np.full((frames_needed(text), 4), 0.25))
        assert math.isfinite(ctc_log_likelihood(shortest, labels))
        assert math.isinf(ctc_log_likelihood(shortest[1:], labels))
