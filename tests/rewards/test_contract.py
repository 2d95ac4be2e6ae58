"""The decorator of rewards, and how its options are read."""

import functools
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import rewards
from rewards import RewardOptions, options_of, reward


def plain(images, prompts, **columns):
    return [0.0] * len(images)


def test_a_function_without_a_decorator_has_the_defaults():
    assert options_of(plain) == RewardOptions()
    defaults = RewardOptions()
    assert (defaults.validate, defaults.overlap, defaults.columns) == (None, False, None)
    assert defaults.models is None


def test_the_decorator_stores_its_options_and_returns_the_function_itself():
    def score(images, prompts, *, target=None, **columns):
        return [1.0] * len(images)

    decorated = reward(validate=print, overlap=True, columns=["target"], models=list)(score)
    assert decorated is score
    assert score([1], ["a"]) == [1.0]
    assert options_of(score) == RewardOptions(
        validate=print, overlap=True, columns=("target",), models=list
    )
    with pytest.raises(FrozenInstanceError):
        options_of(score).overlap = False


def test_no_columns_differ_from_undeclared_columns():
    assert options_of(reward(columns=())(lambda images, prompts: [])).columns == ()
    assert options_of(reward()(lambda images, prompts: [])).columns is None


def test_options_are_read_through_partials():
    score = reward(overlap=True)(lambda images, prompts, scale=1.0: [])
    inner = functools.partial(score, scale=2.0)
    inner.note = "a partial with attributes is not flattened into the next one"
    assert options_of(functools.partial(inner, prompts=[])).overlap
    assert options_of(functools.partial(plain)) == RewardOptions()
    decorated = reward(columns=("a",))(functools.partial(score, scale=2.0))
    assert options_of(decorated) == RewardOptions(columns=("a",))


def test_options_of_a_callable_object_are_on_it_or_on_its_call():
    class Scorer:
        @reward(overlap=True)
        def __call__(self, images, prompts, **columns):
            return [0.0] * len(images)

        @reward(columns=())
        def score(self, images, prompts):
            return [0.0] * len(images)

    assert options_of(Scorer()) == RewardOptions(overlap=True)
    assert options_of(Scorer().score) == RewardOptions(columns=())
    assert options_of(reward(columns=("a",))(Scorer())) == RewardOptions(columns=("a",))


def test_a_single_string_as_columns_is_refused():
    with pytest.raises(ValueError, match=r'columns is "target", but .*; use \("target",\)'):
        reward(columns="target")


def test_the_decorator_without_parentheses_is_refused():
    with pytest.raises(TypeError):
        reward(plain)


def test_importing_the_decorator_imports_nothing_heavy():
    code = "import sys, rewards; print({'torch', 'numpy', 'PIL', 'flowgrpo'} & set(sys.modules))"
    root = Path(rewards.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert run.stdout.strip() == "set()"
