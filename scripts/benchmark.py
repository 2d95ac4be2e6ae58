"""Measures where an epoch's time goes.

    python scripts/benchmark.py [CONFIG] [section.key=value ...]

Runs a few epochs, including checkpoints, with stopwatches on the denoiser (forward and backward),
the VAE, the text encoders and the rewards. The rest is the trainer and the pipeline's own code.
Rewards are scored inline, so that no second counts twice.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer

import flowgrpo.cli  # noqa: F401  sets the wait policy before torch is imported
from flowgrpo.core.config_file import load_config


class Stopwatches:
    """Adds up seconds by name; a timed call inside another one counts for the outer one only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._running = False

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function with its calls timed."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self(name):
                return function(*args, **kwargs)

        return wrapper

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times the block."""
        if self._running:
            yield
            return
        self._running, start = True, time.perf_counter()
        try:
            yield
        finally:
            self._running = False
            self.seconds[name] += time.perf_counter() - start


def main(
    config: Annotated[Path, typer.Argument()] = Path("configs/tiny_ocr.yaml"),
    overrides: Annotated[list[str] | None, typer.Argument()] = None,
    epochs: Annotated[int, typer.Option()] = 3,
) -> None:
    """Print each part's share of an epoch."""
    import torch

    from flowgrpo.pipelines.parts import modules_of
    from flowgrpo.scoring.reward import Reward
    from flowgrpo.training.trainer import GRPOTrainer

    watches = Stopwatches()
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"output_dir={folder}/run", f"train.epochs={epochs}"]
        trainer = GRPOTrainer(args=load_config(config, [*(overrides or []), *fixed]))
        trainer.rewards = [
            Reward(name=r.name, function=watches.timed("rewards", r.function), weight=r.weight)
            for r in trainer.rewards
        ]
        for name, module in modules_of(trainer.policy.pipe).items():
            is_denoiser = name in trainer.policy.denoisers
            part = "denoiser" if is_denoiser else "vae" if name == "vae" else "text"
            vars(module)["forward"] = watches.timed(part, module.forward)
        vae = trainer.policy.pipe.vae
        vars(vae)["decode"] = watches.timed("vae", vae.decode)
        backward = watches.timed("denoiser backward", torch.Tensor.backward)
        with (
            patch("flowgrpo.preflight.start.require_varying_scores"),
            patch.object(GRPOTrainer, "evaluate"),
            patch.object(GRPOTrainer, "_finish"),
            patch.object(torch.Tensor, "backward", backward),
        ):
            started = time.perf_counter()
            trainer.train()
            total = time.perf_counter() - started
    for name, seconds in sorted(watches.seconds.items(), key=lambda item: -item[1]):
        print(f"{name:20}{seconds / total:7.1%}")
    print(f"{'everything else':20}{1 - sum(watches.seconds.values()) / total:7.1%}")


if __name__ == "__main__":
    typer.run(main)
