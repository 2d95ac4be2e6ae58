"""Labelled grids that compare models: one row per prompt and seed, one column per model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowgrpo.core.config import GRPOConfig, frame_rate
from flowgrpo.core.config_file import load_config
from flowgrpo.core.errors import ConfigError
from flowgrpo.core.files import epoch_folders
from flowgrpo.data.prompts import evenly_spaced, load_prompts
from flowgrpo.data.row import Row
from flowgrpo.data.samples import Sample, is_video, write_video
from flowgrpo.pipelines.lora_files import WEIGHTS, saved_denoisers, saved_modules
from flowgrpo.reporting.grid import animate_grid, draw_grid
from flowgrpo.reporting.model_columns import Column, sample_columns
from flowgrpo.scoring.loading import load_rewards
from flowgrpo.scoring.reward import Reward
from flowgrpo.scoring.validation import validate_rows


@dataclass(kw_only=True, frozen=True)
class Grid:
    """Samples with labels and captions."""

    samples: list[list[Sample]]
    """Rows of samples, one per column."""
    row_labels: list[str]
    column_labels: list[str]
    captions: list[list[str]] | None
    """One per sample, if there are any."""
    fps: float
    """Frame rate of videos."""

    def save(self, path: Path) -> list[Path]:
        """Writes the grid as a PNG with videos as strips; also as an MP4 if there are videos.

        Returns:
            Paths of the written files: `path`, and the MP4 beside it.
        """
        contents = (self.samples, self.row_labels, self.column_labels, self.captions)
        draw_grid(*contents).save(path)
        if not any(is_video(sample) for row in self.samples for sample in row):
            return [path]
        write_video(animate_grid(*contents), path.with_suffix(".mp4"), self.fps)
        return [path, path.with_suffix(".mp4")]


def columns_of_runs(
    runs: Sequence[Path],
    *,
    checkpoints: bool = False,
    scales: Sequence[float] = (),
    loras: Sequence[Path] = (),
) -> list[Column]:
    """Columns for the base model and the result of each run, and for other LoRAs.

    Args:
        runs: run folders. Runs of the same model share the column of the base model.
        checkpoints: adds a column per checkpoint; a run may then be unfinished.
        scales: LoRA scales; the result has a column per scale, instead of one at scale 1.
        loras: folders of further LoRAs for the model of the first run.

    Raises:
        ConfigError: a folder is not a finished run, or has no LoRA.
    """
    columns: list[Column] = []
    for run in runs:
        config = _run_config(run)
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        if config.model.path not in {c.config.model.path for c in columns}:
            columns.append(Column(label=f"{prefix}base" if columns else "base", config=config))
        if checkpoints:
            for folder in epoch_folders(run / "checkpoints"):
                columns.append(Column(label=f"{prefix}{folder.name}", config=config, lora=folder))
        if not checkpoints or (run / "lora").exists():
            columns += _result_columns(run, config, prefix, scales)
    first = columns[0].config
    return columns + [Column(label=lora.name, config=first, lora=_lora(lora)) for lora in loras]


def _result_columns(
    run: Path, config: GRPOConfig, prefix: str, scales: Sequence[float]
) -> list[Column]:
    lora = _lora(run / "lora")
    labelled = [(f"scale {scale:g}", scale) for scale in scales] or [("tuned", 1.0)]
    return [
        Column(label=f"{prefix}{label}", config=config, lora=lora, scale=scale)
        for label, scale in labelled
    ]


def compare_models(
    columns: Sequence[Column],
    rows: Sequence[Row],
    seeds: Sequence[int],
    rewards: Sequence[Reward] = (),
) -> Grid:
    """Samples a labelled grid, with the scores of `rewards` as captions."""
    samples = sample_columns(columns, rows, seeds)
    pairs = [(row, seed) for row in rows for seed in seeds]
    captions = [
        [
            "\n".join(f"{r.name} {float(r([sample], [row])[0]):.2f}" for r in rewards)
            for sample in line
        ]
        for (row, _), line in zip(pairs, samples, strict=True)
    ]
    return Grid(
        samples=samples,
        row_labels=[f"{row.prompt} (seed {seed})" for row, seed in pairs],
        column_labels=[column.label for column in columns],
        captions=captions if rewards else None,
        fps=frame_rate(columns[0].config),
    )


def rows_and_rewards(
    config: GRPOConfig, prompts: Sequence[str], limit: int
) -> tuple[list[Row], list[Reward]]:
    """Rows to draw, and rewards to score them with.

    Args:
        prompts: default: those of the run's test file, else of its training file.
        limit: maximum number of rows, which are evenly spaced.

    Raises:
        ConfigError: there are no prompts, or a reward cannot score a row.
    """
    source = list(prompts) or config.prompts.test or config.prompts.train
    if source is None:
        raise ConfigError("the run was given no prompt file; pass --prompt.")
    rows = evenly_spaced(load_prompts(source), limit)
    rewards = load_rewards(config.held_out or config.rewards)
    validate_rows(rewards, rows)
    return rows, rewards


def _run_config(run: Path) -> GRPOConfig:
    if not (run / "config.yaml").is_file():
        raise ConfigError(
            f"run is {run}, but it holds no config.yaml; name an output_dir of flowgrpo train."
        )
    return load_config(run / "config.yaml")


def _lora(folder: Path) -> Path:
    if not (saved_modules(folder) or saved_denoisers(folder)):
        raise ConfigError(
            f"LoRA is {folder}, but it holds no {WEIGHTS}; name the folder of a finished run."
        )
    return folder
