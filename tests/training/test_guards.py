"""A run that goes wrong ends with a named reason, before harm is done, or goes back and on."""

import json
import re
import sys

import pytest
import torch
from pydantic import ValidationError
from tiny_run import move_weights_after_sampling
from together import redness, settings, trainer

from flowgrpo.core.config_file import parse_config
from flowgrpo.core.errors import ConfigError, RunStopped
from flowgrpo.core.files import epoch_folders
from flowgrpo.core.train_config import GuardsConfig
from flowgrpo.training.guards import findings

FINE = {"tied_groups": 0.5, "velocity_rms": 1.0, "kl": 0.1}


def lines(*changes):
    return [{"epoch": n, **FINE, **change} for n, change in enumerate(changes, start=1)]


@pytest.mark.parametrize(
    ("history", "guards", "reasons"),
    [
        (lines({}, {}), {}, []),
        (lines({}, {"flat_images": 1.0}), {}, ["constant_images"]),
        (lines({}, {"flat_images": 0.9}), {}, []),
        (lines({"tied_groups": 1.0}, {"tied_groups": 1.0}), {"dead_epochs": 2}, ["dead_rewards"]),
        (lines({"tied_groups": 1.0}, {"tied_groups": 0.9}), {"dead_epochs": 2}, []),
        (lines({"tied_groups": 1.0}), {"dead_epochs": 2}, []),
        (lines({}, {"kl": 0.3}), {"max_kl": 0.2}, ["kl"]),
        (lines({"kl": 0.3}, {}), {"max_kl": 0.2}, []),
        (lines({}, {"velocity_rms": 1.6}), {"max_velocity_growth": 1.5}, ["velocity"]),
        (lines({"velocity_rms": 2.0}, {"velocity_rms": 2.9}), {"max_velocity_growth": 1.5}, []),
        (lines({}, {"flat_images": 1.0}), {"constant_images": "off"}, []),
        (
            lines({}, {"flat_images": 1.0, "kl": 1.0}),
            {"constant_images": "warn", "max_kl": 0.5},
            ["kl", "constant_images"],
        ),
    ],
)
def test_findings_are_named_and_the_worst_comes_first(history, guards, reasons):
    found = findings(history, GuardsConfig(**guards))
    assert [finding.reason for finding in found] == reasons
    assert all(finding.message.endswith(".") for finding in found)


def test_a_bound_on_what_is_not_measured_is_refused():
    with pytest.raises(ConfigError, match="only measured with objective"):
        parse_config({"guards": {"max_kl": 0.1}})


def test_a_guard_cannot_be_misspelt():
    with pytest.raises((ConfigError, ValidationError)):
        parse_config({"guards": {"kl": "ignore"}})


def stopped(folder):
    return json.loads((folder / "summary.json").read_text())["stopped"]


def dead(images, prompts, **columns):
    return [0.0] * len(images)


def test_rewards_that_never_differ_stop_the_run_by_name(tmp_path):
    guards = {"dead_epochs": 2}
    with pytest.raises(RunStopped, match="all rewards of each group have been equal for 2 epochs"):
        trainer(tmp_path / "run", reward=dead, train={"epochs": 9}, guards=guards).train()
    assert stopped(tmp_path / "run") == {
        "reason": "dead_rewards",
        "message": stopped(tmp_path / "run")["message"],
        "epoch": 2,
        "checkpoint": "epoch-0001",
    }


def test_the_limit_of_dead_epochs_counts_those_before_a_resume(tmp_path):
    guards = {"dead_epochs": 3}
    trainer(tmp_path / "run", reward=dead, train={"epochs": 2}, guards=guards).train()
    run = trainer(tmp_path / "run", reward=dead, train={"epochs": 9}, guards=guards, resume=True)
    with pytest.raises(RunStopped):
        run.train()
    assert stopped(tmp_path / "run")["epoch"] == 3


def test_a_warning_goes_on(tmp_path, capsys):
    guards = {"dead_epochs": 1, "dead_rewards": "warn"}
    trainer(tmp_path / "run", reward=dead, train={"epochs": 2}, guards=guards).train()
    assert capsys.readouterr().err.count("warning: all rewards of each group") == 2


def test_images_of_one_colour_stop_the_run(tmp_path, monkeypatch):
    run = trainer(tmp_path / "run")
    decode = run.policy.pipe.vae.decode

    def black(latents, **kwargs):
        (decoded,) = decode(latents, **kwargs)
        return (torch.full_like(decoded, -1.0),)

    monkeypatch.setattr(run.policy.pipe.vae, "decode", black)
    with pytest.raises(RunStopped, match="every image of epoch 1 has a single colour"):
        run.train()
    assert stopped(tmp_path / "run")["reason"] == "constant_images"
    assert epoch_folders(tmp_path / "run" / "checkpoints") == []


@pytest.mark.parametrize(
    ("guards", "reason"),
    [({"max_kl": 1e-9}, "kl"), ({"max_velocity_growth": 1.0001}, "velocity")],
)
def test_a_policy_that_runs_away_stops(tmp_path, guards, reason):
    train, objective = {"epochs": 9, "lr": 0.3}, {"kl_weight": 1e-6}
    with pytest.raises(RunStopped):
        trainer(tmp_path / "run", train=train, objective=objective, guards=guards).train()
    assert stopped(tmp_path / "run")["reason"] == reason


