"""Grids that compare models: the same prompts, seeds and noise along a row, one model a column.

Every cell is one call of the stock pipeline for one prompt and one seed, so a cell made alone
equals its cell in any grid. Adapters are swapped, never stacked.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from flowgrpo.config import ConfigError, GRPOConfig, load_config
from flowgrpo.evaluate import evenly_spaced, initial_noise_seed
from flowgrpo.grids import draw_grid
from flowgrpo.loading import load_rewards
from flowgrpo.lora import WEIGHTS, load_lora, set_scale, unload_lora
from flowgrpo.pipelines import generate, open_pipeline
from flowgrpo.prompts import Row, load_prompts
from flowgrpo.scoring import Reward, validate_rows


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
            for folder in sorted((run / "checkpoints").glob("epoch-*")):
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


def compare(
    columns: Sequence[Column],
    rows: Sequence[Row],
    seeds: Sequence[int],
    rewards: Sequence[Reward] = (),
) -> Image.Image:
    """The labelled grid; scores of `rewards` stand under the cells."""
    pictures = pictures_of(columns, rows, seeds)
    places = [(row, seed) for row in rows for seed in seeds]
    captions = [
        [
            "\n".join(f"{r.name} {float(r([picture], [row])[0]):.2f}" for r in rewards)
            for picture in line
        ]
        for (row, _), line in zip(places, pictures, strict=True)
    ]
    labels = [f"{row.prompt} (seed {seed})" for row, seed in places]
    return draw_grid(pictures, labels, [c.label for c in columns], captions if rewards else None)


def pictures_of(
    columns: Sequence[Column], rows: Sequence[Row], seeds: Sequence[int]
) -> list[list[Image.Image]]:
    """One line of pictures for each prompt and seed, one picture a column.

    The first column's run gives noise and settings for all: nothing else may differ along a row.
    """
    pictures: list[list[Image.Image]] = [[] for _ in rows for _ in seeds]
    pipe, opened = None, None
    for column in tqdm(columns, "columns", disable=None):
        if opened != column.config.model:
            pipe, opened = open_pipeline(column.config.model), column.config.model
        with adapter(pipe, column.lora, column.scale):
            for line, (row, seed) in zip(
                pictures, ((row, seed) for row in rows for seed in seeds), strict=True
            ):
                line.append(cell(pipe, row, seed, columns[0].config))
    return pictures


def cell(pipe: Any, row: Row, seed: int, config: GRPOConfig) -> Any:
    """One sample of one row, by the stock pipeline with the run's evaluation settings."""
    noise = initial_noise_seed(config.seed, row.prompt, seed)
    return generate(pipe, row, [noise], config.evaluation_call)[0]


@contextmanager
def adapter(pipe: Any, lora: Path | None, scale: float = 1.0) -> Iterator[None]:
    """Within the block the pipeline has this LoRA and no other; None is the base model."""
    names = load_lora(pipe, lora, "compared") if lora is not None else []
    set_scale(pipe, names, scale)
    try:
        yield
    finally:
        unload_lora(pipe, names)


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
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(
            f"LoRA is {folder}, but holds no {WEIGHTS}; give a folder of a finished run."
        )
    return folder
