"""How much signal is in a policy gradient: compares sampling settings without training.

    python scripts/gradient_signal.py CONFIG [--images 512] [--base override]... SETTING...

Each SETTING is a list of overrides, separated by semicolons, as
"sampling.noise_level=0.5;sampling.window.size=1". With the weights that the policy starts from, the
gradient of many groups is computed in chunks. The chunks' mean scalar product estimates the squared
length of the true gradient, the rest of their squared length is noise. Printed is the number of
images whose mean gradient has as much signal as noise, and the seconds that this takes: the lower,
the faster a run can learn. Signal over its standard error tells whether to believe it.
"""

import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

import flowgrpo.cli  # noqa: F401  sets the wait policy before torch is imported
from flowgrpo.core.config_file import load_config


def main(
    config: Path,
    settings: Annotated[
        list[str], typer.Argument(help="Overrides separated by semicolons, one set each.")
    ],
    images: Annotated[int, typer.Option(help="Images to measure each setting with.")] = 512,
    chunk: Annotated[int, typer.Option(help="Groups per chunk.")] = 2,
    base: Annotated[list[str] | None, typer.Option(help="Override for all settings.")] = None,
) -> None:
    """Print the gradient's signal for each set of overrides."""
    import torch

    from flowgrpo.algorithms.advantages import advantages
    from flowgrpo.training.metrics import MetricSums
    from flowgrpo.training.trainer import GRPOTrainer

    print(f"{'reward':>7} {'spread':>7} {'images':>8} {'seconds':>8} {'s/err':>6}  setting")
    for setting in settings:
        overrides = [*(base or []), *(part for part in setting.split(";") if part)]
        with tempfile.TemporaryDirectory() as folder:
            args = load_config(
                config, [*overrides, f"output_dir={folder}/run", "train.updates_per_epoch=1"]
            )
            run = GRPOTrainer(args=args)
        groups = max(4, images // args.sampling.group_size)
        started = time.perf_counter()
        plans = [g for epoch in range(groups) for g in run.plan.groups(epoch)][:groups]
        samples = run.sample(plans)
        rewards = {r.name: [s.rewards[r.name] for s in samples] for r in run.rewards}
        values = advantages(rewards, {r.name: r.weight for r in run.rewards}, args.train.advantage)
        gradients = []
        for start in range(0, groups, chunk):
            rollouts = [group.rollouts for group in samples]
            part = list(zip(rollouts, values, strict=True))[start : start + chunk]
            count = len(part) * args.sampling.group_size * run.plan.window_size
            run.learner.accumulate(part, count, MetricSums())
            parameters = run.policy.parameters.values()
            gradients.append(
                torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).double()
            )
            run.learner.optimizer.zero_grad()
        seconds = time.perf_counter() - started
        stack = torch.stack(gradients)
        products = stack @ stack.T
        number = len(stack)
        signal = (products.sum() - products.trace()) / (number * (number - 1))
        noise = products.trace() / number - signal
        needed = (
            float(noise / signal) * chunk * args.sampling.group_size if signal > 0 else float("inf")
        )
        pairs = products[~torch.eye(number, dtype=torch.bool)]
        error = float(pairs.std() / (number * (number - 1) / 2) ** 0.5)
        total = torch.stack([g for group in rewards.values() for g in group])
        print(
            f"{total.mean():7.3f} {total.std(dim=1).mean():7.3f} {needed:8.0f} "
            f"{needed * seconds / (groups * args.sampling.group_size):8.1f} "
            f"{float(signal) / error:6.1f}  {setting}",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
