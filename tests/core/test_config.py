"""A bad setting is refused in one sentence that names it; good ones survive a round trip."""

import re
from pathlib import Path

import pytest

from flowgrpo.algorithms.advantages import NORMALISATIONS
from flowgrpo.algorithms.sde import SDE_STEPS
from flowgrpo.core.config import RENAMED_KEYS
from flowgrpo.core.config_file import dump_config, load_config, parse_config
from flowgrpo.core.errors import ConfigError
from flowgrpo.data.plan import Plan
from flowgrpo.data.row import Row

CONFIGS = sorted(Path(__file__).parents[2].joinpath("configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_of_the_project_loads_and_survives_a_round_trip(path, tmp_path):
    config = load_config(path)
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config
    row = Row(prompt="a cat", source="line 1")
    assert Plan(config=config, rows=[row]).describe()


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
        ({"objective": "grpo"}, "objective is 'grpo', but must be a section with keys; known: cl"),
        ({"objective": {"klweight": 1}}, 'did you mean "kl_weight"?'),
        ({"sampling": {"groups_per_epoch": 10}, "train": {"updates_per_epoch": 4}}, "use 8 or 12"),
        (
            {"train": {"updates_per_epoch": 3, "inner_epochs": 2}},
            "must be a multiple of the 2 inner epochs",
        ),
        ({"reward": "ocr", "rewards": ["clip"]}, "reward and rewards are both set"),
    ],
)
def test_a_bad_setting_is_refused_in_one_sentence(data, message):
    with pytest.raises(ConfigError) as error:
        parse_config(data)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_choices_of_the_config_are_those_of_the_code():
    for sde in SDE_STEPS:
        assert parse_config({"sampling": {"sde": sde}}).sampling.sde == sde
    for advantage in [*NORMALISATIONS, "gdpo"]:
        assert parse_config({"train": {"advantage": advantage}}).train.advantage == advantage


@pytest.mark.parametrize(
    ("key", "value", "new_name"),
    [
        *((key, 1, new_name) for key, new_name in RENAMED_KEYS.items()),
        ("sampling.sde", "exact", "exact_sde"),
    ],
)
def test_an_old_name_is_refused_with_the_new_one(key, value, new_name):
    section, _, name = key.partition(".")
    message = rf"^{re.escape(key)} .*\bnow called {re.escape(new_name)}; rename it\.$"
    with pytest.raises(ConfigError, match=message):
        parse_config({section: {name: value}})
    with pytest.raises(ConfigError, match=message):
        parse_config({}, [f"{key}={value}"])


@pytest.mark.parametrize("new_name", RENAMED_KEYS.values())
def test_a_new_name_is_a_setting(new_name):
    section, _, name = new_name.partition(".")
    assert hasattr(getattr(parse_config({}), section), name)


def test_numbers_that_yaml_1_1_reads_as_text_are_numbers(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("train: {lr: 1e-4}\nobjective: {clip_range: 1e-5}")
    config = load_config(path, ["train.max_grad_norm=1e-3"])
    assert config.train.lr == 1e-4
    assert config.objective.clip_range == (1e-5, 1e-5)
    assert config.train.max_grad_norm == 1e-3


def test_a_duplicate_key_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("train: {epochs: 7}\ntrain: {lr: 1e-3}")
    with pytest.raises(ConfigError, match="train is set twice"):
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


def test_a_missing_file_and_one_without_a_mapping_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file"):
        load_config(tmp_path / "none.yaml")
    path = tmp_path / "list.yaml"
    path.write_text("- 1")
    with pytest.raises(ConfigError, match="holds a list"):
        load_config(path)
