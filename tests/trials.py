"""Trials: a run that is killed and resumed must end like an uninterrupted run."""

import json
import math
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from families.family import SHORT
from faults import RUN, Ended, Event, Point, in_a_process, train
from tiny_run import write_inputs

from flowgrpo.core.config_file import load_config
from flowgrpo.runs.provenance import STARTS
from flowgrpo.training.trainer import GRPOTrainer

VOLATILE = {"seconds"}
"""Keys of JSON files in which two equal runs may differ."""
CAUSES = ("file", "model", "file", "reward", "file", "size", "model", "timer", "file", "model")
"""Causes of death in ten trials: an event at which SIGKILL is sent, a file size, or a timer."""
MAX_TIMER = 0.01
"""Longest time in seconds from a change in a checkpoint folder to a timed death: about one save."""

REWARD = """
import faults

def redness(images, prompts, **columns):
    faults.reward_called(prompts[0])
    return [image.resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]
"""


@dataclass(kw_only=True)
class Trial:
    """The outcome of a run that was killed and resumed."""

    points: list[Point]
    """Points at which the run was killed."""
    deaths: list[Ended]
    """Outcome of each killed process."""
    wrong: list[str]
    """Names of files that differ from those of an uninterrupted run."""


class Trials:
    """Compares killed and resumed runs of one config with an uninterrupted one.

    Args:
        folder: new folder for all files.
        overrides: settings to change in the config.
        seed: seed of the random points.
    """

    def __init__(self, folder: Path, *overrides: str, seed: int = 0):
        self.folder, self.overrides, self.seed = folder, overrides, seed
        self.config = make_world(folder / "world")
        uninterrupted = folder / "uninterrupted"
        ended = train(self.config, uninterrupted, *overrides)
        assert ended.code == 0, ended.stderr
        self.events = ended.events
        self.expected = contents(uninterrupted / RUN)
        states = (uninterrupted / RUN / "checkpoints").glob("*/state.safetensors")
        self.largest = max(path.stat().st_size for path in states)
        self.rollouts = self._next_rollouts(uninterrupted)

    def trial(self, number: int) -> Trial:
        """Kills a run at the points drawn for `number`, resumes it, and compares the result."""
        points = self.draw(number)
        folder = self.folder / f"trial-{number}"
        deaths = [self.run(folder, point) for point in points]
        wrong = self.finish(folder)
        shutil.rmtree(folder)
        return Trial(points=points, deaths=deaths, wrong=wrong)

    def draw(self, number: int) -> list[Point]:
        """Draws the points of a trial; every fourth trial has a second one, in the resumed run."""
        generator = random.Random(f"{self.seed}/{number}")
        points = [self._draw(generator, CAUSES[number % len(CAUSES)])]
        if number % 4 == 3:
            event: Event = generator.choice(["file", "model"])
            early = len(self.events[event]) // 4
            points.append(Point(event=event, at=generator.randint(1, early)))
        return points

    def run(self, folder: Path, point: Point | None = None) -> Ended:
        """Starts or resumes the run in `folder`."""
        return train(self.config, folder, *self.overrides, point=point)

    def at(self, ending: str, occurrence: int = 0) -> int:
        """Number of the file event of the uninterrupted run whose description has this ending."""
        events = enumerate(self.events["file"], 1)
        return [number for number, event in events if event.endswith(ending)][occurrence]

    def finish(self, folder: Path) -> list[str]:
        """Resumes the run in `folder` to its end; returns its `differences`, or its stderr."""
        ended = self.run(folder)
        return self.differences(folder) if ended.code == 0 else [ended.stderr]

    def differences(self, folder: Path) -> list[str]:
        """Names the files of a finished run that differ from those of the uninterrupted one."""
        found = contents(folder / RUN)
        names = found.keys() | self.expected.keys()
        wrong = sorted(n for n in names if found.get(n) != self.expected.get(n))
        if not wrong and self._next_rollouts(folder) != self.rollouts:
            wrong.append("rollouts of the next epoch")
        return wrong

    def _draw(self, generator: random.Random, cause: Any) -> Point:
        if cause == "size":
            at = generator.randint(1, len(self.events["model"]))
            size = math.exp(generator.uniform(math.log(64), math.log(self.largest)))
            return Point(event="model", at=at, deed="size", amount=int(size))
        if cause == "timer":
            saving = [
                i for i, event in enumerate(self.events["file"], 1) if "checkpoints/" in event
            ]
            seconds = generator.uniform(0, MAX_TIMER)
            return Point(event="file", at=generator.choice(saving), deed="timer", amount=seconds)
        return Point(event=cause, at=generator.randint(1, len(self.events[cause])))

    def _next_rollouts(self, folder: Path) -> list[bytes]:
        """Pixels of the rollouts with which the finished run in `folder` would continue."""
        arguments = (folder, self.config, self.overrides)
        messages, stderr, code = in_a_process(_sample_next_epoch, *arguments)
        assert code == 0, stderr[-1000:]
        return messages[0]


def make_world(folder: Path) -> Path:
    """Writes a tiny pipeline, prompts and a reward; returns the path of a four-epoch config."""
    write_inputs(folder)
    (folder / "my_reward.py").write_text(REWARD)
    config = {
        "output_dir": RUN,
        "checkpoint_every": 1,
        "checkpoint_keep": 2,
        "model": {"path": str(folder / "model")},
        "prompts": {"train": str(folder / "train.txt"), "test": str(folder / "test.txt")},
        "reward": f"{folder}/my_reward.py:redness",
        "sampling": {
            "num_inference_steps": 3,
            "group_size": 2,
            "groups_per_epoch": 2,
            "window": 1,
            "call": {**SHORT, "guidance_scale": 1.0},
        },
        "train": {
            "epochs": 4,
            "lr": 1e-2,
            "updates_per_epoch": 2,
            "lora": {"rank": 2, "alpha": 4},
            "ema": 0.9,
        },
        "objective": {"kl_weight": 0.01},
        "evaluation": {"every": 2, "max_prompts": 1},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def contents(folder: Path) -> dict[str, Any]:
    """Contents of the files of a run folder, by name; those of JSON without its volatile keys.

    The record of starts is left out, since it has a line per start.
    """
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != STARTS]
    return {str(path.relative_to(folder)): _content(path) for path in files}


def _content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return _tensors(path.read_bytes())
    if path.suffix == ".jsonl":
        return [_stable(json.loads(line)) for line in path.read_text().splitlines()]
    if path.suffix != ".json":
        return path.read_bytes()
    content = _stable(json.loads(path.read_text()))
    if path.name == "manifest.json":
        content["files"] = sorted(
            content["files"]
        )  # hashes differ for the reason given in `_tensors`
    return content


def _tensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file.

    Metadata are parsed, since they and peft's set of target modules have no fixed order.
    """
    length = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:length])
    adapter = json.loads(header.get("__metadata__", {}).pop("lora_adapter_metadata", "{}"))
    unordered = {k: sorted(v) if isinstance(v, list) else v for k, v in adapter.items()}
    return {**header, "adapter": unordered}, data[length:]


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _stable(inner) for name, inner in value.items() if name not in VOLATILE}
    return value


def _sample_next_epoch(report: Any, config: Path, overrides: tuple[str, ...]) -> None:
    run = GRPOTrainer(args=load_config(config, list(overrides)), resume=True)
    groups = run.sample(run.plan.groups(run.state.epoch))
    images = [image for group in groups for rollout in group.rollouts for image in rollout.samples]
    report.send([image.tobytes() for image in images])
