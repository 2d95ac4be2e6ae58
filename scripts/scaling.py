"""Measures an epoch in one process and in several: python scripts/scaling.py [key=value ...].

Starts the same run with torchrun for each number of processes in turn, and prints the median
seconds of an epoch and of its phases. Two processes need two idle cores.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer


def main(
    overrides: Annotated[list[str] | None, typer.Argument()] = None,
    config: Annotated[Path, typer.Option()] = Path("configs/tiny_ocr.yaml"),
    processes: Annotated[list[int] | None, typer.Option()] = None,
    epochs: Annotated[int, typer.Option()] = 5,
) -> None:
    """Print seconds per epoch by number of processes; the first epoch is left out."""
    counts = processes or [1, 2]
    found = {}
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            fixed = [f"output_dir={folder}/run", f"train.epochs={epochs}", "evaluation.seeds=1"]
            settings = [*fixed, "evaluation.max_prompts=2", *(overrides or [])]
            launcher = ["torch.distributed.run", f"--nproc-per-node={count}", "-m"]
            subprocess.run(
                [sys.executable, "-m", *launcher, "flowgrpo.cli", "train", str(config), *settings],
                check=True,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        phases = [json.loads(line)["seconds"] for line in lines[1:]]
        found[count] = statistics.median(
            sum(p[k] for k in ("sampling", "scoring", "training")) for p in phases
        )
        parts = {k: statistics.median(p.get(k, 0.0) for p in phases) for k in phases[0]}
        phase_text = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
        print(
            f"{count} processes: {found[count]:6.2f} s per epoch ({phase_text}), "
            f"{found[count] / found[counts[0]]:.2f} of the first"
        )


if __name__ == "__main__":
    typer.run(main)
