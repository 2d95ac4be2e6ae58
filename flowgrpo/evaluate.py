"""Evaluation: the stock sampler with the user's settings and the same noise each time."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from flowgrpo.config import GRPOConfig
from flowgrpo.media import Sample, save_sample
from flowgrpo.policy import Policy
from flowgrpo.processes import Processes
from flowgrpo.prompts import Row
from flowgrpo.randomness import seed_for
from flowgrpo.scoring import Reward

SCORES = "scores.json"


def evaluate(
    policy: Policy,
    rewards: Sequence[Reward],
    rows: Mapping[str, Sequence[Row]],
    config: GRPOConfig,
    folder: Path,
    processes: Processes | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> bool:
    """Generates every prompt with every seed, scores and saves the pictures and videos.

    One call holds one prompt with all its seeds, so the scores depend neither on the other prompts
    nor on the number of processes, which share the prompts out. `folder/scores.json` is written
    last: with it, the evaluation is whole, and `load_scores` reads it.

    Args:
        rows: prompt sets by name, `train_prompts` and `test_prompts`.
        stopping: asked before each prompt; where it says so, nothing is whole.

    Returns:
        Whether it is whole.
    """
    processes = processes or Processes()
    most = config.evaluation.max_prompts
    chosen = {name: evenly_spaced(every, most) for name, every in rows.items()}
    tasks = [(name, i) for name, some in chosen.items() for i in range(len(some))]
    scores: dict[str, dict[str, list[float]]] = {}
    own = processes.own(tasks, padded=policy.is_sharded)
    hidden = None if processes.first else True
    for name, number in tqdm(own, "evaluating", disable=hidden, leave=False):
        if stopping():
            break
        samples = _samples(policy, chosen[name][number], config)
        _save(samples, folder / name, number, config.evaluation.seeds, frame_rate(config))
        each = [chosen[name][number]] * len(samples)
        scores[f"{name} {number}"] = {r.name: r(samples, each).tolist() for r in rewards}
    found = {key: value for part in processes.gather(scores) for key, value in part.items()}
    if len(found) < len(tasks):
        return False
    result = {
        name: {r.name: [found[f"{name} {i}"][r.name] for i in range(len(some))] for r in rewards}
        for name, some in chosen.items()
        if some
    }
    if processes.first:
        prompts = {name: [row.prompt for row in chosen[name]] for name in result}
        data = {"seeds": config.evaluation.seeds, "prompts": prompts, "scores": result}
        write_whole(folder / SCORES, json.dumps(data))
    processes.wait()
    return True


def _samples(policy: Policy, row: Row, config: GRPOConfig) -> list[Sample]:
    noise = [initial_noise_seed(config.seed, row.prompt, s) for s in config.evaluation.seeds]
    return policy.generate(row, noise, config.evaluation_call)


def frame_rate(config: GRPOConfig, call: Mapping[str, Any] | None = None) -> float:
    """Of videos made with `call`, or evaluated ones: what the pipeline was told, where its call has
    a frame_rate."""
    return float((call or config.evaluation_call).get("frame_rate", config.fps))


def evenly_spaced(rows: Sequence[Row], most: int | None) -> list[Row]:
    """At most `most` of the rows, from all over the file: prompt files are often sorted."""
    if most is None or len(rows) <= most:
        return list(rows)
    return [rows[i * len(rows) // most] for i in range(most)]


def write_whole(path: Path, text: str) -> None:
    """A kill leaves the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def initial_noise_seed(run_seed: int, prompt: str, seed: int) -> int:
    """The same noise for the same prompt and seed, in evaluations and grids alike."""
    return seed_for(run_seed, "evaluation", prompt, seed)


def load_scores(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Scores (prompts, seeds) by set and reward name, as `evaluate` wrote them."""
    data = json.loads((folder / SCORES).read_text())["scores"]
    return {
        name: {
            reward: torch.tensor(values, dtype=torch.float64) for reward, values in scores.items()
        }
        for name, scores in data.items()
    }


def _save(
    samples: Sequence[Sample], folder: Path, number: int, seeds: Sequence[int], fps: float
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for sample, seed in zip(samples, seeds, strict=True):
        save_sample(sample, sample_path(folder, number, seed), fps)


def sample_path(folder: Path, number: int, seed: int) -> Path:
    """The PNG of one sample of a prompt set's folder; `media.load_sample` opens it."""
    return folder / f"{number:04d}-seed{seed}.png"
