"""Evaluation: the stock sampler with the user's settings and the same noise each time."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from flowgrpo.core.config import GRPOConfig, frame_rate
from flowgrpo.core.files import write_atomically
from flowgrpo.core.seeds import initial_noise_seed
from flowgrpo.data.prompts import Row, evenly_spaced
from flowgrpo.data.samples import Sample, save_sample
from flowgrpo.distributed.processes import Processes
from flowgrpo.evaluation.scores import SCORES, sample_path
from flowgrpo.policy.policy import Policy
from flowgrpo.scoring.reward import Reward


def evaluate(
    policy: Policy,
    rewards: Sequence[Reward],
    rows: Mapping[str, Sequence[Row]],
    config: GRPOConfig,
    folder: Path,
    processes: Processes | None = None,
    should_stop: Callable[[], bool] = lambda: False,
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
    own = processes.shard(tasks, padded=policy.is_sharded)
    hidden = None if processes.is_main else True
    for name, number in tqdm(own, "evaluating", disable=hidden, leave=False):
        if should_stop():
            break
        samples = _samples(policy, chosen[name][number], config)
        _save(samples, folder / name, number, config.evaluation.seeds, frame_rate(config))
        each = [chosen[name][number]] * len(samples)
        scores[f"{name} {number}"] = {r.name: r(samples, each).tolist() for r in rewards}
    found = {key: value for part in processes.all_gather(scores) for key, value in part.items()}
    if len(found) < len(tasks):
        return False
    result = {
        name: {r.name: [found[f"{name} {i}"][r.name] for i in range(len(some))] for r in rewards}
        for name, some in chosen.items()
        if some
    }
    if processes.is_main:
        prompts = {name: [row.prompt for row in chosen[name]] for name in result}
        data = {"seeds": config.evaluation.seeds, "prompts": prompts, "scores": result}
        write_atomically(folder / SCORES, json.dumps(data))
    processes.barrier()
    return True


def _samples(policy: Policy, row: Row, config: GRPOConfig) -> list[Sample]:
    noise = [initial_noise_seed(config.seed, row.prompt, s) for s in config.evaluation.seeds]
    return policy.generate(row, noise, config.evaluation_call)


def _save(
    samples: Sequence[Sample], folder: Path, number: int, seeds: Sequence[int], fps: float
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for sample, seed in zip(samples, seeds, strict=True):
        save_sample(sample, sample_path(folder, number, seed), fps)
