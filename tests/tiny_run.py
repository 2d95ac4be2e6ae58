"""A run on a tiny pipeline, for tests: what it trains, and its lines of metrics."""

import json

from families import built
from families.family import SHORT

from flowgrpo import GRPOConfig, GRPOTrainer

PROMPTS = ["a cat", "a dog", "a hen", "a cow", "a pig"]


def redness(images, prompts, **columns):
    return [image.resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]


def settings(folder, **changes):
    sampling = {
        "num_inference_steps": 5,
        "group_size": 4,
        "groups_per_epoch": 4,
        "window": 2,
        "call": {**SHORT, "guidance_scale": 1.5},
        **changes.pop("sampling", {}),
    }
    train = {"epochs": 2, "lr": 1e-2, "lora": {"rank": 4, "alpha": 8}, **changes.pop("train", {})}
    return GRPOConfig(
        output_dir=str(folder), checkpoint_every=1, sampling=sampling, train=train, **changes
    )


def trainer(folder, *, pipe=None, reward=redness, resume=False, test=("a fox",), **changes):
    args = settings(folder, **changes)
    return GRPOTrainer(pipe or built("sd3"), reward, PROMPTS, list(test), args=args, resume=resume)


def metrics(folder, without=("seconds",)):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in without} for line in lines]
