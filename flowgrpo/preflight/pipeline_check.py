"""Can this pipeline be trained? Proves it on the pipeline itself, with the settings of a run.

`check_pipeline` compares the untouched pipeline with the sampler, the sampler with its replay, and
the trained adapter with the one that plain diffusers loads again. A run starts with the middle part
(`check_replay`), whatever the model.
"""

import hashlib
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from flowgrpo.algorithms.sde import log_prob
from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.config_file import parse_config
from flowgrpo.core.sampling_config import reject_sampler_arguments, require_stochastic_steps
from flowgrpo.data.plan import Plan
from flowgrpo.data.prompts import Row
from flowgrpo.data.samples import frames_of
from flowgrpo.pipelines.batching import Batchings
from flowgrpo.pipelines.call import outputs
from flowgrpo.pipelines.call_checks import check_call
from flowgrpo.pipelines.compile import compiled
from flowgrpo.pipelines.lora import load_lora, unload_lora
from flowgrpo.pipelines.parts import modules_of
from flowgrpo.policy.policy import Policy, Rollout
from flowgrpo.policy.record import record
from flowgrpo.policy.tape import Tape
from flowgrpo.policy.weights import inference_weights, load_weights, trained_values
from flowgrpo.preflight.check_report import CheckReport
from flowgrpo.preflight.replay_check import (
    check_rollout,
    check_seeds,
    nan_max,
    nudged_weights,
    replay_differences,
)

PROMPT = "a photo of a red cube on a table"


CHANGE = 2e-3
"""Of the summed log-probs in a finite difference: far above rounding, and small."""


def check_pipeline(
    pipe: Any, *, settings: GRPOConfig | None = None, row: Row | None = None, **call: Any
) -> CheckReport:
    """Whether `pipe` can be trained with these settings, and what was measured.

    The pipeline is left as it was. A pipeline that fails gives a report with a reason, no error.

    Args:
        pipe: any diffusers pipeline, without an adapter of its own.
        settings: of the run; default: those of `GRPOConfig()`.
        row: what to draw: a prompt, with its pictures if it has some.
        call: the pipeline's own arguments, over those of `settings.sampling.call`; also `prompt`
            and `num_inference_steps`.
    """
    row = row or Row(prompt=PROMPT, source="check")
    row = replace(row, prompt=call.pop("prompt", row.prompt))
    proof = _Proof(pipe, settings or GRPOConfig(), row, call)
    start = time.perf_counter()
    with _left_as_it_was(pipe):
        try:
            proof.run()
        except Exception as error:  # pipelines raise what they like
            reason = " ".join(f"{error}".split()) or type(error).__name__
            plain = isinstance(error, (ValueError, RuntimeError))
            proof.report.reason = reason if plain else f"{type(error).__name__}: {reason}"
    proof.report.seconds = time.perf_counter() - start
    proof.report.peak_memory = peak_memory()
    return proof.report


