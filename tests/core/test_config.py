"""Bad settings are one sentence that names the key; good ones round-trip."""

from pathlib import Path

import pytest

from flowgrpo.algorithms.advantages import NORMALISATIONS
from flowgrpo.algorithms.sde import SDE_STEPS
from flowgrpo.core.config_file import dump_config, load_config, parse_config
from flowgrpo.core.errors import ConfigError
from flowgrpo.data.plan import Plan
from flowgrpo.data.prompts import Row, load_prompts

CONFIGS = sorted(Path(__file__).parents[2].joinpath("configs").glob("*.yaml"))


def rows(count):
    return [Row(prompt=f"prompt {i}", source=f"line {i}") for i in range(count)]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_of_the_project_loads_and_survives_a_round_trip(path, tmp_path):
    config = load_config(path)
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config
    assert Plan(config=config, rows=rows(7)).describe()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"sampling": {"group_sise": 4}},
            'sampling.group_sise is not a setting; did you mean "group_size"',
        ),
        ({"trian": {}}, 'trian is not a setting; did you mean "train"'),
        ({"train": {"lora": {"rnk": 4}}}, 'train.lora.rnk is not a setting; did you mean "rank"'),
        ({"sampling": {"group_size": 1}}, "sampling.group_size is 1, but must be"),
        ({"sampling": {"noise_level": -0.1}}, "sampling.noise_level is -0.1, but must be"),
        ({"sampling": {"sde": "sde"}}, "sampling.sde is 'sde', but must be"),
        ({"sampling": {"num_inference_steps": 1}}, "sampling.num_inference_steps is 1"),
        (
            {"sampling": {"num_inference_steps": 6, "window": {"last": 5}}},
            "the last step is always",
        ),
        ({"sampling": {"num_inference_steps": 4, "window": 4}}, "sampling.window takes 4"),
        ({"sampling": {"sde": "cps", "noise_level": 1.5}}, "at most 1 for cps"),
        ({"sampling": {"call": {"generator": 1}}}, "sampling.call.generator is set"),
        ({"train": {"lr": "fast"}}, "train.lr is 'fast', but must be"),
        ({"objective": {"clip_range": 0}}, "objective.clip_range is"),
        ({"sampling": {"groups_per_epoch": 10}, "train": {"updates_per_epoch": 4}}, "use 8 or 12"),
        (
            {"train": {"updates_per_epoch": 3, "inner_epochs": 2}},
            "must be a multiple of the 2 inner epochs",
        ),
        ({"reward": "ocr", "rewards": ["clip"]}, "reward and rewards are both set"),
    ],
)
def test_a_bad_setting_is_one_sentence(data, message):
    with pytest.raises(ConfigError) as error:
        parse_config(data)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_choices_of_a_config_are_those_of_the_code():
    for kind in SDE_STEPS:
        assert parse_config({"sampling": {"sde": kind}}).sampling.sde == kind
    for kind in [*NORMALISATIONS, "gdpo"]:
        assert parse_config({"train": {"advantage": kind}}).train.advantage == kind


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("train: {lr: 1e-4}\nobjective: {clip_range: 1e-5}")
    config = load_config(path, ["train.max_grad_norm=1e-3"])
    assert config.train.lr == 1e-4
    assert config.objective.clip_range == (1e-5, 1e-5)
    assert config.train.max_grad_norm == 1e-3


def test_a_key_twice_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("train: {epochs: 7}\ntrain: {lr: 1e-3}")
    with pytest.raises(ConfigError, match="train is there twice"):
        load_config(path)


def test_a_reward_of_the_command_line_replaces_those_of_the_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("rewards: [{reward: ocr}, {reward: clip}]")
    assert [r.reward for r in load_config(path, ["reward=a.py:f"]).rewards] == ["a.py:f"]
    path.write_text("reward: ocr\nheld_out: clip")
    config = load_config(path, ["rewards=[a.py:f, ocr]"])
    assert [r.reward for r in config.rewards] == ["a.py:f", "ocr"]
    assert [r.reward for r in config.held_out] == ["clip"]