def spoilt_once(run, epoch, value):
    """The gradient of one weight is `value` in an epoch, the first time that it comes there."""
    met = []

    def spoil(gradient):
        if run.state.epoch == epoch and len(met) < 2:
            met.append(epoch)
            return gradient * value
        return gradient

    next(iter(run.policy.parameters.values())).register_hook(spoil)


def test_a_gradient_that_is_not_finite_leaves_weights_and_moments_as_they_were(tmp_path):
    options = {"train": {"epochs": 3, "updates_per_epoch": 1, "ema": 0.9}}
    run = trainer(tmp_path / "run", **options)
    spoilt_once(run, 1, float("nan"))
    with pytest.raises(RunStopped, match="the gradient of an update is nan"):
        run.train()
    assert stopped(tmp_path / "run")["reason"] == "gradient_not_finite"
    good = trainer(tmp_path / "run", resume=True, **options)
    assert good.state.epoch == 1
    mine, saved = run.learner.state_dict(), good.learner.state_dict()
    assert all(torch.equal(mine[name], value) for name, value in saved.items())


def test_latents_that_are_not_finite_stop_before_an_update(tmp_path):
    run = trainer(tmp_path / "run")
    sample = run.sample

    def spoilt(*arguments):
        with torch.no_grad():
            next(iter(run.policy.parameters.values())).fill_(float("inf"))
        return sample(*arguments)

    run.sample = spoilt
    with pytest.raises(RunStopped, match=r"latents of prompt .* are not finite"):
        run.train()
    assert stopped(tmp_path / "run")["reason"] == "latents_not_finite"
    assert not run.learner.optimizer.state


def test_a_rollback_goes_on_from_the_last_good_checkpoint_with_a_lower_rate(tmp_path, capsys):
    options = {"train": {"epochs": 3, "updates_per_epoch": 1}, "guards": {"rollbacks": 2}}
    run = trainer(tmp_path / "run", **options)
    spoilt_once(run, 1, float("nan"))
    run.train()
    assert "went back to epoch 1 with 0.5 times the learning rate" in capsys.readouterr().err
    assert run.state.rollbacks == 1
    assert run.learner.optimizer.param_groups[0]["lr"] == pytest.approx(0.5e-4)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line).get("rollbacks") for line in lines] == [None, 1, 1]
    again = trainer(tmp_path / "run", resume=True, **options)
    assert again.learner.optimizer.param_groups[0]["lr"] == pytest.approx(0.5e-4)


def test_a_rollback_goes_behind_the_weights_that_sampled_what_is_wrong(tmp_path, capsys):
    guards = {"max_velocity_growth": 1.05, "rollbacks": 1}
    run = trainer(tmp_path / "run", train={"epochs": 5, "lr": 0.1}, guards=guards)
    with pytest.raises(RunStopped, match="times as large in epoch"):
        run.train()
    back = capsys.readouterr().err.split("went back to epoch ")
    (found,) = re.findall(r"in epoch (\d) as in", back[0])
    assert int(back[1][0]) == int(found) - 2
    assert stopped(tmp_path / "run")["epoch"] > int(found) - 1


def test_rollbacks_come_to_an_end(tmp_path):
    run = trainer(tmp_path / "run", guards={"rollbacks": 2}, train={"epochs": 3})
    next(iter(run.policy.parameters.values())).register_hook(
        lambda g: g * float("nan") if run.state.epoch == 0 else g
    )
    with pytest.raises(RunStopped):
        run.train()
    assert run.state.rollbacks == 2
    assert stopped(tmp_path / "run")["checkpoint"] == "epoch-0000"


def test_replay_noise_warns_where_it_may(tmp_path, capsys):
    options = {"guards": {"replay": "warn"}, "train": {"epochs": 1}}
    run = trainer(tmp_path / "run", **options)
    move_weights_after_sampling(run)
    run.train()
    assert capsys.readouterr().err.count("away from its rollout before any update") == 1


def test_the_command_line_ends_with_one_sentence_and_a_code(tmp_path, monkeypatch, capsys):
    import yaml
    from families import built

    from flowgrpo.cli import main

    built("sd3").save_pretrained(tmp_path / "model")
    (tmp_path / "r.py").write_text(
        "def dead(images, prompts, **columns):\n    return [0.0] * len(images)\n"
    )
    config = settings(tmp_path / "run").model_dump(mode="json")
    config |= {
        "model": {"path": str(tmp_path / "model")},
        "prompts": {"train": str(tmp_path / "p.txt")},
        "rewards": [{"reward": f"{tmp_path}/r.py:dead"}],
        "guards": {"dead_epochs": 1},
    }
    (tmp_path / "p.txt").write_text("a cat\n")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(sys, "argv", ["flowgrpo", "train", str(tmp_path / "c.yaml")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "flowgrpo:" in line]
    assert line.startswith("flowgrpo: all rewards of each group have been equal for 1 epochs")


def test_nothing_stops_a_run_that_is_fine(tmp_path):
    guards = {"max_velocity_growth": 1.5, "max_kl": 1.0, "dead_epochs": 1}
    trainer(tmp_path / "run", guards=guards, objective={"kl_weight": 1e-3}, reward=redness).train()
    assert "stopped" not in json.loads((tmp_path / "run" / "summary.json").read_text())
