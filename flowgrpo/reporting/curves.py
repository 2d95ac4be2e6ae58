"""Figure of a run's rewards and evaluation scores by epoch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

Evaluations = Mapping[int, dict[str, dict[str, Tensor]]]
"""Scores (prompts, seeds) by epoch, prompt set and reward; epoch 0 is the base model."""


def draw_curves(
    path: Path, metrics: Sequence[dict[str, Any]], evaluations: Evaluations, headline: str
) -> None:
    """Draws training rewards (left) and evaluation scores (right) by epoch, as an image at `path`.

    Args:
        metrics: lines of metrics.jsonl.
        headline: name of the reward whose evaluation scores are drawn, one curve per prompt set.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in metrics[0]["rewards"] if metrics else []:
        means = [line["rewards"][name]["mean"] for line in metrics]
        left.plot([line["epoch"] for line in metrics], means, label=name)
    left.set(title="rewards of the rollouts", xlabel="epoch")
    for name in next(iter(evaluations.values())):
        values = [float(scores[name][headline].mean()) for scores in evaluations.values()]
        right.plot(list(evaluations), values, marker="o", label=name.replace("_", " "))
    right.set(title=f"{headline} at evaluation", xlabel="epoch")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
