"""The launchers of users: torchrun on two machines, and accelerate."""

import json
import os
import subprocess
import sys

import pytest
import yaml
from tiny_run import write_inputs
from together import free_port, settings


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with everything that a run needs, and a run of one process in it."""
    folder = tmp_path_factory.mktemp("world")
    write_inputs(folder)
    config = settings("run", train={"epochs": 1, "updates_per_epoch": 1}).model_dump(mode="json")
    config |= {"prompts": {"train": "train.txt"}, "rewards": [{"reward": "my_reward.py:redness"}]}
    config["model"]["path"] = "model"
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    wait([start(folder, "alone", [sys.executable, "-m"])])
    return folder


def start(folder, name, launcher):
    command = [*launcher, "flowgrpo.cli", "train", "config.yaml", f"output_dir={name}"]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait(processes):
    """Waits until all have succeeded; returns the output of each."""
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == [0] * len(processes), "\n".join(outputs)
    return outputs


def metrics(folder):
    (line,) = (folder / "metrics.jsonl").read_text().splitlines()
    return {k: v for k, v in json.loads(line).items() if k not in ("seconds", "weights_checksum")}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == (value if isinstance(value, dict) else pytest.approx(value, rel=1e-5))


def test_two_machines_train_as_one_process(world):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=x"]
    outputs = wait([start(world, "two", [*launcher, *rendezvous, "-m"]) for _ in range(2)])
    assert_same(metrics(world / "two"), metrics(world / "alone"))
    (line,) = (world / "two" / "starts.jsonl").read_text().splitlines()
    assert json.loads(line)["processes"] == 2
    assert sum("Use it with plain diffusers" in text for text in outputs) == 1


def test_two_processes_of_accelerate_train_as_one_process(world):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    settings = ["--num_processes=2", "--num_machines=1", "--mixed_precision=no"]
    port = f"--main_process_port={free_port()}"
    wait([start(world, "accelerated", [*launcher, *settings, "--dynamo_backend=no", port, "-m"])])
    assert_same(metrics(world / "accelerated"), metrics(world / "alone"))
    assert os.listdir(world / "accelerated" / "lora")
