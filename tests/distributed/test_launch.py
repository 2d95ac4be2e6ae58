"""The launchers that people use: torchrun on two machines, and accelerate."""

import json
import os
import socket
import subprocess
import sys

import pytest
import yaml
from families import built
from together import settings

REWARD = """
def redness(images, prompts, **columns):
    return [image.resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with all that a run needs, and its metrics in one process."""
    folder = tmp_path_factory.mktemp("world")
    built("sd3").save_pretrained(folder / "model")
    (folder / "my_reward.py").write_text(REWARD)
    (folder / "train.txt").write_text("a cat\na dog\n")
    config = settings("run", train={"epochs": 1, "updates_per_epoch": 1}).model_dump(mode="json")
    config |= {"prompts": {"train": "train.txt"}, "rewards": [{"reward": "my_reward.py:redness"}]}
    config["model"]["path"] = "model"
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    ended([start(folder, "alone", [sys.executable, "-m"])])
    return folder


def start(folder, name, launcher):
    command = [*launcher, "flowgrpo.cli", "train", "config.yaml", f"output_dir={name}"]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(processes):
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)
    return said


def metrics(folder):
    (line,) = (folder / "metrics.jsonl").read_text().splitlines()
    return {k: v for k, v in json.loads(line).items() if k not in ("seconds", "weights_checksum")}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == (value if isinstance(value, dict) else pytest.approx(value, rel=1e-5))


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def test_two_machines_meet_and_train_as_one_process(world):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=x"]
    said = ended([start(world, "two", [*launcher, *meeting, "-m"]) for _ in range(2)])
    same(metrics(world / "two"), metrics(world / "alone"))
    (line,) = (world / "two" / "starts.jsonl").read_text().splitlines()
    assert json.loads(line)["processes"] == 2
    assert sum("Use it with plain diffusers" in text for text in said) == 1


def test_accelerate_launches_it(world):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    settings = ["--num_processes=2", "--num_machines=1", "--mixed_precision=no"]
    port = f"--main_process_port={free_port()}"
    ended([start(world, "accelerated", [*launcher, *settings, "--dynamo_backend=no", port, "-m"])])
    same(metrics(world / "accelerated"), metrics(world / "alone"))
    assert os.listdir(world / "accelerated" / "lora")
