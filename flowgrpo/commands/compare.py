"""`flowgrpo compare`: a grid of prompts and seeds by models, checkpoints or LoRA scales."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowgrpo.commands.libraries import quiet_libraries
from flowgrpo.reporting import model_grid


@dataclass(kw_only=True, frozen=True)
class Comparison:
    """What is drawn."""

    runs: Sequence[Path]
    prompts: Sequence[str] = ()
    """Default: those of the first run's test file."""
    num_prompts: int = 6
    seeds: Sequence[int] = (0,)
    checkpoints: bool = False
    """A column per checkpoint."""
    scales: str = ""
    """Columns at these LoRA scales, such as `0,0.25,0.5,1`."""
    loras: Sequence[Path] = ()
    """Columns for LoRAs of other origin."""
    out: Path | None = None
    """PNG; default: `grid.png` of the first run."""


def compare(comparison: Comparison) -> None:
    """Draws the grid and prints the names of the files."""
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
    try:
        numbers = [float(part) for part in text.split(",")] if text else []
        if not all(map(math.isfinite, numbers)):
            raise ValueError
    except ValueError:
        raise ValueError(f'--scales is "{text}", but must be numbers like 0,0.5,1.') from None
    return numbers
