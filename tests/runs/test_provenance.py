"""A run folder records how its run was made: enough to repeat it, and nothing that is not true."""

import json
import os
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from families import built
from families.family import SHORT
from PIL import Image
from safetensors.torch import load_file, save_file

import flowgrpo
import rewards
from flowgrpo import GRPOConfig, GRPOTrainer
from flowgrpo.runs import environment
from flowgrpo.runs.provenance import differences, record_start, starts, unrecorded_arguments
from flowgrpo.scoring.loading import as_rewards, load_rewards

REWARD = """
def redness(images, prompts, **columns):
    return [image.resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]
"""


def redness(images, prompts, **columns):
    return [0.0] * len(images)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A working directory with a model's files, prompts and a reward, named by relative paths."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model" / "transformer").mkdir(parents=True)
    (tmp_path / "model" / "model_index.json").write_text("{}")
    weights = {"a": torch.zeros(2**19), "b": torch.zeros(3)}
    save_file(weights, tmp_path / "model" / "transformer" / "model.safetensors")
    (tmp_path / "train.txt").write_text("a cat\na dog\n")
    (tmp_path / "my_reward.py").write_text(REWARD)
    return tmp_path


def config(**changes):
    given = {"model": {"path": "model"}, "reward": "my_reward.py:redness", **changes}
    return GRPOConfig(output_dir="run", prompts={"train": "train.txt"}, **given)


def record(settings, folder, **options):
    folder.mkdir(exist_ok=True)
    record_start(folder, settings, load_rewards(settings.rewards), **{"epoch": 0, **options})
    return starts(folder)[-1]