def peak_memory() -> int:
    """Most bytes so far: of the GPU where there is one, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class _Proof:
    """The checks one after the other; each raises ValueError where it fails."""

    def __init__(self, pipe: Any, settings: GRPOConfig, row: Row, call: dict[str, Any]):
        self.pipe, self.settings, self.row = pipe, settings, row
        self.call = {**settings.sampling_call, **call}
        self.name = type(pipe).__name__
        self.report = CheckReport(
            pipeline=self.name, replay_allowed=settings.objective.replay_tolerance
        )

    def run(self) -> None:
        require_stochastic_steps(self.settings.sampling)
        steps = self.call["num_inference_steps"]
        others = {k: v for k, v in self.call.items() if k != "num_inference_steps"}
        reject_sampler_arguments("call", others)
        self.settings = _with_steps(self.settings, steps)
        if noisy := _live_dropout(self.pipe):
            raise ValueError(
                f"{noisy} of {self.name} is in training mode, so dropout is on; call .eval()."
            )
        check_call(self.pipe, "call", self.call)
        self.call["output_type"] = "latent"
        # Torch folds some matrix products another way for weights that require gradients, which
        # moves their last bit; so the untouched pipeline is frozen, too.
        for module in modules_of(self.pipe).values():
            module.requires_grad_(False)
        self.batchings = Batchings(self.pipe)
        self.seeds = check_seeds(self.batchings, self.row, self.call)
        self.batching = self.batchings.of(self.row, self.call)
        self.bare = self.stock_run(self.seeds)
        lora = self.settings.train.lora
        start = load_lora(self.pipe, Path(lora.start)) if lora and lora.start else []
        self.prove_repeatable()
        unload_lora(self.pipe, start)
        self.policy = Policy(self.pipe, self.settings.train, batchings=self.batchings)
        before = {name: p.detach().clone() for name, p in self.policy.parameters.items()}
        try:
            self.prove_policy()
        finally:
            if lora is None:
                load_weights(self.policy, before)

    def prove_policy(self) -> None:
        """What a run does: stock without noise, replays with gradients, leaves the rest alone."""
        self.prove_stock()
        frozen = _hashes(self.policy)
        load_weights(self.policy, nudged_weights(self.policy))
        with compiled(self.policy.denoisers) if self.settings.model.compile else nullcontext():
            self.prove_replay()
        self.prove_frozen(frozen)
        if self.policy.is_lora:
            self.prove_round_trip()

    def prove_repeatable(self) -> None:
        """The untouched pipeline gives the same twice."""
        self.stock = self.stock_run(self.seeds)
        if (again := _difference(self.stock_run(self.seeds), self.stock)) != 0:
            raise ValueError(
                f"{self.name} differs from itself by {again:.1e} when it is called twice with the "
                "same seeds; it draws random numbers of its own or keeps state between calls."
            )
        if len(self.seeds) > 1:
            alone = zip(*(self.stock_run([seed]) for seed in self.seeds), strict=True)
            together = [torch.cat(field) for field in alone]
            self.report.micro_batch_difference = _difference(together, self.stock)

    def prove_stock(self) -> None:
        """Without noise the sampler is the untouched pipeline."""
        tape = Tape(sde=self.settings.sampling.sde, noise_level=0.0, window=range(0))
        with (
            inference_weights(self.policy),
            record(self.pipe, self.policy.taped, tape, _no_noise),
            self.policy.prompt_cache.active(),
        ):
            self.report.stock_difference = _difference(self.stock_run(self.seeds), self.stock)
        if self.report.stock_difference != 0:
            raise ValueError(
                f"{self.name} without noise is {self.report.stock_difference:.1e} away from the "
                "untouched pipeline; a LoRA layer or the prompt memo changes its result."
            )

    def prove_replay(self) -> None:
        """Every trained step replays its log-prob, with gradients."""
        report, policy = self.report, self.policy
        first, last = Plan(config=self.settings, rows=[self.row]).window_bounds
        window = range(first, last + 1)
        rollout = check_rollout(policy, self.row, self.call, self.settings, window)
        report.calls_per_step = _calls_per_step(policy, rollout)
        calls = list(report.calls_per_step.values())
        if sum(any(counts) for counts in zip(*calls, strict=True)) < 2:
            raise ValueError(
                f"the denoiser of {self.name} is called in fewer than two steps of the loop, but "
                "training needs one that is called again; use another pipeline."
            )
        report.replay_difference = nan_max(replay_differences(policy, rollout).values())
        if not report.replay_difference <= report.replay_allowed:
            raise ValueError(
                f"{self.name} replays {report.replay_difference:.1e} away from its rollout "
                f"(allowed {report.replay_allowed:.0e}); a denoiser keeps state of its own, or an "
                "option depends on more than its inputs."
            )
        report.gradient_share = _gradient_share(policy)
        if report.gradient_share == 0:
            raise ValueError(
                f"no trained tensor of {self.name} got a gradient; the loop must let gradients "
                "through from the denoiser to the scheduler."
            )
        dtypes = {p.dtype for d in policy.denoisers.values() for p in d.parameters()}
        if dtypes == {torch.float32}:
            report.gradient_error = _gradient_error(policy, rollout)

    def prove_frozen(self, before: dict[str, str]) -> None:
        """An optimizer step leaves what is frozen."""
        torch.optim.SGD(self.policy.parameters.values(), lr=1e-3).step()
        self.report.frozen_unchanged = _hashes(self.policy) == before
        if not self.report.frozen_unchanged:
            raise ValueError(f"an optimizer step changed frozen weights of {self.name}.")

    def prove_round_trip(self) -> None:
        """Saved, taken off, and loaded into the stock pipeline, the adapter gives the same."""
        policy = self.policy
        with inference_weights(policy), tempfile.TemporaryDirectory() as folder:
            with policy.prompt_cache.active():
                used = self.stock_run(self.seeds)
            policy.save(Path(folder))
            unload_lora(self.pipe, list(policy.denoisers))
            if (rest := _difference(self.stock_run(self.seeds), self.bare)) != 0:
                raise ValueError(f"{self.name} without its adapter is {rest:.1e} from stock.")
            load_lora(self.pipe, Path(folder))
            self.report.lora_round_trip = _difference(self.stock_run(self.seeds), used)
        if self.report.lora_round_trip != 0:
            raise ValueError(
                f"the saved LoRA of {self.name} gives latents {self.report.lora_round_trip:.1e} "
                "away from the trainer's; its loader changes or drops weights."
            )
        if _difference(used, self.stock) == 0:
            raise ValueError(f"the LoRA of {self.name} changes nothing; choose other targets.")

    def stock_run(self, seeds: Sequence[int]) -> list[Tensor]:
        """Latents, of audio too, as the pipeline gives them now."""
        with torch.no_grad():
            fields = outputs(self.pipe, self.row, seeds, self.call, self.batching)
        return [tensor for tensor in map(_as_tensor, fields) if tensor is not None]


@contextmanager
def _left_as_it_was(pipe: Any) -> Iterator[None]:
    """After the block the pipeline has no adapter, and its modules' flags are as before."""
    parts = modules_of(pipe)
    own = {name for name, part in parts.items() if getattr(part, "peft_config", None)}
    inner = [module for part in parts.values() for module in part.modules()]
    flags = ("training", "gradient_checkpointing")
    kept = [(m, f, getattr(m, f)) for m in inner for f in flags if hasattr(m, f)]
    requires_grad = {p: p.requires_grad for part in parts.values() for p in part.parameters()}
    try:
        yield
    finally:
        added = [n for n, part in parts.items() if getattr(part, "peft_config", None)]
        unload_lora(pipe, [name for name in added if name not in own])
        for module, flag, value in kept:
            setattr(module, flag, value)
        for parameter, trained in requires_grad.items():
            parameter.requires_grad_(trained)


