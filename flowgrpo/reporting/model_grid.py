"""Grids that compare models: the same prompts, seeds and noise along a row, one model a column.

Every cell is one call of the stock pipeline for one prompt and one seed, so a cell made alone
equals its cell in any grid. Adapters are swapped, never stacked.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from flowgrpo.core.config import GRPOConfig, frame_rate
from flowgrpo.core.config_file import load_config
from flowgrpo.core.errors import ConfigError
from flowgrpo.core.files import epoch_folders
from flowgrpo.core.seeds import initial_noise_seed
from flowgrpo.data.prompts import Row, evenly_spaced, load_prompts
from flowgrpo.data.samples import Sample, is_video, write_video
from flowgrpo.pipelines.batching import Batchings
from flowgrpo.pipelines.call import generate
from flowgrpo.pipelines.loading import open_pipeline
from flowgrpo.pipelines.lora import (
    WEIGHTS,
    load_lora,
    saved_denoisers,
    saved_modules,
    set_scale,
    unload_lora,
)
from flowgrpo.pipelines.seams import patched
from flowgrpo.reporting.grid import animate_grid, draw_grid
from flowgrpo.scoring.loading import load_rewards
from flowgrpo.scoring.reward import Reward
from flowgrpo.scoring.validation import validate_rows


@dataclass(kw_only=True, frozen=True)
class Column:
    """One model of a grid: a pipeline with at most one LoRA at one scale."""

    label: str
    config: GRPOConfig
    lora: Path | None = None
    """Folder with the LoRA; None for the base model."""
    scale: float = 1.0


def columns_of_runs(
    runs: Sequence[Path],
    *,
    checkpoints: bool = False,
    scales: Sequence[float] = (),
    loras: Sequence[Path] = (),
) -> list[Column]:
    """Base and result of each run; also its checkpoints, its result at several scales, other LoRAs.

    Raises:
        ConfigError: a folder that is no finished run, or a LoRA that is not there.
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
        if checkpoints and not (run / "lora").exists():
            continue  # not finished yet
        if scales:
            for scale in scales:
                label = f"{prefix}scale {scale:g}"
                columns.append(
                    Column(label=label, config=config, lora=_lora(run / "lora"), scale=scale)
                )
        else:
            columns.append(Column(label=f"{prefix}tuned", config=config, lora=_lora(run / "lora")))
    first = columns[0].config
    return columns + [Column(label=lora.name, config=first, lora=_lora(lora)) for lora in loras]


@dataclass(kw_only=True, frozen=True)
class Grid:
    """Samples with what is written beside them."""

    samples: list[list[Sample]]
    rows: list[str]
    columns: list[str]
    captions: list[list[str]] | None
    fps: float

    def save(self, path: Path) -> list[Path]:
        """Writes the PNG `path`, videos as strips; beside it an MP4 in which all of them play."""
        labelled = (self.samples, self.rows, self.columns, self.captions)
        draw_grid(*labelled).save(path)
        if not any(is_video(sample) for line in self.samples for sample in line):
            return [path]
        write_video(animate_grid(*labelled), path.with_suffix(".mp4"), self.fps)
        return [path, path.with_suffix(".mp4")]


def compare_models(
    columns: Sequence[Column],
    rows: Sequence[Row],
    seeds: Sequence[int],
    rewards: Sequence[Reward] = (),
) -> Grid:
    """The labelled grid; scores of `rewards` stand under the cells."""
    samples = pictures_of(columns, rows, seeds)
    places = [(row, seed) for row in rows for seed in seeds]
    captions = [
        [
            "\n".join(f"{r.name} {float(r([sample], [row])[0]):.2f}" for r in rewards)
            for sample in line
        ]
        for (row, _), line in zip(places, samples, strict=True)
    ]
    return Grid(
        samples=samples,
        rows=[f"{row.prompt} (seed {seed})" for row, seed in places],
        columns=[c.label for c in columns],
        captions=captions if rewards else None,
        fps=frame_rate(columns[0].config),
    )


def pictures_of(
    columns: Sequence[Column], rows: Sequence[Row], seeds: Sequence[int]
) -> list[list[Sample]]:
    """One line of samples for each prompt and seed, one sample a column.

    The first column's run gives noise and settings for all: nothing else may differ along a row.
    """
    samples: list[list[Sample]] = [[] for _ in rows for _ in seeds]
    pipe, batchings, opened = None, Batchings(None), None
    for column in tqdm(columns, "columns", disable=None):
        if opened != column.config.model:
            pipe, opened = open_pipeline(column.config.model), column.config.model
            batchings = Batchings(pipe)
        with adapter(pipe, column.lora, column.scale):
            for line, (row, seed) in zip(
                samples, ((row, seed) for row in rows for seed in seeds), strict=True
            ):
                line.append(cell(batchings, row, seed, columns[0].config))
    return samples


def cell(batchings: Batchings, row: Row, seed: int, config: GRPOConfig) -> Sample:
    """One sample of one row, by the stock pipeline with the run's evaluation settings."""
    noise = initial_noise_seed(config.seed, row.prompt, seed)
    call = config.evaluation_call
    return generate(batchings.pipe, row, [noise], call, batchings.of(row, call))[0]


@contextmanager
def adapter(pipe: Any, lora: Path | None, scale: float = 1.0) -> Iterator[None]:
    """Within the block the pipeline has this LoRA and no other; None is the base model.

    Where a run trained whole denoisers, they stand in for the pipeline's.
    """
    if lora is not None and saved_denoisers(lora):
        with trained_denoisers(pipe, lora, scale):
            yield
        return
    names = load_lora(pipe, lora, "compared") if lora is not None else []
    set_scale(pipe, names, scale)
    try:
        yield
    finally:
        unload_lora(pipe, names)


@contextmanager
def trained_denoisers(pipe: Any, folder: Path, scale: float) -> Iterator[None]:
    if scale != 1:
        raise ConfigError(
            f"scale is {scale:g}, but {folder} holds whole denoisers, which have none; use 1."
        )
    with ExitStack() as stack:
        for name in saved_denoisers(folder):
            base = getattr(pipe, name)
            trained = type(base).from_pretrained(folder / name, dtype=base.dtype)
            stack.enter_context(patched(pipe, name, trained.to(base.device)))
        yield


def rows_and_rewards(
    config: GRPOConfig, prompts: Sequence[str], limit: int
) -> tuple[list[Row], list[Reward]]:
    """What to draw and how to score it: given prompts, else the run's held-out ones."""
    source = list(prompts) or config.prompts.test or config.prompts.train
    if source is None:
        raise ConfigError("the run names no prompt file; pass --prompt.")
    rows = evenly_spaced(load_prompts(source), limit)
    rewards = load_rewards(config.held_out or config.rewards)
    validate_rows(rewards, rows)
    return rows, rewards


def _run_config(run: Path) -> GRPOConfig:
    if not (run / "config.yaml").is_file():
        raise ConfigError(
            f"run is {run}, but holds no config.yaml; give an output_dir of flowgrpo train."
        )
    return load_config(run / "config.yaml")


def _lora(folder: Path) -> Path:
    if not (saved_modules(folder) or saved_denoisers(folder)):
        raise ConfigError(
            f"LoRA is {folder}, but holds no {WEIGHTS}; give a folder of a finished run."
        )
    return folder
