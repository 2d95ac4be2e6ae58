"""Rewards: found by name, checked against the data, and called."""

import functools

import pytest
import torch
from PIL import Image

from flowgrpo.core.errors import ConfigError, RewardError
from flowgrpo.core.sections import RewardConfig
from flowgrpo.data.row import Row
from flowgrpo.scoring.audit import require_varying_scores
from flowgrpo.scoring.loading import as_rewards, built_in_rewards, find_reward, load_rewards
from flowgrpo.scoring.validation import validate_rows
from rewards import reward as declare


def row(prompt="a cat", **columns):
    return Row(prompt=prompt, columns=columns, source="prompts.txt line 7")


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


def test_rewards_of_one_function_get_unique_names():
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


@pytest.mark.parametrize("option", ["validate", "overlap", "columns", "models"])
def test_options_outside_of_the_decorator_are_refused(option, tmp_path):
    def mine(images, prompts, **columns):
        return [0.0] * len(images)

    setattr(mine, option, ("target",))
    message = (
        f'"mine" has an attribute "{option}", but .*; use @reward\\({option}=...\\) from rewards'
    )
    for function in (mine, functools.partial(mine)):
        with pytest.raises(ConfigError, match=message):
            as_rewards(function)
    (tmp_path / "mine.py").write_text(
        f"def mine(images, prompts):\n    return []\n\n\nmine.{option} = ()\n"
    )
    with pytest.raises(ConfigError, match=message):
        load_rewards([RewardConfig(reward=f"{tmp_path}/mine.py:mine")])


def test_attributes_that_were_never_options_are_accepted():
    def mine(images, prompts, **columns):
        return [0.0] * len(images)

    class Model:
        models = ("a", "b")
        columns = ("target",)

        def __call__(self, images, prompts):
            return [0.0] * len(images)

    mine.columns, mine.note = 3, "free"
    assert [r.name for r in as_rewards([mine, Model()])] == ["mine", "Model"]


def test_a_row_that_a_reward_cannot_score_is_refused_with_its_line():
    (ocr,) = load_rewards([RewardConfig(reward="ocr")])
    with pytest.raises(ConfigError, match=r"prompts.txt line 7: .*names no text"):
        validate_rows([ocr], [row("a red cube")])
    validate_rows([ocr], [row('a sign that says "CAT"'), row("a red cube", target="CUBE")])


@pytest.mark.parametrize("column", ["detect", "score", "videos", "prompts"])
def test_a_column_with_the_name_of_a_setting_is_refused(column):
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


def grey(level):
    return Image.new("RGB", (8, 8), (level,) * 3)


def brightness(images, prompts, target=None, **columns):
    assert len(images) == len(prompts) == len(target)
    return [image.getpixel((0, 0))[0] * weight for image, weight in zip(images, target)]  # noqa: B905


def length(videos, prompts, **columns):
    return [len(video) for video in videos]


def test_a_reward_of_images_scores_a_video_by_the_mean_of_its_frames():
    (reward,) = as_rewards(brightness)
    videos = [[grey(0), grey(30), grey(60)], [grey(100)]]
    assert reward(videos, [row(target=1), row(target=2)]).tolist() == [30, 200]
    assert reward([grey(10), grey(20)], [row(target=1), row(target=2)]).tolist() == [10, 40]


def test_a_reward_of_videos_gets_copies_of_the_frames_in_order():
    def drawing(videos, prompts, **columns):
        levels = [[frame.getpixel((0, 0))[0] for frame in video] for video in videos]
        for video in videos:
            video[0].paste("white", (0, 0, 8, 8))
            video.pop()
        return [b - a for a, b in levels]

    (reward,) = as_rewards(drawing)
    video = [grey(10), grey(30)]
    assert [reward([video], [row()]).item() for _ in range(2)] == [20, 20]
    assert len(video) == 2


def test_a_reward_of_videos_refuses_images_before_training():
    (reward,) = as_rewards(length)
    validate_rows([reward], [row(level=3)])
    for check in (
        lambda: reward([grey(0)], [row()]),
        lambda: require_varying_scores(reward, row(), {}, videos=False),
    ):
        with pytest.raises(
            RewardError, match='"length" takes videos, but the pipeline generates im'
        ):
            check()


def test_a_reward_of_videos_is_tried_on_clips_of_the_calls_size():
    seen = []

    def level(videos, prompts, **columns):
        seen.extend((len(video), video[-1].size) for video in videos)
        return [video[-1].getpixel((0, 0))[0] for video in videos]

    call = {"num_frames": 5, "width": 24, "height": 16}
    require_varying_scores(*as_rewards(level), row(), call, videos=True)
    assert seen == [(5, (24, 16))] * 3
    with pytest.raises(RewardError, match=r"length is 5 for a black, a white and a noise video"):
        require_varying_scores(*as_rewards(length), row(), call)


def test_rewards_get_opened_media_and_the_column_images_as_input_images(tmp_path):
    grey(50).save(tmp_path / "a.png")
    seen = []

    @declare(validate=lambda prompt, image, **columns: image.getpixel((0, 0)))
    def change(images, prompts, image, input_images, **columns):
        seen.append(sorted(columns))
        assert image[0] is image[-1], "opened once per row"
        return [
            after.getpixel((0, 0))[0] - before.getpixel((0, 0))[0] + len(more)
            for after, before, more in zip(images, image, input_images, strict=True)
        ]

    (reward,) = as_rewards(change)
    path = str(tmp_path / "a.png")
    edit = row(image=path, images=[path, path], level=3)
    validate_rows([reward], [edit])
    assert reward([grey(60), grey(70)], [edit, edit]).tolist() == [12, 22]
    assert seen == [["level"]]
    with pytest.raises(ConfigError, match='has no column "input_images"'):
        validate_rows([reward], [row(image=path)])
