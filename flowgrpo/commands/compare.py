"""`flowgrpo compare`: a grid of prompts and seeds by models, checkpoints or LoRA scales."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowgrpo.commands.libraries import quiet_libraries
from flowgrpo.reporting import model_grid


@dataclass(kw_only=True, frozen=True)
class Comparison:
    """Contents of the grid, and the file it is saved to."""

    runs: Sequence[Path]
    """Run folders; the first one decides settings and rewards."""
    prompts: Sequence[str] = ()
    """Prompts; default: `num_prompts` of the first run's test prompts."""
    num_prompts: int = 6
    """Maximum number of prompts."""
    seeds: Sequence[int] = (0,)
    """Seeds of the noise; every prompt has a row per seed."""
    checkpoints: bool = False
    """Whether to add a column per checkpoint."""
    scales: str = ""
    """LoRA scales with a column each, such as `0,0.25,0.5,1`."""
    loras: Sequence[Path] = ()
    """Folders of other LoRAs with a column each."""
    out: Path | None = None
    """Path of the PNG; default: `grid.png` in the first run folder."""


def compare(comparison: Comparison) -> None:
    """Draws the grid and prints the paths of its files."""
    quiet_libraries()
    columns = model_grid.columns_of_runs(
        comparison.runs,
        checkpoints=comparison.checkpoints,
        scales=_numbers(comparison.scales),
        loras=comparison.loras,
    )
    rows, rewards = model_grid.rows_and_rewards(
        columns[0].config, comparison.prompts, comparison.num_prompts
    )
    grid = model_grid.compare_models(columns, rows, comparison.seeds, rewards)
    path = comparison.out or comparison.runs[0] / "grid.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    for written in grid.save(path):
        print(written)


def _numbers(text: str) -> list[float]:
    """Parses finite numbers separated by commas."""
    try:
        numbers = [float(part) for part in text.split(",")] if text else []
        if not all(map(math.isfinite, numbers)):
            raise ValueError
    except ValueError:
        raise ValueError(
            f'--scales is "{text}", but must be numbers separated by commas, like 0,0.5,1.'
        ) from None
    return numbers
