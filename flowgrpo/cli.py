"""The command line: `flowgrpo train`, `plan`, `check` and `compare`."""

import os

# Set before torch is imported: on a busy machine, threads that spin while they wait make every
# operation several milliseconds slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A lost process is reported in one sentence; the C++ stack traces of torch would bury it.
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

Config = Annotated[Path, typer.Argument(help="YAML file, such as those in configs/.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings that replace those of CONFIG."),
]


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint in output_dir.")
    ] = False,
) -> None:
    """Train a pipeline with the rewards of CONFIG; all files are written to its output_dir."""
    from flowgrpo.commands.train import train

    train(config, overrides or [], resume=resume)


@app.command()
def plan(config: Config, overrides: Overrides = None) -> None:
    """Predict what training with CONFIG does and needs, without loading the model's weights."""
    from flowgrpo.commands.plan import plan

    plan(config, overrides or [])


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="Name on the hub, folder of a pipeline, or config.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE]...",
            help="Call arguments of the pipeline, such as height=512, and SECTION.KEY=VALUE.",
        ),
    ] = None,
) -> None:
    """Test whether a pipeline can be trained: compares stock sampling, rollout, replay and LoRA."""
    from flowgrpo.commands.check import check

    if not check(model, overrides or []):
        raise typer.Exit(1)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Prompt; repeat the option for more.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Maximum number of prompts.")] = 6,
    seed: Annotated[
        list[int] | None, typer.Option(help="Seed of the noise; repeat the option for more.")
    ] = None,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Add a column per checkpoint.")
    ] = False,
    scales: Annotated[
        str, typer.Option(help="LoRA scales with a column each, such as 0,0.5,1.")
    ] = "",
    lora: Annotated[
        list[Path] | None, typer.Option(help="Folder of another LoRA; repeat for more.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Path of the PNG; default: grid.png in the first run folder."),
    ] = None,
) -> None:
    """Draw a grid: a row per prompt and seed, a column per model, checkpoint or LoRA scale."""
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
    """Runs the command line; an error is one sentence on stderr, with exit code 1."""
    try:
        _run()
    except SystemExit as stop:
        if "flowgrpo.runs.tracker_worker" in sys.modules:  # else no tracker was started
            from flowgrpo.runs.tracker_worker import exit_if_hung

            exit_if_hung(stop.code if isinstance(stop.code, int) else int(stop.code is not None))
        raise


def _run() -> None:
    try:
        app()
    except Exception as error:
        if os.environ.get("FLOWGRPO_TRACEBACK"):
            raise
        message = str(error)
        if not isinstance(error, (ValueError, RuntimeError, ImportError, OSError)):
            message = f"{type(error).__name__}: {error} (set FLOWGRPO_TRACEBACK=1 to see where)"
        print(f"flowgrpo: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