def test_overrides_reach_nested_and_new_keys(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("sampling: {call: {height: 32}}")
    config = load_config(path, ["sampling.call.width=64", "train.lora.rank=8", "reward=ocr"])
    assert config.sampling.call == {"height": 32, "width": 64}
    assert config.train.lora.rank == 8
    assert config.rewards[0].reward == "ocr"


@pytest.mark.parametrize("override", ["train.lr", "=3", "train.lr=[1"])
def test_a_malformed_override_is_refused(tmp_path, override):
    path = tmp_path / "config.yaml"
    path.write_text("seed: 1")
    with pytest.raises(ConfigError, match="override is"):
        load_config(path, [override])


def test_a_missing_file_and_a_file_that_is_no_mapping_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file"):
        load_config(tmp_path / "none.yaml")
    path = tmp_path / "list.yaml"
    path.write_text("- 1")
    with pytest.raises(ConfigError, match="holds a list"):
        load_config(path)


def plan(**settings):
    return Plan(config=parse_config(settings), rows=rows(5))


def test_groups_of_an_epoch_do_not_depend_on_what_came_before():
    a, b = plan(seed=3), plan(seed=3)
    a.groups(0), a.groups(1)
    assert a.groups(2) == b.groups(2)
    assert a.groups(2) != plan(seed=4).groups(2)


def test_every_prompt_is_used_once_before_any_is_used_again():
    groups = [
        g
        for epoch in range(5)
        for g in plan(sampling={"groups_per_epoch": 3}, train={"updates_per_epoch": 1}).groups(
            epoch
        )
    ]
    prompts = [g.row.prompt for g in groups]
    for start in range(0, 15, 5):
        assert len(set(prompts[start : start + 5])) == 5
    assert len({tuple(prompts[start : start + 5]) for start in range(0, 15, 5)}) > 1


def test_the_same_line_twice_makes_two_groups():
    twins = [Row(prompt="a cat", source="line 1"), Row(prompt="a cat", source="line 2")]
    groups = Plan(config=parse_config({"sampling": {"groups_per_epoch": 2}}), rows=twins).groups(0)
    assert len(groups) == 2
    assert groups[0].seeds != groups[1].seeds


def test_a_window_lies_within_its_bounds_and_reaches_all_of_them():
    settings = {"num_inference_steps": 10, "window": {"size": 3, "first": 1, "last": 6}}
    p = plan(sampling=settings)
    starts = {g.window.start for epoch in range(40) for g in p.groups(epoch)}
    assert starts == {1, 2, 3, 4}
    assert all(len(g.window) == 3 for g in p.groups(0))


def test_by_default_all_steps_but_the_last_are_trained():
    assert plan(sampling={"num_inference_steps": 6}).groups(0)[0].window == range(0, 5)


def test_shared_noise_gives_a_group_one_start_and_many_ways():
    group = plan(sampling={"shared_noise": True}).groups(0)[0]
    assert len(set(group.seeds)) == 1
    assert group.noise_key(0, 1, 0) != group.noise_key(1, 1, 0)


def test_shares_cover_every_group_once_a_pass():
    settings = {
        "sampling": {"groups_per_epoch": 8},
        "train": {"updates_per_epoch": 4, "inner_epochs": 2},
    }
    assert plan(**settings).update_batches() == [range(0, 4), range(4, 8)] * 2


def test_micro_batches_cover_a_group_with_a_smaller_last_one():
    p = plan(sampling={"group_size": 8, "micro_batch_size": 3})
    assert p.micro_batches == [range(0, 3), range(3, 6), range(6, 8)]


def test_prompt_files_of_every_kind_give_rows_with_their_place(tmp_path):
    (tmp_path / "a.txt").write_text("a cat\n\na dog\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "a cat", "target": "CAT"}\n')
    (tmp_path / "c.csv").write_text("prompt,target\na cat,CAT\n")
    assert [row.prompt for row in load_prompts(tmp_path / "a.txt")] == ["a cat", "a dog"]
    assert load_prompts(tmp_path / "a.txt")[1].source.endswith("a.txt line 3")
    for name in ("b.jsonl", "c.csv"):
        (row,) = load_prompts(tmp_path / name)
        assert row.columns == {"target": "CAT"}


def test_a_dataset_object_gives_rows():
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    data = datasets.Dataset.from_dict({"prompt": ["a cat", "a dog"], "target": ["CAT", "DOG"]})
    assert load_prompts(data)[1].columns == {"target": "DOG"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "\n", "holds no prompt"),
        ("a.jsonl", '{"prompt": "x"}\n{bad', "line 2 is not JSON"),
        ("a.jsonl", '{"text": "x"}', "line 1 has no prompt"),
        ("a.csv", "prompt\nx\n ", "line 3 has no prompt"),
        ("a.csv", 'prompt\n"unclosed\na\n', "is not CSV"),
        ("a.csv", "prompt,prompt\na,b\n", "line 1 has a column twice"),
        ("a.csv", "prompt\na,b\n", "has more cells than the header"),
        ("a.json", "[]", "must end in"),
    ],
)
def test_a_bad_prompt_file_names_file_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_prompts(tmp_path / name)


@pytest.mark.parametrize("data", [{"train": ["a cat"]}, {"prompt": ["a cat"]}])
def test_a_mapping_of_splits_or_columns_is_refused(data):
    with pytest.raises(ConfigError, match="dataset is a dict, but must be rows"):
        load_prompts(data)


def test_a_missing_prompt_file_is_refused():
    with pytest.raises(ConfigError, match="there is no such file"):
        load_prompts("nowhere.txt")
