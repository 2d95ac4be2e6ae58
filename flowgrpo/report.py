"""The run folder: metrics, pictures, curves and the summary that people read."""

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image
from torch import Tensor

from flowgrpo.config import ConfigError, GRPOConfig, dump_config, plain, refuse_changes
from flowgrpo.evaluate import SCORES, load_scores, write_whole
from flowgrpo.grids import draw_grid
from flowgrpo.pipelines import absent_parts

SHEET_ROWS, SHEET_COLUMNS = 6, 8
"""Groups and images of a group on one sheet of rollouts."""
BOOTSTRAP_SAMPLES = 10_000


class RunFolder:
    """Paths and files of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.lora = path / "lora"

    def refuse_other_run(
        self, resume: bool, config: GRPOConfig, fingerprint: dict[str, Any]
    ) -> None:
        """Raises ConfigError where the folder holds a run and shall not, or holds a different one.

        A folder without the base model's evaluation holds no run yet.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"output_dir is {self.path}, but that is a file; name a folder.")
        holds_run = self.is_evaluated(0)
        if holds_run and not resume:
            raise ConfigError(
                f"output_dir is {self.path}, but it holds another run; use --resume, or name "
                "another folder."
            )
        if resume and not (self.path / "config.yaml").exists():
            raise ConfigError(
                f"output_dir is {self.path}, but it holds no run to resume; leave out --resume."
            )
        if resume and holds_run:
            then = yaml.safe_load((self.path / "config.yaml").read_text())
            refuse_changes(then, plain(config))
            refuse_changes(json.loads((self.path / "inputs.json").read_text()), fingerprint)

    def begin(self, config: GRPOConfig, fingerprint: dict[str, Any], epoch: int) -> None:
        """Writes the resolved config; drops what a resumed run does again after `epoch`."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / "config.yaml", dump_config(config))
        write_whole(self.path / "inputs.json", json.dumps(fingerprint, indent=1))
        for folder in self._evaluation_folders():
            if _epoch_of(folder) > epoch:
                shutil.rmtree(folder)
        kept = [line for line in self.metrics() if line["epoch"] <= epoch]
        write_whole(self._metrics, "".join(json.dumps(line) + "\n" for line in kept))

    def log(self, line: dict[str, Any]) -> None:
        with self._metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        if not self._metrics.exists():
            return []
        lines = self._metrics.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]  # a line that a kill cut short has no end

    def evaluation(self, epoch: int) -> Path:
        return self.path / "eval" / f"epoch-{epoch:04d}"

    def evaluations(self) -> dict[int, dict[str, dict[str, Tensor]]]:
        """Scores of every whole evaluation by epoch; 0 is the base model."""
        folders = [f for f in self._evaluation_folders() if (f / SCORES).exists()]
        return {_epoch_of(folder): load_scores(folder) for folder in folders}

    def is_evaluated(self, epoch: int) -> bool:
        return (self.evaluation(epoch) / SCORES).exists()

    def save_samples(
        self, epoch: int, groups: Sequence[tuple[str, list[Image.Image], list[float]]]
    ) -> None:
        """A sheet of rollouts (noisy, few steps) as scored: groups of (prompt, images, scores)."""
        chosen = [(p, i[:SHEET_COLUMNS], s[:SHEET_COLUMNS]) for p, i, s in groups[:SHEET_ROWS]]
        sheet = draw_grid(
            [images for _, images, _ in chosen],
            [prompt for prompt, _, _ in chosen],
            [f"rollout {number + 1}" for number in range(len(chosen[0][1]))],
            [[f"{score:.3f}" for score in scores] for _, _, scores in chosen],
        )
        (self.path / "samples").mkdir(exist_ok=True)
        sheet.save(self.path / "samples" / f"epoch-{epoch:04d}.png")

    def _evaluation_folders(self) -> list[Path]:
        return sorted((self.path / "eval").glob("epoch-*"))

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"


def _epoch_of(folder: Path) -> int:
    return int(folder.name.split("-")[1])


class Clock:
    """Wall time of a run, and seconds by phase since the last lap; a phase within a phase counts
    for itself alone."""

    def __init__(self, before: float = 0.0):
        """`before` are the seconds of earlier starts of the run."""
        self._start = time.perf_counter() - before
        self._phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start, inner = time.perf_counter(), sum(self._phases.values())
        yield
        within = sum(self._phases.values()) - inner
        elapsed = time.perf_counter() - start - within
        self._phases[phase] = self._phases.get(phase, 0.0) + elapsed

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last lap."""
        phases, self._phases = self._phases, {}
        return {name: round(seconds, 3) for name, seconds in phases.items()}

    @property
    def total(self) -> float:
        return time.perf_counter() - self._start


def reward_metrics(
    rewards: Mapping[str, Sequence[Tensor]], totals: Sequence[Tensor]
) -> dict[str, Any]:
    """Spread of each reward over all images of an epoch, and the mean spread within groups (K,)."""
    return {
        "rewards": {name: spread(torch.stack(list(groups))) for name, groups in rewards.items()},
        "total": spread(torch.stack(list(totals))),
        "mean_group_std": float(torch.stack(list(totals)).std(dim=1, correction=0).mean()),
    }


