"""summary.json and the figures of a finished run."""

import json
from collections.abc import Mapping
from typing import Any

from PIL import Image
from torch import Tensor

from flowgrpo.core.files import write_atomically
from flowgrpo.evaluation.scores import SCORES
from flowgrpo.evaluation.statistics import paired_bootstrap
from flowgrpo.reporting.curves import Evaluations, draw_curves
from flowgrpo.reporting.sheets import draw_before_after
from flowgrpo.runs.folder import RunFolder

Scores = Mapping[str, Mapping[str, Tensor]]
"""Scores (prompts, seeds) of one evaluation by prompt set and reward."""


def summarize(
    folder: RunFolder, headline: str, epoch: int, totals: dict[str, Any]
) -> dict[str, Any]:
    """Compares base and tuned model; writes summary.json, curves.png and compare.png.

    Args:
        headline: name of the reward that `base`, `tuned` and the figures are about.
        epoch: the last epoch, which must be evaluated; epoch 0 is the base model.
        totals: further entries, such as the wall time.

    Returns:
        What summary.json holds; `scores` has every reward by prompt set, with its mean gain and the
        95 % interval of that.
    """
    evaluations = folder.evaluations()
    base, tuned = evaluations[0], evaluations[epoch]
    summary = {
        "reward": headline,
        "base": {name: float(scores[headline].mean()) for name, scores in base.items()},
        "tuned": {name: float(scores[headline].mean()) for name, scores in tuned.items()},
        "epochs": epoch,
        **totals,
        "scores": _gains(base, tuned),
    }
    write_atomically(folder.path / "summary.json", json.dumps(summary, indent=1))
    draw_curves(folder.path / "curves.png", folder.metrics(), evaluations, headline)
    _compare(folder, evaluations, headline, epoch).save(folder.path / "compare.png")
    return summary


def _gains(base: Scores, tuned: Scores) -> dict[str, dict[str, dict[str, Any]]]:
    """Mean scores and gains by prompt set and reward."""
    return {
        name: {
            reward: {
                "base": float(scores[reward].mean()),
                "tuned": float(tuned[name][reward].mean()),
                "gain": float((tuned[name][reward] - scores[reward]).mean()),
                "gain_95": paired_bootstrap(scores[reward], tuned[name][reward]),
            }
            for reward in scores
        }
        for name, scores in base.items()
    }


def _compare(folder: RunFolder, evaluations: Evaluations, headline: str, epoch: int) -> Image.Image:
    """A contact sheet of the test prompts, or else the training prompts: base beside tuned."""
    shown = "test_prompts" if "test_prompts" in evaluations[0] else "train_prompts"
    base, tuned = (
        (folder.evaluation(e) / shown, evaluations[e][shown][headline]) for e in (0, epoch)
    )
    data = json.loads((folder.evaluation(0) / SCORES).read_text())
    return draw_before_after(base, tuned, data["prompts"][shown], data["seeds"])
