"""Can this pipeline be trained? Proves it on the pipeline itself, with the settings of a run.

`check_pipeline` compares the untouched pipeline with the sampler, the sampler with its replay, and
the trained adapter with the one that plain diffusers loads again. A run starts with the middle part
(`check_replay`), whatever the model.
"""

import hashlib
import inspect
import math
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from flowgrpo.calls import check_call, find_style, one_sample_a_call, outputs
from flowgrpo.compilation import compiled
from flowgrpo.config import GRPOConfig, refuse_own_arguments, refuse_silence
from flowgrpo.config_file import parse_config
from flowgrpo.kernels import Gaussian, log_prob
from flowgrpo.lora import load_lora, unload_lora
from flowgrpo.media import frames_of
from flowgrpo.pipelines import modules_of
from flowgrpo.plan import Plan
from flowgrpo.policy import Policy, Rollout, as_used, load_weights, trained_values
from flowgrpo.prompts import Row
from flowgrpo.randomness import normal
from flowgrpo.sharding import placed_like
from flowgrpo.tape import ReplayError, Step, Tape, record
from flowgrpo.verdict import Report

PROMPT = "a photo of a red cube on a table"
SEEDS = (1, 2)
"""Samples of a check; different ones, so that swapped samples show."""
NUDGE = 0.02
"""Standard deviation of what is added to a fresh LoRA, which would change nothing."""
CHANGE = 2e-3
"""Of the summed log-probs in a finite difference: far above rounding, and small."""


def check_pipeline(
    pipe: Any, *, settings: GRPOConfig | None = None, row: Row | None = None, **call: Any
) -> Report:
    """Whether `pipe` can be trained with these settings, and what was measured.

    The pipeline is left as it was. A pipeline that fails gives a report with a reason, no error.

    Args:
        pipe: any diffusers pipeline, without an adapter of its own.
        settings: of the run; default: those of `GRPOConfig()`.
        row: what to draw: a prompt, with its pictures if it has some.
        call: the pipeline's own arguments, over those of `settings.sampling.call`; also `prompt`
            and `num_inference_steps`.
    """
    row = row or Row(prompt=PROMPT, place="check")
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


def check_replay(policy: Policy, row: Row, settings: GRPOConfig) -> Rollout:
    """The replay part alone, over all trained steps; returns the rollout it was proved on.

    Weights and counts stay as they are; in between the weights are moved a little, since a fresh
    LoRA would change nothing.

    Raises:
        ReplayError: the replay is not the rollout; training would be biased.
    """
    plan = Plan(config=settings, rows=[row])
    call, (first, last) = settings.sampling_call, plan.window_bounds
    if find_style(policy.pipe, row, call).single and plan.micro_batch_size > 1:
        raise one_sample_a_call(policy.pipe, plan.micro_batch_size)
    passes = dict(policy.passes)
    with trained_values(policy, _nudged(policy)):
        rollout = _rollout(policy, row, call, settings, range(first, last + 1))
        found = replay_differences(policy, rollout)
    policy.passes.update(passes)
    for parameter in policy.parameters.values():
        parameter.grad = None
    difference, worst = _largest(found.values()), max(found, key=lambda index: found[index])
    allowed = settings.train.replay_tolerance
    if not difference <= allowed and settings.guards.replay != "off":
        error = ReplayError(
            f"{type(policy.pipe).__name__} step {worst} replays {difference:.1e} away from its "
            f"rollout (allowed {allowed:.0e}, a tenth of train.clip_range); run flowgrpo check to "
            "see what differs, or widen the clip range."
        )
        if settings.guards.replay == "stop" or math.isnan(difference):
            raise error
        print(f"warning: {error}", file=sys.stderr)
    return rollout


def replay_differences(policy: Policy, rollout: Rollout) -> dict[int, float]:
    """By window step, the largest |log-prob at replay - the rollout's| over the samples.

    Runs backward from every step's log-probs; their gradients are left in the weights.
    """
    found = {}

    def on_step(step: Step, now: Gaussian) -> None:
        assert step.mean is not None
        before = log_prob(step.next_latents, step.mean, step.std)
        replayed = log_prob(step.next_latents, now.mean, now.std)
        found[step.index] = float((replayed.detach() - before).abs().max())
        if replayed.requires_grad:
            replayed.sum().backward()

    try:
        policy.replay(rollout, on_step)
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise ReplayError(
            f"{type(policy.pipe).__name__} step {len(found)} depends on the weights through an "
            f"earlier step, so a denoiser keeps state between steps; {_cache_hint(policy.pipe)}."
        ) from error
    return found


