"""Pictures of a run: its curves, its result beside the base model, and sheets of rollouts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from flowgrpo.evaluate import sample_path
from flowgrpo.grids import draw_grid
from flowgrpo.media import Sample, frames_of, is_video, load_sample, write_video

SHEET_ROWS, SHEET_COLUMNS, SHEET_VIDEOS = 6, 8, 4
"""Groups, and pictures or videos of a group, on one sheet of rollouts."""

Evaluations = Mapping[int, dict[str, dict[str, Tensor]]]
"""Scores (prompts, seeds) by epoch, prompt set and reward; epoch 0 is the base model."""


def draw_curves(
    path: Path, metrics: Sequence[dict[str, Any]], evaluations: Evaluations, headline: str
) -> None:
    """Training reward and evaluation score by epoch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in metrics[0]["rewards"] if metrics else []:
        left.plot(
            [m["epoch"] for m in metrics], [m["rewards"][name]["mean"] for m in metrics], label=name
        )
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


def draw_before_after(
    base: tuple[Path, Tensor],
    tuned: tuple[Path, Tensor],
    prompts: Sequence[str],
    seeds: Sequence[int],
    most: int = 12,
) -> Image.Image:
    """Prompts from all over the set, base beside tuned with the same noise, for two seeds.

    Args:
        base, tuned: folder of the set's samples, and its scores (prompts, seeds).
        most: rows, at most.
    """
    rows = range(0, len(prompts), -(-len(prompts) // most))
    columns = [
        (folder, scores, label, place)
        for place in range(min(2, len(seeds)))
        for (folder, scores), label in ((base, "base"), (tuned, "tuned"))
    ]
    samples = [
        [load_sample(sample_path(folder, row, seeds[place])) for folder, _, _, place in columns]
        for row in rows
    ]
    captions = [
        [f"{float(scores[row, place]):.2f}" for _, scores, _, place in columns] for row in rows
    ]
    labels = [f"{label}, seed {seeds[place]}" for _, _, label, place in columns]
    return draw_grid(samples, [prompts[row] for row in rows], labels, captions)


def draw_rollouts(
    path: Path, groups: Sequence[tuple[str, list[Sample], list[float]]], fps: float
) -> None:
    """Rollouts (noisy, few steps) as scored: one sheet, and for videos a folder of its name with
    those of the sheet.

    Args:
        path: PNG.
        groups: (prompt, samples, scores) of each.
    """
    videos = is_video(groups[0][1][0])
    columns = SHEET_VIDEOS if videos else SHEET_COLUMNS
    chosen = [(p, s[:columns], scores[:columns]) for p, s, scores in groups[:SHEET_ROWS]]
    sheet = draw_grid(
        [samples for _, samples, _ in chosen],
        [prompt for prompt, _, _ in chosen],
        [f"rollout {number + 1}" for number in range(len(chosen[0][1]))],
        [[f"{score:.3f}" for score in scores] for _, _, scores in chosen],
    )
    path.parent.mkdir(exist_ok=True)
    sheet.save(path)
    if not videos:
        return
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    for group, (_, samples, _) in enumerate(chosen, 1):
        for number, sample in enumerate(samples, 1):
            write_video(frames_of(sample), folder / f"group{group}-rollout{number}.mp4", fps)
