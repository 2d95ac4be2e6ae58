"""Estimates the signal in a policy gradient, to compare sampling settings without training.

    python scripts/gradient_signal.py CONFIG [--images 512] [--base override]... SETTING...

Each SETTING is a list of overrides, separated by semicolons, such as
"sampling.noise_level=0.5;sampling.window.size=1". The gradient of many groups is computed in
chunks, with the weights that training starts from. The mean scalar product of two chunks estimates
the squared length of the true gradient; the rest of a chunk's squared length is noise. The table
has, for each SETTING, the number of images whose mean gradient has as much signal as noise, and the
seconds that they take: the lower, the faster a run can learn. The last column, signal over its
standard error, says how reliable the estimate is.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import flowgrpo.cli  # noqa: F401  sets the wait policy before torch is imported
from flowgrpo.core.config_file import load_config

if TYPE_CHECKING:
    from torch import Tensor

    from flowgrpo.training.rollouts import RolloutGroup
    from flowgrpo.training.trainer import GRPOTrainer


def chunk_gradients(
    trainer: "GRPOTrainer",
    groups: "Sequence[RolloutGroup]",
    advantages: "Sequence[Tensor]",
    groups_per_chunk: int,
) -> "Iterator[Tensor]":
    """Yields the flat float64 gradient of each chunk of groups, a mean over its transitions."""
    import torch

    from flowgrpo.training.metrics import MetricSums

    pairs = [(g.rollouts, a) for g, a in zip(groups, advantages, strict=True)]
    for start in range(0, len(pairs), groups_per_chunk):
        chunk = pairs[start : start + groups_per_chunk]
        num_transitions = len(chunk) * trainer.plan.transitions_per_group
        trainer.learner.accumulate(chunk, num_transitions, MetricSums())
        parameters = trainer.policy.parameters.values()
        yield torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).double()
        trainer.learner.optimizer.zero_grad()


def signal_and_noise(gradients: "Tensor") -> tuple[float, float, float]:
    """Returns signal, noise and the signal's standard error, from the gradients (chunks, D)."""
    import torch

    products = gradients @ gradients.T
    number = len(gradients)
    signal = (products.sum() - products.trace()) / (number * (number - 1))
    noise = products.trace() / number - signal
    off_diagonal = products[~torch.eye(number, dtype=torch.bool)]
    error = off_diagonal.std() / (number * (number - 1) / 2) ** 0.5
    return float(signal), float(noise), float(error)


def measure(trainer: "GRPOTrainer", images: int, groups_per_chunk: int) -> str:
    """Measures one setting; returns its line of the table."""
    import torch

    from flowgrpo.algorithms.advantages import advantages

    group_size = trainer.config.sampling.group_size
    num_groups = max(4, images // group_size)
    started = time.perf_counter()
    plan = [group for epoch in range(num_groups) for group in trainer.plan.groups(epoch)]
    groups = trainer.sample(plan[:num_groups])
    rewards = {r.name: [group.rewards[r.name] for group in groups] for r in trainer.rewards}
    weights = {r.name: r.weight for r in trainer.rewards}
    values = advantages(rewards, weights, trainer.config.train.advantage)
    gradients = torch.stack([*chunk_gradients(trainer, groups, values, groups_per_chunk)])
    seconds_per_image = (time.perf_counter() - started) / (num_groups * group_size)
    signal, noise, error = signal_and_noise(gradients)
    needed = noise / signal * groups_per_chunk * group_size if signal > 0 else float("inf")
    scores = torch.stack([score for reward in rewards.values() for score in reward])
    return (
        f"{scores.mean():7.3f} {scores.std(dim=1).mean():7.3f} {needed:8.0f} "
        f"{needed * seconds_per_image:8.1f} {signal / error:6.1f}"
    )


def main(
    config: Path,
    settings: Annotated[
        list[str], typer.Argument(help="Overrides separated by semicolons, one set per setting.")
    ],
    images: Annotated[int, typer.Option(help="Number of images per setting.")] = 512,
    chunk: Annotated[int, typer.Option(help="Number of groups per chunk.")] = 2,
    base: Annotated[list[str] | None, typer.Option(help="Override for all settings.")] = None,
) -> None:
    """Print the signal of the gradient for each setting."""
    from flowgrpo.training.trainer import GRPOTrainer

    print(f"{'reward':>7} {'std':>7} {'images':>8} {'seconds':>8} {'s/err':>6}  setting")
    for setting in settings:
        overrides = [*(base or []), *(part for part in setting.split(";") if part)]
        with tempfile.TemporaryDirectory() as folder:
            fixed = [f"output_dir={folder}/run", "train.updates_per_epoch=1"]
            trainer = GRPOTrainer(args=load_config(config, [*overrides, *fixed]))
        print(f"{measure(trainer, images, chunk)}  {setting}", flush=True)


if __name__ == "__main__":
    typer.run(main)
