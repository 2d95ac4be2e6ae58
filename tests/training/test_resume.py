"""A resumed run equals one that was never stopped, or is refused."""

import pytest
import torch
from tiny_run import metrics, redness, trainer

from flowgrpo import ConfigError


def optimizer_state(run):
    return {
        f"{name}.{key}": value
        for name, parameter in run.policy.parameters.items()
        for key, value in run.learner.optimizer.state[parameter].items()
    }


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    options = {
        "objective": {"kl_weight": 0.01},
        "train": {"epochs": 4, "ema": 0.9},
        "sampling": {"window": {"size": 2}},
    }
    straight = trainer(tmp_path / "straight", **options)
    straight.train()

    class Killed(BaseException):
        pass

    calls = []

    def killing(images, prompts, **columns):
        calls.append(1)
        if len(calls) == 18:  # in the middle of epoch 3
            raise Killed
        return redness(images, prompts)

    killing.__name__ = "redness"
    with pytest.raises(Killed):
        trainer(tmp_path / "resumed", reward=killing, **options).train()
    resumed = trainer(tmp_path / "resumed", resume=True, **options)
    assert 0 < resumed.state.epoch < 4
    resumed.train()

    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "straight")
    for name, parameter in straight.policy.parameters.items():
        assert torch.equal(parameter, resumed.policy.parameters[name]), name
        assert torch.equal(straight.learner.average[name], resumed.learner.average[name])
    assert optimizer_state(straight).keys() == optimizer_state(resumed).keys()
    for name, value in optimizer_state(straight).items():
        assert torch.equal(value, optimizer_state(resumed)[name]), name


def test_a_damaged_newest_checkpoint_is_skipped_with_a_message(tmp_path, capsys):
    trainer(tmp_path / "run").train()
    state = tmp_path / "run" / "checkpoints" / "epoch-0002" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-10])
    resumed = trainer(tmp_path / "run", resume=True)
    assert resumed.state.epoch == 1
    assert "epoch-0002 is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["inputs.json", "config.yaml"])
def test_a_resume_misses_the_files_that_say_what_the_run_is(tmp_path, name):
    trainer(tmp_path / "run", train={"epochs": 1}).train()
    (tmp_path / "run" / name).write_text("{")
    with pytest.raises(ConfigError, match=f"{name} cannot be read .* identifies the run to resume"):
        trainer(tmp_path / "run", resume=True, train={"epochs": 2})


def test_a_resume_with_another_setting_names_it(tmp_path):
    trainer(tmp_path / "run", train={"epochs": 1}).train()
    with pytest.raises(ConfigError, match=r"train.lr was 0.01 and is 0.02"):
        trainer(tmp_path / "run", resume=True, train={"epochs": 2, "lr": 2e-2})
    more = trainer(tmp_path / "run", resume=True, train={"epochs": 2})
    assert more.state.epoch == 1


def test_a_resume_before_the_first_checkpoint_refuses_other_settings_too(tmp_path):
    run = trainer(tmp_path / "run")
    run.folder.begin(run.config, run.inputs.fingerprint, 0)
    run.evaluate(0)
    with pytest.raises(ConfigError, match="seed was 0 and is 9"):
        trainer(tmp_path / "run", resume=True, seed=9)
    assert trainer(tmp_path / "run", resume=True).state.epoch == 0


def test_a_resume_with_other_prompts_or_rewards_is_refused(tmp_path):
    trainer(tmp_path / "run", train={"epochs": 1}).train()
    with pytest.raises(ConfigError, match="test_prompts was"):
        trainer(tmp_path / "run", resume=True, test=["an owl"], train={"epochs": 2})

    def other(images, prompts, **columns):
        return redness(images, prompts)

    with pytest.raises(ConfigError, match=r"rewards.other was None"):
        trainer(tmp_path / "run", resume=True, reward=other, train={"epochs": 2})


def test_a_metrics_file_that_a_kill_cut_short_is_read_up_to_there(tmp_path):
    trainer(tmp_path / "run", train={"epochs": 1}).train()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "rew')
    trainer(tmp_path / "run", resume=True, train={"epochs": 2}).train()
    assert [line["epoch"] for line in metrics(tmp_path / "run")] == [1, 2]


def test_a_resume_of_a_run_with_old_names_of_settings_says_so(tmp_path):
    trainer(tmp_path / "run", train={"epochs": 1}).train()
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("optimizer: adamw", "optimiser: adamw"))
    with pytest.raises(ConfigError, match=r"an earlier version .* \(train\.optimiser\); finish it"):
        trainer(tmp_path / "run", resume=True, train={"epochs": 2})
