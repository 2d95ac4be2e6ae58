"""Counts killed runs that end as if uninterrupted: python scripts/kill_points.py --points 100.

Each trial kills a tiny run of the tests at one or two random points, resumes it, and compares it
with an uninterrupted run: all files, except for seconds in them, and the next epoch's rollouts.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from trials import Trial, Trials


def line(number: int, trial: Trial) -> str:
    """Returns a line about where a run was killed, and whether it differs."""
    deaths = ", then ".join(
        f"{point.deed} at {point.event} {point.at} ({death.struck}; exit {death.code})"
        for point, death in zip(trial.points, trial.deaths, strict=True)
    )
    return f"{number:4} {'DIFFERS ' + ', '.join(trial.wrong) if trial.wrong else 'same'}: {deaths}"


def main(
    points: Annotated[int, typer.Option(min=1, help="Number of runs to kill.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the points.")] = 0,
    first: Annotated[int, typer.Option(help="Number of the first trial.")] = 0,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings of the run.")] = None,
) -> None:
    """Print each trial, and how many survived."""
    survived = killed = 0
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder) / "trials", *(overrides or []), seed=seed)
        for number in range(first, first + points):
            trial = trials.trial(number)
            survived += not trial.wrong
            killed += sum(death.code < 0 for death in trial.deaths)
            print(line(number, trial), flush=True)
    seconds = time.perf_counter() - started
    print(f"seed {seed}: {survived} of {points} survived {killed} kills ({seconds:.0f} s)")
    raise typer.Exit(int(survived < points))


if __name__ == "__main__":
    typer.run(main)