def _cache_hint(pipe: Any) -> str:
    names = [n for n in inspect.signature(type(pipe).__call__).parameters if "cache" in n]
    return f"set {names[0]} to false" if names else "switch its cache off, if it has one"


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
        self.report = Report(pipeline=self.name, replay_allowed=settings.train.replay_tolerance)

    def run(self) -> None:
        refuse_silence(self.settings.sampling)
        steps = self.call["num_inference_steps"]
        others = {k: v for k, v in self.call.items() if k != "num_inference_steps"}
        refuse_own_arguments("call", others)
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
        self.seeds = _seeds(self.pipe, self.row, self.call)
        self.bare = self.stock_run(self.seeds)
        lora = self.settings.train.lora
        start = load_lora(self.pipe, Path(lora.start)) if lora and lora.start else []
        self.prove_repeatable()
        unload_lora(self.pipe, start)
        self.policy = Policy(self.pipe, self.settings.train)
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
        load_weights(self.policy, _nudged(self.policy))
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
        tape = Tape(kind=self.settings.sampling.kind, noise_level=0.0, window=range(0))
        with (
            as_used(self.policy),
            record(self.pipe, self.policy.taped, tape, _no_noise),
            self.policy.prompts_memoised(),
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
        rollout = _rollout(policy, self.row, self.call, self.settings, window)
        report.calls_per_step = _calls_per_step(policy, rollout)
        calls = list(report.calls_per_step.values())
        if sum(any(counts) for counts in zip(*calls, strict=True)) < 2:
            raise ValueError(
                f"the denoiser of {self.name} is called in fewer than two steps of the loop, but "
                "training needs one that is called again; use another pipeline."
            )
        report.replay_difference = _largest(replay_differences(policy, rollout).values())
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
        """An optimiser step leaves what is frozen."""
        torch.optim.SGD(self.policy.parameters.values(), lr=1e-3).step()
        self.report.frozen_unchanged = _hashes(self.policy) == before
        if not self.report.frozen_unchanged:
            raise ValueError(f"an optimiser step changed frozen weights of {self.name}.")

    def prove_round_trip(self) -> None:
        """Saved, taken off, and loaded into the stock pipeline, the adapter gives the same."""
        policy = self.policy
        with as_used(policy), tempfile.TemporaryDirectory() as folder:
            with policy.prompts_memoised():
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
            fields = outputs(self.pipe, self.row, seeds, self.call)
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


def _seeds(pipe: Any, row: Row, call: dict[str, Any]) -> tuple[int, ...]:
    return SEEDS[:1] if find_style(pipe, row, call).single else SEEDS


def _rollout(
    policy: Policy, row: Row, call: dict[str, Any], settings: GRPOConfig, window: range
) -> Rollout:
    seeds = _seeds(policy.pipe, row, call)

    def noise(step: int, stream: int, shape: torch.Size) -> Tensor:
        return torch.stack([normal(shape[1:], "check", seed, step, stream) for seed in seeds])

    sampling = settings.sampling
    return policy.rollout(
        row,
        seeds,
        call,
        kind=sampling.kind,
        noise_level=sampling.noise_level,
        window=window,
        noise=noise,
    )


def _with_steps(settings: GRPOConfig, steps: int) -> GRPOConfig:
    data = settings.model_dump()
    data["sampling"]["num_inference_steps"] = steps
    return parse_config(data)


def _nudged(policy: Policy) -> dict[str, Tensor]:
    """The trained weights, moved: a fresh LoRA changes nothing and half of it gets no gradient."""
    return {
        name: parameter.detach()
        + NUDGE * placed_like(normal(parameter.shape, "nudge", name), parameter)
        for name, parameter in policy.parameters.items()
    }


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


def _largest(values: Iterable[float]) -> float:
    """The maximum, NaN if one of them is: `max` would hide it."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


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