def test_a_start_records_its_inputs_and_its_environment(world, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("WANDB_API_KEY", "a secret")
    start = record(config(), world / "run")
    assert start["directory"] == str(world)
    assert start["command"] == sys.orig_argv
    assert start["time"].endswith("+00:00")
    assert start["environment"]["OMP_NUM_THREADS"] == "1"
    assert "a secret" not in (world / "run" / "starts.jsonl").read_text()
    assert start["machine"]["threads"] == torch.get_num_threads()
    for package in ("python", "torch", "diffusers", "peft", "numpy", "pillow", "onnxruntime"):
        assert start["versions"][package][0].isdigit(), package
    assert start["files"]["prompts.train"]["train.txt"]["size"] == 12
    assert start["files"]["rewards"].keys() == {str(world / "my_reward.py")}
    model = start["files"]["model"]
    assert len(model["model/model_index.json"]["sha256"]) == 64
    assert len(model["model/transformer/model.safetensors"]["header_sha256"]) == 64


def test_a_model_from_the_hub_is_recorded_by_its_snapshot(world, monkeypatch):
    cache = world / "cache"
    repository = cache / "models--someone--something"
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    (snapshot / "model_index.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    start = record(config(model={"path": "someone/something"}), world / "run")
    assert start["files"]["model"].keys() == {str(snapshot / "model_index.json")}


def test_every_start_adds_a_line(world):
    record(config(), world / "run")
    record(config(), world / "run", epoch=4, processes=2)
    first, second = starts(world / "run")
    assert (first["epoch"], first["processes"]) == (0, 1)
    assert (second["epoch"], second["processes"]) == (4, 2)
    assert second["repeat"].startswith("torchrun --nproc-per-node 2 -m flowgrpo.cli train ")


def test_nothing_has_changed_right_after_a_start(world):
    record(config(), world / "run")
    assert differences(world / "run") == []
    assert differences(world / "none") == []


def test_changed_and_removed_files_are_reported_in_sentences(world, monkeypatch):
    record(config(), world / "run")
    record(config(), world / "run", epoch=4)
    monkeypatch.chdir("/")
    (world / "train.txt").write_text("a hen\na dog\n")
    (world / "my_reward.py").unlink()
    save_file({"a": torch.zeros(2**19 + 3)}, world / "model" / "transformer" / "model.safetensors")
    assert differences(world / "run") == [
        "train.txt (prompts.train) changed since the run started.",
        f"{world / 'my_reward.py'} (rewards) disappeared since the run started.",
        "model/transformer/model.safetensors (model) changed since the run started.",
    ]


def test_a_run_that_started_over_in_the_folder_is_compared_with_its_own_start(world):
    record(config(), world / "run")
    (world / "train.txt").write_text("a hen\na dog\n")
    record(config(), world / "run")
    assert differences(world / "run") == []


def test_other_versions_and_other_code_are_one_sentence(world):
    record(config(), world / "run")
    (start,) = starts(world / "run")
    torch_now = start["versions"]["torch"]
    start["versions"] |= {"torch": "1.0", "gone-package": "2.0"}
    start["flowgrpo"]["sha256"] = "0" * 64
    (world / "run" / "starts.jsonl").write_text(json.dumps(start) + "\n")
    assert differences(world / "run") == [
        f"torch was 1.0 and is {torch_now}, gone-package was 2.0 and is not installed, the code of "
        "flowgrpo changed since the run started."
    ]


def test_a_checkout_has_a_commit_and_other_folders_have_none(tmp_path, monkeypatch):
    def git(*command):
        name = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", "-C", tmp_path, *name, *command], check=True, capture_output=True)

    monkeypatch.setattr(environment, "ROOT", tmp_path)
    (tmp_path / "flowgrpo").mkdir()
    (tmp_path / "flowgrpo" / "__init__.py").write_text("")
    assert environment.checkout()["commit"] is None
    git("init")
    git("commit", "--allow-empty", "-m", "another project's")
    assert environment.checkout()["commit"] is None
    git("add", ".")
    git("commit", "-m", "own")
    clean = environment.checkout()
    assert len(clean["commit"]) == 40
    assert clean["changed"] is False
    (tmp_path / "flowgrpo" / "__init__.py").write_text("changed = 1")
    changed = environment.checkout()
    assert changed["changed"] is True
    assert changed["sha256"] != clean["sha256"]


def test_the_root_holds_both_packages():
    assert Path(flowgrpo.__file__).parent == environment.ROOT / "flowgrpo"
    assert Path(rewards.__file__).parent == environment.ROOT / "rewards"


def test_a_machine_without_git_is_no_error(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert environment.checkout()["commit"] is None


def test_arguments_that_no_config_holds_are_named():
    settings = config()
    paths = {"model": "model", "train_dataset": "train.txt", "eval_dataset": None}
    assert unrecorded_arguments(settings, **paths, reward_funcs=None) == []
    objects = {"model": object(), "train_dataset": ["a cat"], "reward_funcs": "ocr"}
    assert unrecorded_arguments(settings, **objects) == ["model", "train_dataset", "reward_funcs"]
    with_image = config(sampling={"call": {"image": Image.new("RGB", (4, 4))}})
    assert unrecorded_arguments(with_image) == ["args"]


def test_a_reward_is_recorded_by_the_file_that_defines_it(world):
    class Callable:
        def __call__(self, images, prompts, **columns):
            return [0.0] * len(images)

    for function in (redness, partial(redness), lambda images, prompts: [0.0], Callable()):
        (world / "run").mkdir(exist_ok=True)
        record_start(world / "run", config(), as_rewards(function), epoch=0)
        assert starts(world / "run")[-1]["files"]["rewards"].keys() == {__file__}
    record_start(world / "run", config(), as_rewards(partial(max)), epoch=0)
    assert "rewards" not in starts(world / "run")[-1]["files"]


def test_a_run_made_from_python_objects_has_no_command_that_repeats_it(tmp_path):
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        sampling={"num_inference_steps": 3, "call": {**SHORT, "guidance_scale": 1.0}},
        train={"epochs": 0, "lora": {"rank": 4, "alpha": 8}},
    )
    reward = as_rewards(lambda images, prompts: [i.getpixel((0, 0))[0] / 255 for i in images])
    GRPOTrainer(built("sd3"), reward, ["a cat"], args=args).train()
    (start,) = starts(tmp_path / "run")
    assert start["objects"] == ["model", "reward_funcs", "train_dataset"]
    assert start["repeat"] is None


def command_line(*arguments, directory, **variables):
    """Runs `flowgrpo` from this checkout in a new process."""
    code = f"import sys; sys.path.insert(0, {str(environment.ROOT)!r}); "
    code += "from flowgrpo.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=directory,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_run_folder_alone_repeats_its_run_bit_for_bit(tmp_path):
    (tmp_path / "home").mkdir()
    built("sd3").save_pretrained(tmp_path / "home" / "model")
    (tmp_path / "home" / "train.txt").write_text("a cat\na dog\n")
    (tmp_path / "home" / "my_reward.py").write_text(REWARD)
    settings = {
        "output_dir": "run",
        "model": {"path": "model"},
        "prompts": {"train": "train.txt"},
        "reward": "my_reward.py:redness",
        "sampling": {
            "num_inference_steps": 3,
            "group_size": 4,
            "groups_per_epoch": 2,
            "call": {**SHORT, "guidance_scale": 1.0},
        },
        "train": {"epochs": 2, "lr": 0.01, "lora": {"rank": 4, "alpha": 8}},
        "trackers": ["tensorboard"],
    }
    (tmp_path / "home" / "config.yaml").write_text(yaml.safe_dump(settings))
    changed = ["train", "config.yaml", "seed=3"]
    command_line(*changed, directory=tmp_path / "home", OMP_NUM_THREADS="1")

    run = tmp_path / "home" / "run"
    (start,) = starts(run)
    program, *arguments = shlex.split(start["repeat"])
    assert program == "flowgrpo"
    command_line(*arguments, directory=start["directory"], **start["environment"])
    again = tmp_path / "home" / "run-again"

    assert len(metrics(run)) == 2
    assert metrics(again) == metrics(run)
    (lora,) = run.glob("lora/*.safetensors")
    assert contents(again / "lora" / lora.name) == contents(lora)
    assert list(run.glob("tensorboard/events*"))
    assert differences(run) == []


def contents(path):
    """Bytes by tensor; the bytes of the file itself hold metadata in no fixed order."""
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
