"""Files of an evaluation: its scores and its samples."""

import json
from pathlib import Path

import torch
from torch import Tensor

SCORES = "scores.json"


def load_scores(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Returns the scores (prompts, seeds) of an evaluation, by prompt set and reward."""
    data = json.loads((folder / SCORES).read_text())["scores"]
    return {
        name: {
            reward: torch.tensor(values, dtype=torch.float64) for reward, values in scores.items()
        }
        for name, scores in data.items()
    }


def sample_path(folder: Path, number: int, seed: int) -> Path:
    """Path of the PNG of one sample; `data.samples.load_sample` opens it.

    Args:
        folder: folder of the prompt set in the evaluation.
        number: position of the prompt in its set.
        seed: seed of the noise.
    """
    return folder / f"{number:04d}-seed{seed}.png"