def _with_steps(settings: GRPOConfig, steps: int) -> GRPOConfig:
    data = settings.model_dump()
    data["sampling"]["num_inference_steps"] = steps
    return parse_config(data)


def _calls_per_step(policy: Policy, rollout: Rollout) -> dict[str, list[int]]:
    iterations = range(max(index for index, _ in rollout.tape.steps) + 1)
    calls = {
        name: [len(rollout.tape.outputs.get((name, k), [])) for k in iterations]
        for name in policy.denoisers
    }
    return {name: counts for name, counts in calls.items() if any(counts)}


def _gradient_share(policy: Policy) -> float:
    gradients = [p.grad for p in policy.parameters.values()]
    return sum(g is not None and bool(g.any()) for g in gradients) / len(gradients)


def _gradient_error(policy: Policy, rollout: Rollout) -> float:
    """How far the slope of the summed log-probs along their gradient is from a central difference:
    parts of a model that let no gradient through show here, and nowhere else."""
    weights = {name: p.detach() for name, p in policy.parameters.items()}
    gradient = {n: p.grad for n, p in policy.parameters.items() if p.grad is not None}
    squared = sum(float(g.double().square().sum()) for g in gradient.values())
    step = CHANGE / squared
    sums = []
    for sign in (1, -1):
        moved = {n: weights[n] + sign * step * gradient[n] for n in gradient}
        with trained_values(policy, {**weights, **moved}):
            sums.append(_summed_log_prob(policy, rollout))
    return abs((sums[0] - sums[1]) / (2 * CHANGE) - 1)


def _summed_log_prob(policy: Policy, rollout: Rollout) -> float:
    values = []
    policy.replay(
        rollout,
        lambda step, now: values.append(log_prob(step.next_latents, now.mean, now.std)),
        gradients=False,
    )
    return float(torch.stack(values).double().sum())


def _hashes(policy: Policy) -> dict[str, str]:
    """Of every frozen tensor of the denoisers."""
    return {
        f"{name}.{key}": _sha256(p.detach())
        for name, module in policy.denoisers.items()
        for key, p in module.named_parameters()
        if not p.requires_grad
    }


def _sha256(tensor: Tensor) -> str:
    values = tensor.cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def _live_dropout(pipe: Any) -> str:
    """Name of a module with dropout that is on, if any."""
    for name, part in modules_of(pipe).items():
        for inner in part.modules():
            if isinstance(inner, nn.modules.dropout._DropoutNd) and inner.training and inner.p > 0:
                return name
    return ""


def _no_noise(step: int, stream: int, shape: torch.Size) -> Tensor:
    raise AssertionError("a run without a window draws no noise")


def _as_tensor(field: Any) -> Tensor | None:
    """Latents (B, ...); pixels, of a pipeline that gives no latents; None for anything else."""
    if isinstance(field, Tensor):
        return field
    if isinstance(field[0], Tensor):
        return torch.stack(list(field))
    if isinstance(field[0], (Image.Image, list)):
        pixels = [np.stack([np.asarray(frame) for frame in frames_of(s)]) for s in field]
        return torch.from_numpy(np.stack(pixels))
    return None


def _difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Largest absolute difference of two lists of latents."""
    return max(
        float((x.float() - y.float()).abs().max()) if x.shape == y.shape else float("inf")
        for x, y in zip(a, b, strict=True)
    )