def spread(rewards: Tensor) -> dict[str, float]:
    """Mean, standard deviation, least and greatest of all rewards of an epoch."""
    return {
        "mean": float(rewards.mean()),
        "std": float(rewards.std(correction=0)),
        "min": float(rewards.min()),
        "max": float(rewards.max()),
    }


def paired_bootstrap(base: Tensor, tuned: Tensor, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean gain, resampling prompts.

    Args:
        base, tuned: (prompts, seeds) scores with the same noise; a prompt's seeds stay together,
            since they are not independent.
    """
    gains = (tuned - base).mean(dim=1)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(len(gains), (BOOTSTRAP_SAMPLES, len(gains)), generator=generator)
    low, high = gains[draws].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=gains.dtype))
    return float(low), float(high)


def summarise(
    folder: RunFolder, headline: str, epoch: int, totals: dict[str, Any]
) -> dict[str, Any]:
    """Base against tuned, by prompt set; writes summary.json, curves.png and compare.png.

    `reward`, `base` and `tuned` are about the headline reward; `scores` has every reward, with the
    gain and its 95 % interval.
    """
    evaluations = folder.evaluations()
    base, tuned = evaluations[0], evaluations[epoch]
    summary = {
        "reward": headline,
        "base": {name: float(scores[headline].mean()) for name, scores in base.items()},
        "tuned": {name: float(scores[headline].mean()) for name, scores in tuned.items()},
        "epochs": epoch,
        **totals,
        "scores": {
            name: {
                reward: {
                    "base": float(scores[reward].mean()),
                    "tuned": float(tuned[name][reward].mean()),
                    "gain": float((tuned[name][reward] - scores[reward]).mean()),
                    "gain_95": paired_bootstrap(scores[reward], tuned[name][reward]),
                }
                for reward in scores
            }
            for name, scores in base.items()
        },
    }
    write_whole(folder.path / "summary.json", json.dumps(summary, indent=1))
    draw_curves(folder, headline)
    draw_before_after(folder, headline, epoch)
    return summary


def draw_curves(folder: RunFolder, headline: str) -> None:
    """Training reward and evaluation score by epoch, as curves.png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    metrics = folder.metrics()
    for name in metrics[0]["rewards"] if metrics else []:
        left.plot(
            [m["epoch"] for m in metrics], [m["rewards"][name]["mean"] for m in metrics], label=name
        )
    left.set(title="rewards of the rollouts", xlabel="epoch")
    evaluations = folder.evaluations()
    for name in next(iter(evaluations.values())):
        values = [float(scores[name][headline].mean()) for scores in evaluations.values()]
        right.plot(list(evaluations), values, marker="o", label=name.replace("_", " "))
    right.set(title=f"{headline} at evaluation", xlabel="epoch")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False)
    figure.savefig(folder.path / "curves.png", dpi=120)


def draw_before_after(folder: RunFolder, headline: str, epoch: int, most: int = 12) -> None:
    """Held-out prompts from all over the file, base beside tuned with the same noise."""
    evaluations = folder.evaluations()
    name = "test_prompts" if "test_prompts" in evaluations[0] else "train_prompts"
    data = json.loads((folder.evaluation(0) / SCORES).read_text())
    prompts, seeds = data["prompts"][name], data["seeds"][:2]
    rows = range(0, len(prompts), -(-len(prompts) // most))
    columns = [
        (e, label, s) for s, _ in enumerate(seeds) for e, label in ((0, "base"), (epoch, "tuned"))
    ]
    pictures, captions = [], []
    for row in rows:
        paths = [
            folder.evaluation(e) / name / f"{row:04d}-seed{seeds[s]}.png" for e, _, s in columns
        ]
        pictures.append([Image.open(path) for path in paths])
        captions.append(
            [f"{float(evaluations[e][name][headline][row, s]):.2f}" for e, _, s in columns]
        )
    labels = [f"{label}, seed {seeds[s]}" for _, label, s in columns]
    draw_grid(pictures, [prompts[row] for row in rows], labels, captions).save(
        folder.path / "compare.png"
    )


def snippet(config: GRPOConfig, pipeline: Any, lora: Path, prompt: str) -> str:
    """Four lines of plain diffusers that use the result, one more in half precision."""
    path = config.model.path
    if path is None:
        return ""
    needed = set(absent_parts(path)) - set(pipeline._optional_components)
    absent = "".join(f", {name}=None" for name in sorted(needed))
    dtype = config.model.dtype
    loaded = "" if dtype == "float32" else f", dtype=torch.{dtype}"
    needs_torch = "import torch\n" if loaded else ""
    arguments = "".join(f", {key}={value!r}" for key, value in config.evaluation_call.items())
    return (
        f"{needs_torch}from diffusers import {pipeline.__name__}\n"
        f"pipe = {pipeline.__name__}.from_pretrained({path!r}{loaded}{absent})\n"
        f"pipe.load_lora_weights({str(lora)!r})\n"
        f"image = pipe({prompt!r}{arguments}).images[0]"
    )
