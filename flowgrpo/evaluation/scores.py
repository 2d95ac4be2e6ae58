"""The scores file of an evaluation, and where its samples lie."""

import json
from pathlib import Path

import torch
from torch import Tensor

SCORES = "scores.json"


def load_scores(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Scores (prompts, seeds) by set and reward name, as `evaluate` wrote them."""
    data = json.loads((folder / SCORES).read_text())["scores"]
    return {
        name: {
            reward: torch.tensor(values, dtype=torch.float64) for reward, values in scores.items()
        }
        for name, scores in data.items()
    }


def sample_path(folder: Path, number: int, seed: int) -> Path:
    """The PNG of one sample of a prompt set's folder; `media.load_sample` opens it."""
    return folder / f"{number:04d}-seed{seed}.png"
