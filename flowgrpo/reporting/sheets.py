"""Pictures of a run: its curves, its result beside the base model, and sheets of rollouts."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from torch import Tensor

from flowgrpo.data.samples import Sample, frames_of, is_video, load_sample, write_video
from flowgrpo.evaluation.scores import sample_path
from flowgrpo.reporting.grid import draw_grid

SHEET_ROWS, SHEET_COLUMNS, SHEET_VIDEOS = 6, 8, 4
"""Groups, and pictures or videos of a group, on one sheet of rollouts."""


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
