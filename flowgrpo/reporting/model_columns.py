"""Samples of several models from the same prompts, seeds and noise.

Every sample is one call of the stock pipeline for one prompt and one seed, so it does not depend on
the other samples. LoRAs are swapped, never stacked.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.errors import ConfigError
from flowgrpo.core.seeds import initial_noise_seed
from flowgrpo.data.row import Row
from flowgrpo.data.samples import Sample
from flowgrpo.pipelines.batching import Batchings
from flowgrpo.pipelines.call import generate
from flowgrpo.pipelines.loading import open_pipeline
from flowgrpo.pipelines.lora import set_scale, unload_lora
from flowgrpo.pipelines.lora_files import load_lora, saved_denoisers
from flowgrpo.pipelines.seams import patched


@dataclass(kw_only=True, frozen=True)
class Column:
    """One model of a grid: the pipeline of a run, with one LoRA at one scale or none."""

    label: str
    """Text above the column."""
    config: GRPOConfig
    """Config of the run."""
    lora: Path | None = None
    """Folder with the LoRA, or with trained denoisers; None for the base model."""
    scale: float = 1.0
    """Scale of the LoRA; 0 gives the base model."""


def sample_columns(
    columns: Sequence[Column], rows: Sequence[Row], seeds: Sequence[int]
) -> list[list[Sample]]:
    """Samples one row per prompt and seed, with one sample per column.

    Noise and settings are those of the first column's run, so that a row differs by model alone.
    """
    pairs = [(row, seed) for row in rows for seed in seeds]
    samples: list[list[Sample]] = [[] for _ in pairs]
    pipe, batchings, opened = None, Batchings(None), None
    for column in tqdm(columns, "columns", disable=None):
        if opened != column.config.model:
            pipe, opened = open_pipeline(column.config.model), column.config.model
            batchings = Batchings(pipe)
        with adapter(pipe, column.lora, column.scale):
            for line, (row, seed) in zip(samples, pairs, strict=True):
                line.append(sample_cell(batchings, row, seed, columns[0].config))
    return samples


def sample_cell(batchings: Batchings, row: Row, seed: int, config: GRPOConfig) -> Sample:
    """Samples one row with the stock pipeline and the run's evaluation settings."""
    noise = initial_noise_seed(config.seed, row.prompt, seed)
    call = config.evaluation_call
    return generate(batchings.pipe, row, [noise], call, batchings.of(row, call))[0]


@contextmanager
def adapter(pipe: Any, lora: Path | None, scale: float = 1.0) -> Iterator[None]:
    """Context in which the pipeline has this LoRA and no other; None is the base model.

    If the folder holds trained denoisers instead, they replace the pipeline's.
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
    """Context in which the denoisers saved in `folder` replace the pipeline's.

    Raises:
        ConfigError: `scale` is not 1.
    """
    if scale != 1:
        raise ConfigError(
            f"scale is {scale:g}, but {folder} holds complete denoisers instead of a LoRA; use 1."
        )
    with ExitStack() as stack:
        for name in saved_denoisers(folder):
            base = getattr(pipe, name)
            trained = type(base).from_pretrained(folder / name, dtype=base.dtype)
            stack.enter_context(patched(pipe, name, trained.to(base.device)))
        yield
