"""The command line: train, plan, check, compare."""

import os

# Before torch is imported: threads that spin while they wait make every operation of a busy machine
# several milliseconds slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A process of a run that is gone is told in one sentence, not in frames of C++.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import logging
import math
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.config_file import load_config, parse_config, parse_overrides

if TYPE_CHECKING:
    from flowgrpo.preflight.inputs import Inputs

app = typer.Typer(
    help="GRPO for diffusion image and video models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Config = Annotated[Path, typer.Argument(help="YAML file; see configs/.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings to change.")
]


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint of the run folder.")
    ] = False,
) -> None:
    """Train a LoRA on a pipeline with the rewards of CONFIG; everything goes to its output_dir."""
    settings = load_config(config, overrides)
    first = os.environ.get("RANK", "0") == "0"
    _print_plan(settings, quiet=not first)  # all read, so that bad input ends all
    from flowgrpo.core.errors import Interrupted
    from flowgrpo.training.trainer import GRPOTrainer

    _quiet_libraries()
    trainer = GRPOTrainer(args=settings, resume=resume)
    try:
        summary = trainer.train()
    except Interrupted as stop:
        if first:
            print(f"flowgrpo: {stop}", file=sys.stderr)
        raise
    if first:
        _print_summary(summary)
        _print_snippet(settings, trainer)


@app.command()
def plan(config: Config, overrides: Overrides = None) -> None:
    """Print what a training run of CONFIG would do and need, without loading a model's weights."""
    settings = load_config(config, overrides)
    inputs = _print_plan(settings)
    _quiet_libraries()
    from flowgrpo.preflight.memory import estimate_memory
    from flowgrpo.preflight.sharding import check_sharding

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        for warning in check_sharding(settings, inputs, processes):
            print(f"warning: {warning}", file=sys.stderr)
    for label, value in estimate_memory(settings, inputs.plan, processes).describe().items():
        print(f"  {label:28}{value}")


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="Hub name, pipeline folder or config (YAML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE]...",
            help="The pipeline's own arguments, as height=512 or prompt=...; with a dot, settings.",
        ),
    ] = None,
) -> None:
    """Prove that a pipeline can be trained: stock = sampler = replay, and the LoRA loads again."""
    settings, call = _check_settings(model, overrides or [])
    from flowgrpo.data.media import is_media
    from flowgrpo.data.prompts import load_prompts
    from flowgrpo.pipelines.loading import open_pipeline
    from flowgrpo.preflight.pipeline_check import PROMPT, check_pipeline

    _quiet_libraries()
    source = settings.prompts.train or [{"prompt": PROMPT}]
    row = load_prompts(source)[0]
    media = {name: call.pop(name) for name in list(call) if is_media(name)}
    if media:
        row = load_prompts([{"prompt": row.prompt, **row.columns, **media}])[0]
    report = check_pipeline(open_pipeline(settings.model), settings=settings, row=row, **call)
    print("\n".join(report.lines()))
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Prompt to draw; repeat for more.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of the run's test file.")] = 6,
    seed: Annotated[
        list[int] | None, typer.Option(help="Seed of the noise; repeat for more.")
    ] = None,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="A column a checkpoint.")
    ] = False,
    scales: Annotated[
        str, typer.Option(help="Columns at these LoRA scales, as 0,0.25,0.5,1.")
    ] = "",
    lora: Annotated[list[Path] | None, typer.Option(help="Folder of another LoRA.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="PNG; default: grid.png of the first run.")
    ] = None,
) -> None:
    """Draw a grid of prompts and seeds (rows) by models, checkpoints or LoRA scales (columns)."""
    from flowgrpo.reporting import model_grid as grids

    _quiet_libraries()
    columns = grids.columns_of_runs(
        runs, checkpoints=checkpoints, scales=_numbers(scales), loras=lora or []
    )
    rows, rewards = grids.rows_and_rewards(columns[0].config, prompt or [], num_prompts)
    sheet = grids.compare(columns, rows, seed or [0], rewards)
    path = out or runs[0] / "grid.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    for written in sheet.save(path):
        print(written)


def main() -> None:
    """Runs the command line; bad input is one sentence on stderr and exit code 1."""
    try:
        _run()
    except SystemExit as stop:
        if "flowgrpo.runs.trackers" in sys.modules:
            from flowgrpo.runs.trackers import leave

            leave(stop.code if isinstance(stop.code, int) else int(stop.code is not None))
        raise


def _run() -> None:
    try:
        app()
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        if os.environ.get("FLOWGRPO_TRACEBACK"):
            raise
        print(f"flowgrpo: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if os.environ.get("FLOWGRPO_TRACEBACK"):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"flowgrpo: {reason} (FLOWGRPO_TRACEBACK=1 shows where)", file=sys.stderr)
        sys.exit(1)


def _check_settings(model: str, overrides: list[str]) -> tuple[GRPOConfig, dict[str, Any]]:
    """Settings of a config, or the default ones for a model; and the call."""
    settings = [override for override in overrides if "." in override.partition("=")[0]]
    call = parse_overrides([override for override in overrides if override not in settings])
    if model.endswith((".yaml", ".yml")):
        return load_config(model, settings), call
    return parse_config({"model": {"path": model}}, settings), call


def _print_plan(config: GRPOConfig, *, quiet: bool = False) -> "Inputs":
    from flowgrpo.preflight.inputs import read_inputs

    inputs = read_inputs(config)
    if quiet:
        return inputs
    print(f"plan for {config.output_dir}")
    for label, value in inputs.plan.describe().items():
        print(f"  {label:28}{value}")
    for warning in inputs.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return inputs


def _print_summary(summary: dict) -> None:
    for name, rewards in summary["scores"].items():
        for reward, score in rewards.items():
            low, high = score["gain_95"]
            print(
                f"{name:14} {reward:28} {score['base']:.3f} -> {score['tuned']:.3f}  "
                f"gain {score['gain']:+.3f} (95 % {low:+.3f} to {high:+.3f})"
            )


def _print_snippet(config: GRPOConfig, trainer) -> None:
    from flowgrpo.reporting.snippet import inference_snippet

    row = [*trainer.inputs.test_rows, *trainer.inputs.rows][0]
    print("\nUse it with plain diffusers:\n")
    print(inference_snippet(config, type(trainer.policy.pipe), trainer.folder.lora, row))


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")] if text else []
        if not all(map(math.isfinite, numbers)):
            raise ValueError
        return numbers
    except ValueError:
        raise ValueError(f'--scales is "{text}", but must be numbers like 0,0.5,1.') from None


def _quiet_libraries() -> None:
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning)


if __name__ == "__main__":
    main()
