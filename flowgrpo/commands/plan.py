"""`flowgrpo plan`: predicts what a run does and needs, without loading weights."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from flowgrpo.commands.inputs import print_table, read_and_print_plan
from flowgrpo.commands.libraries import quiet_libraries
from flowgrpo.core.config_file import load_config
from flowgrpo.preflight.memory import estimate_memory
from flowgrpo.preflight.memory_report import describe_memory
from flowgrpo.preflight.sharding import check_sharding


def plan(path: Path, overrides: Sequence[str]) -> None:
    """Prints the plan of a config, with the memory and the denoiser calls that it needs."""
    config = load_config(path, overrides)
    inputs = read_and_print_plan(config)
    quiet_libraries()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        for warning in check_sharding(config, inputs, processes):
            print(f"warning: {warning}", file=sys.stderr)
    print_table(describe_memory(estimate_memory(config, inputs.plan, processes)))
