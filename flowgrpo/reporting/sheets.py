"""Contact sheets of a run: its result beside the base model, and its rollouts."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from torch import Tensor

from flowgrpo.data.samples import Sample, frames_of, is_video, load_sample, write_video
from flowgrpo.evaluation.scores import sample_path
from flowgrpo.reporting.grid import draw_grid

SHEET_ROWS, SHEET_COLUMNS, SHEET_VIDEOS = 6, 8, 4
"""Maximum number of groups on a contact sheet, and of images or videos per group."""


def draw_before_after(
    base: tuple[Path, Tensor],
    tuned: tuple[Path, Tensor],
    prompts: Sequence[str],
    seeds: Sequence[int],
    max_rows: int = 12,
) -> Image.Image:
    """Draws evenly spaced prompts, base beside tuned from the same noise, for up to two seeds.

    Args:
        base, tuned: folder of a prompt set's samples, and its scores (prompts, seeds).
        prompts, seeds: those of the evaluation, in the order of the scores.
        max_rows: maximum number of prompts.
    """
    rows = range(0, len(prompts), -(-len(prompts) // max_rows))
    columns = [
        (folder, scores, label, index)
        for index in range(min(2, len(seeds)))
        for (folder, scores), label in ((base, "base"), (tuned, "tuned"))
    ]
    samples = [
        [load_sample(sample_path(folder, row, seeds[index])) for folder, _, _, index in columns]
        for row in rows
    ]
    captions = [
        [f"{float(scores[row, index]):.2f}" for _, scores, _, index in columns] for row in rows
    ]
    labels = [f"{label}, seed {seeds[index]}" for _, _, label, index in columns]
    return draw_grid(samples, [prompts[row] for row in rows], labels, captions)


def draw_rollouts(
    path: Path, groups: Sequence[tuple[str, list[Sample], list[float]]], fps: float
) -> None:
    """Writes a contact sheet of rollouts as they were scored: noisy, and of few steps.

    The videos on the sheet are also written as MP4 to a folder beside it, of the same name.

    Args:
        path: path of the PNG.
        groups: (prompt, samples, scores) of each group, one score per sample.
        fps: frame rate of the videos.
    """
    videos = is_video(groups[0][1][0])
    columns = SHEET_VIDEOS if videos else SHEET_COLUMNS
    shown = [(p, s[:columns], scores[:columns]) for p, s, scores in groups[:SHEET_ROWS]]
    sheet = draw_grid(
        [samples for _, samples, _ in shown],
        [prompt for prompt, _, _ in shown],
        [f"rollout {number + 1}" for number in range(len(shown[0][1]))],
        [[f"{score:.3f}" for score in scores] for _, _, scores in shown],
    )
    path.parent.mkdir(exist_ok=True)
    sheet.save(path)
    if not videos:
        return
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    for group, (_, samples, _) in enumerate(shown, 1):
        for number, sample in enumerate(samples, 1):
            write_video(frames_of(sample), folder / f"group{group}-rollout{number}.mp4", fps)
