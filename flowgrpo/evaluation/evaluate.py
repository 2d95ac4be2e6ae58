"""Evaluation with the stock sampler, the user's settings, and the same noise each time."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from flowgrpo.core.config import GRPOConfig, frame_rate
from flowgrpo.core.files import write_atomically
from flowgrpo.core.seeds import initial_noise_seed
from flowgrpo.data.prompts import evenly_spaced
from flowgrpo.data.row import Row
from flowgrpo.data.samples import Sample, save_sample
from flowgrpo.distributed.processes import Processes
from flowgrpo.evaluation.scores import SCORES, sample_path
from flowgrpo.policy.policy import Policy
from flowgrpo.scoring.reward import Reward

PromptSets = Mapping[str, Sequence[Row]]
"""Rows by the name of their set: `train_prompts`, `test_prompts`."""


@dataclass(kw_only=True, frozen=True)
class Evaluator:
    """Scores a policy on prompt sets.

    Prompts are divided among the processes. Each pipeline call holds one prompt with all its seeds,
    so scores depend neither on the other prompts nor on the number of processes.
    """

    policy: Policy
    rewards: Sequence[Reward]
    """Rewards to score with, held-out ones too."""
    config: GRPOConfig
    processes: Processes = field(default_factory=Processes)

    def evaluate(
        self, rows: PromptSets, folder: Path, should_stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Samples every prompt with every seed; scores and saves the images or videos.

        `folder/scores.json` is written last, so an evaluation that has one is complete.

        Args:
            rows: prompt sets; of a large one, evenly spaced rows are used.
            folder: folder of the evaluation, with a folder per prompt set.
            should_stop: checked before each prompt; if it returns True, the evaluation is left
                incomplete.

        Returns:
            Whether it is complete.
        """
        max_prompts = self.config.evaluation.max_prompts
        sets = {name: evenly_spaced(all_rows, max_prompts) for name, all_rows in rows.items()}
        tasks = [(name, i) for name, chosen in sets.items() for i in range(len(chosen))]
        scores: dict[str, dict[str, list[float]]] = {}
        # A sharded denoiser must be called equally often on every process, hence the padding.
        shard = self.processes.shard(tasks, padded=self.policy.is_sharded)
        hidden = None if self.processes.is_main else True
        for name, number in tqdm(shard, "evaluating", disable=hidden, leave=False):
            if should_stop():
                break
            row = sets[name][number]
            scores[f"{name} {number}"] = self._score(row, folder / name, number)
        shards = self.processes.all_gather(scores)
        gathered = {key: value for shard_scores in shards for key, value in shard_scores.items()}
        if len(gathered) < len(tasks):
            return False
        if self.processes.is_main:
            self._write(sets, gathered, folder)
        self.processes.barrier()
        return True

    def _score(self, row: Row, folder: Path, number: int) -> dict[str, list[float]]:
        """Samples one prompt, saves the samples, and returns scores by reward, one per seed."""
        config, seeds = self.config, self.config.evaluation.seeds
        noise = [initial_noise_seed(config.seed, row.prompt, seed) for seed in seeds]
        samples: list[Sample] = self.policy.generate(row, noise, config.evaluation_call)
        folder.mkdir(parents=True, exist_ok=True)
        for sample, seed in zip(samples, seeds, strict=True):
            save_sample(sample, sample_path(folder, number, seed), frame_rate(config))
        return {r.name: r(samples, [row] * len(samples)).tolist() for r in self.rewards}

    def _write(
        self, sets: PromptSets, gathered: Mapping[str, Mapping[str, list[float]]], folder: Path
    ) -> None:
        """Writes scores.json: seeds, prompts by set, and scores by set and reward."""
        scores = {
            name: {
                reward.name: [gathered[f"{name} {i}"][reward.name] for i in range(len(chosen))]
                for reward in self.rewards
            }
            for name, chosen in sets.items()
            if chosen
        }
        prompts = {name: [row.prompt for row in sets[name]] for name in scores}
        seeds = self.config.evaluation.seeds
        data = {"seeds": seeds, "prompts": prompts, "scores": scores}
        write_atomically(folder / SCORES, json.dumps(data))
