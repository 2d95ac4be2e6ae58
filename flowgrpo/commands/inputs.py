"""Inputs and plan of a run, for `flowgrpo train` and `flowgrpo plan`."""

import sys

from flowgrpo.core.config import GRPOConfig
from flowgrpo.preflight.inputs import Inputs, read_inputs
from flowgrpo.runs.trackers import check_trackers


def read_and_print_plan(config: GRPOConfig, *, quiet: bool = False) -> Inputs:
    """Reads everything that a config names and prints the plan.

    Args:
        quiet: print nothing; for processes other than the main one.

    Raises:
        ConfigError: an input cannot work.
    """
    check_trackers(config.trackers)
    inputs = read_inputs(config)
    if not quiet:
        print(f"plan for {config.output_dir}")
        print_table(inputs.plan.describe())
        for warning in inputs.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    return inputs


def print_table(rows: dict[str, str]) -> None:
    """Prints one line per row: its label, and its value in a second column."""
    for label, value in rows.items():
        print(f"  {label:28}{value}")
