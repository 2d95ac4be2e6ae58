"""Measures the time and size of a checkpoint.

    python scripts/checkpoint_cost.py [CONFIG] [section.key=value ...]

Trains one epoch without evaluations, then saves and loads its checkpoint a few times. Saving waits
for the disk; loading reads the files just written from the page cache.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer

import flowgrpo.cli  # noqa: F401  sets the wait policy before torch is imported
from flowgrpo.core.config_file import load_config


def median_seconds(function: Callable[[], Any], repeats: int) -> float:
    """Returns the median time of a call."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main(
    config: Annotated[Path, typer.Argument()] = Path("configs/tiny_ocr.yaml"),
    overrides: Annotated[list[str] | None, typer.Argument()] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    folder: Annotated[
        Path | None, typer.Option(help="Folder on the disk to measure; default: the temporary one.")
    ] = None,
) -> None:
    """Print the seconds to save and to load, the size, and the share of an epoch."""
    from flowgrpo.policy.weights import inference_weights
    from flowgrpo.runs import checkpoint
    from flowgrpo.training.trainer import GRPOTrainer

    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        fixed = [f"output_dir={temporary}/run", "train.epochs=1"]
        trainer = GRPOTrainer(args=load_config(config, [*(overrides or []), *fixed]))
        with patch.object(GRPOTrainer, "evaluate"), patch.object(GRPOTrainer, "_finish"):
            trainer.train()
        (line,) = trainer.folder.metrics()
        epoch = sum(line["seconds"].values())
        checkpoints = trainer.folder.checkpoints

        def save() -> Path:
            tensors = trainer.learner.state_dict()
            with inference_weights(trainer.policy, trainer.learner.average):
                return checkpoint.save(
                    checkpoints, trainer.policy, tensors, trainer.state, trainer.config
                )

        def load() -> None:
            found = checkpoint.newest(checkpoints)
            assert found is not None
            tensors, _ = checkpoint.load(*found)
            trainer.learner.load_state_dict(tensors)

        saved = save()
        size = sum(path.stat().st_size for path in saved.iterdir())
        saving, loading = median_seconds(save, repeats), median_seconds(load, repeats)
    weights = sum(parameter.numel() for parameter in trainer.policy.parameters.values())
    print(f"{'trained weights':20}{weights:,}")
    print(f"{'size':20}{size / 2**20:.1f} MiB ({size / weights:.0f} bytes per weight)")
    print(f"{'save':20}{saving:.3f} s, {saving / epoch:.2%} of an epoch's {epoch:.1f} s")
    print(f"{'load and verify':20}{loading:.3f} s")


if __name__ == "__main__":
    typer.run(main)
