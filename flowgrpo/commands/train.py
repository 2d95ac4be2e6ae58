"""`flowgrpo train`: runs a config to the end, and shows the result and how to use it."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowgrpo.commands.inputs import read_and_print_plan
from flowgrpo.commands.libraries import quiet_libraries
from flowgrpo.core.config_file import load_config
from flowgrpo.core.errors import Interrupted
from flowgrpo.reporting.snippet import inference_snippet
from flowgrpo.training.trainer import GRPOTrainer


def train(path: Path, overrides: Sequence[str], *, resume: bool = False) -> None:
    """Trains with a config; all files are written to its output_dir.

    Raises:
        Interrupted: a signal ended the run; its state is saved.
    """
    config = load_config(path, overrides)
    is_main = os.environ.get("RANK", "0") == "0"
    read_and_print_plan(config, quiet=not is_main)
    quiet_libraries()
    trainer = GRPOTrainer(args=config, resume=resume)
    try:
        summary = trainer.train()
    except Interrupted as interrupted:
        if is_main:
            print(f"flowgrpo: {interrupted}", file=sys.stderr)
        raise
    if is_main:
        _print_summary(summary)
        _print_snippet(trainer)


def _print_summary(summary: Mapping[str, Any]) -> None:
    """Prints one line per prompt set and reward: base, tuned, and the gain with its interval."""
    for name, rewards in summary["scores"].items():
        for reward, score in rewards.items():
            low, high = score["gain_95"]
            print(
                f"{name:14} {reward:28} {score['base']:.3f} -> {score['tuned']:.3f}  "
                f"gain {score['gain']:+.3f} (95 % {low:+.3f} to {high:+.3f})"
            )


def _print_snippet(trainer: GRPOTrainer) -> None:
    """Prints code that uses the result with plain diffusers, for the first test prompt."""
    row = [*trainer.inputs.test_rows, *trainer.inputs.rows][0]
    pipeline = type(trainer.policy.pipe)
    print("\nUse it with plain diffusers:\n")
    print(inference_snippet(trainer.config, pipeline, trainer.folder.lora, row))
