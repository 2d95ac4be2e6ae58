"""Runs on tiny pipelines, for tests: from Python, and as files for the command line."""

import json
import sys

import pytest
import torch
from families import built
from families.family import SHORT

from flowgrpo import GRPOConfig, GRPOTrainer
from flowgrpo.cli import main

PROMPTS = ["a cat", "a dog", "a hen", "a cow", "a pig"]
REWARD = """
def redness(images, prompts, **columns):
    return [image.resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]
"""


def redness(images, prompts, **columns):
    return [image.resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]


def settings(folder, *, lr=1e-2, **changes):
    sampling = {
        "num_inference_steps": 5,
        "group_size": 4,
        "groups_per_epoch": 4,
        "window": 2,
        "call": {**SHORT, "guidance_scale": 1.5},
        **changes.pop("sampling", {}),
    }
    train = {"epochs": 2, "lr": lr, "lora": {"rank": 4, "alpha": 8}, **changes.pop("train", {})}
    options = {"checkpoint_every": 1, **changes}
    return GRPOConfig(output_dir=str(folder), sampling=sampling, train=train, **options)


def trainer(folder, *, pipe=None, reward=redness, resume=False, test=("a fox",), **changes):
    args = settings(folder, **changes)
    return GRPOTrainer(pipe or built("sd3"), reward, PROMPTS, list(test), args=args, resume=resume)


def metrics(folder, without=("seconds",)):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in without} for line in lines]


def move_weights_after_sampling(run):
    """Makes every replay of the run differ from its rollout."""
    sample = run.sample

    def disturbed(*arguments):
        samples = sample(*arguments)
        with torch.no_grad():
            for parameter in run.policy.parameters.values():
                parameter.add_(0.3)
        return samples

    run.sample = disturbed


def write_inputs(folder):
    """Writes a model, a reward and prompts: everything that a config names."""
    built("sd3").save_pretrained(folder / "model")
    (folder / "my_reward.py").write_text(REWARD)
    (folder / "train.txt").write_text("a cat\na dog\n")
    (folder / "test.txt").write_text("a fox\n")


def flowgrpo(*arguments):
    """Runs the command line in this process; returns its exit code."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", ["flowgrpo", *map(str, arguments)])
        try:
            main()
        except SystemExit as stop:
            return stop.code or 0
    return 0
