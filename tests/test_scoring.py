"""Rewards are found by name, checked, and scored apart."""

import pytest
import torch
from PIL import Image

from flowgrpo.config import ConfigError, RewardConfig
from flowgrpo.loading import as_rewards, built_in_rewards, find_reward, load_rewards
from flowgrpo.prompts import Row
from flowgrpo.scoring import validate_rows


def row(prompt="a cat", **columns):
    return Row(prompt=prompt, columns=columns, place="prompts.txt line 7")


def test_the_built_in_rewards_are_those_of_the_package():
    assert built_in_rewards() == ["aesthetic", "clip", "ocr"]
    assert all(callable(find_reward(name)) for name in built_in_rewards())


def test_a_function_is_found_in_a_file_and_in_a_module(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def one(images, prompts, **c):\n    return [1.0] * len(images)\n"
    )
    assert find_reward(f"{tmp_path}/mine.py:one")([1, 2], ["a", "b"]) == [1.0, 1.0]
    assert find_reward("rewards.ocr:ocr").__name__ == "ocr"


def test_a_file_that_fails_to_import_says_why(tmp_path):
    (tmp_path / "mine.py").write_text("import no_such_package_at_all\n")
    with pytest.raises(ConfigError, match=r"cannot be imported \(ModuleNotFoundError: .*no_such"):
        find_reward(f"{tmp_path}/mine.py:one")


def test_rewards_of_one_function_get_names_of_their_own():
    configs = [
        RewardConfig(reward="ocr", params={"score": "exact"}),
        RewardConfig(reward="ocr"),
        RewardConfig(reward="clip", name="similarity"),
    ]
    assert [r.name for r in load_rewards(configs)] == ["ocr(score=exact)", "ocr", "similarity"]
    with pytest.raises(ConfigError, match='two rewards are called "ocr"'):
        load_rewards([RewardConfig(reward="ocr"), RewardConfig(reward="ocr")])


def test_a_misspelt_parameter_names_the_nearest():
    with pytest.raises(ConfigError, match='has no parameter "skore"; did you mean "score"'):
        load_rewards([RewardConfig(reward="ocr", params={"skore": "exact"})])


def test_callables_names_and_lists_are_rewards():
    def mine(images, prompts, **columns):
        return [0.0] * len(images)

    assert [r.name for r in as_rewards([mine, "ocr"])] == ["mine", "ocr"]
    assert as_rewards(mine)[0].weight == 1.0


def test_a_row_that_a_reward_cannot_score_names_its_place():
    (ocr,) = load_rewards([RewardConfig(reward="ocr")])
    with pytest.raises(ConfigError, match=r"prompts.txt line 7: .*names no text"):
        validate_rows([ocr], [row("a red cube")])
    validate_rows([ocr], [row('a sign that says "CAT"'), row("a red cube", target="CUBE")])


@pytest.mark.parametrize("column", ["detect", "score", "images", "prompts"])
def test_a_column_that_would_stand_in_for_a_setting_is_refused(column):
    (ocr,) = load_rewards([RewardConfig(reward="ocr")])
    with pytest.raises(ConfigError, match=f'has a column "{column}", but reward "ocr" has a param'):
        validate_rows([ocr], [row('a sign that says "CAT"', **{column: 1})])


def test_a_function_that_cannot_take_images_prompts_and_columns_is_refused():
    def f(images):
        return []

    def g(images, prompts):
        return []

    with pytest.raises(ConfigError, match='reward "f" cannot be called'):
        validate_rows(as_rewards(f), [row()])
    with pytest.raises(ConfigError, match="define it as"):
        validate_rows(as_rewards(g), [row(level=3)])
    validate_rows(as_rewards(g), [row()])


def test_each_image_is_scored_with_its_own_prompt_and_columns():
    def length(images, prompts, target, **columns):
        return [len(p) + len(t) for p, t in zip(prompts, target, strict=True)]

    (reward,) = as_rewards(length)
    rows = [row("a", target="x"), row("bb", target="yy")]
    scores = reward([Image.new("RGB", (8, 8))] * 2, rows)
    assert torch.equal(scores, torch.tensor([2.0, 4.0], dtype=torch.float64))
