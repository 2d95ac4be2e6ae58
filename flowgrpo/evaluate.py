"""Evaluation: the stock sampler with the user's settings and the same noise each time."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from flowgrpo.config import GRPOConfig
from flowgrpo.media import Sample, save_sample
from flowgrpo.policy import Policy
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
) -> dict[str, dict[str, Tensor]]:
    """Generates every prompt with every seed, scores and saves the pictures and videos.

    One call holds one prompt with all its seeds, so the scores depend neither on the other prompts
    nor on the number of processes. `folder/scores.json` is written last: with it, the evaluation is
    whole.

    Args:
        rows: prompt sets by name, `train_prompts` and `test_prompts`.

    Returns:
        By set and reward name, scores (prompts, seeds), float64.
    """
    folder.mkdir(parents=True, exist_ok=True)
    call, seeds = config.evaluation_call, config.evaluation.seeds
    result: dict[str, dict[str, Tensor]] = {}
    prompts: dict[str, list[str]] = {}
    for name, every in rows.items():
        chosen = evenly_spaced(every, config.evaluation.max_prompts)
        if not chosen:
            continue
        scores: dict[str, list[Tensor]] = {reward.name: [] for reward in rewards}
        for number, row in enumerate(tqdm(chosen, f"evaluating {name}", disable=None, leave=False)):
            noise = [initial_noise_seed(config.seed, row.prompt, seed) for seed in seeds]
            samples = policy.generate(row, noise, call)
            for reward in rewards:
                scores[reward.name].append(reward(samples, [row] * len(seeds)))
            _save(samples, folder / name, number, seeds, frame_rate(config))
        result[name] = {reward: torch.stack(values) for reward, values in scores.items()}
        prompts[name] = [row.prompt for row in chosen]
    write_whole(folder / SCORES, json.dumps(_as_json(result, prompts, seeds)))
    return result


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
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
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


def _as_json(
    result: dict[str, dict[str, Tensor]], prompts: dict[str, list[str]], seeds: Sequence[int]
) -> dict[str, Any]:
    scores = {name: {k: v.tolist() for k, v in values.items()} for name, values in result.items()}
    return {"seeds": list(seeds), "prompts": prompts, "scores": scores}
