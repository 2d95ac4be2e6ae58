"""The command line: train, plan, check, compare."""

import os

# Before torch is imported: threads that spin while they wait make every operation of a busy machine
# several milliseconds slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A process of a run that is gone is told in one sentence, not in frames of C++.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import sys
from pathlib import Path
from typing import Annotated

import typer

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
    from flowgrpo.commands.train import train

    train(config, overrides or [], resume=resume)


@app.command()
def plan(config: Config, overrides: Overrides = None) -> None:
    """Print what a training run of CONFIG would do and need, without loading a model's weights."""
    from flowgrpo.commands.plan import plan

    plan(config, overrides or [])


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
    from flowgrpo.commands.check import check

    if not check(model, overrides or []):
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
    from flowgrpo.commands.compare import Comparison, compare

    compare(
        Comparison(
            runs=runs,
            prompts=prompt or [],
            num_prompts=num_prompts,
            seeds=seed or [0],
            checkpoints=checkpoints,
            scales=scales,
            loras=lora or [],
            out=out,
        )
    )


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


if __name__ == "__main__":
    main()
