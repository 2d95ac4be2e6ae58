"""Can this pipeline be trained? Proves it on the pipeline itself, with the settings of a run.

`check_pipeline` compares the untouched pipeline with the sampler, the sampler with its replay, and
the trained adapter with the one that plain diffusers loads again. A run starts with the middle part
(`check_replay`), whatever the model.
"""

import hashlib
import inspect
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo.config import GRPOConfig
from flowgrpo.kernels import Gaussian, log_prob
from flowgrpo.lora import load_lora, unload_lora
from flowgrpo.pipelines import check_call, find_style, generate, modules_of
from flowgrpo.plan import Plan
from flowgrpo.policy import Policy, Rollout, as_used, load_weights, trained_values
from flowgrpo.prompts import Row
from flowgrpo.randomness import normal
from flowgrpo.tape import ReplayError, Step

PROMPT = "a photo of a red cube on a table"
SEEDS = (1, 2)
"""Samples of a check; different ones, so that swapped samples show."""
NUDGE = 0.02
"""Standard deviation of what is added to a fresh LoRA, which would change nothing."""
CHANGE = 2e-3
"""Of the summed log-probs in a finite difference: far above rounding, and small."""


@dataclass(kw_only=True)
class Report:
    """What a check found; differences are the largest absolute ones, None where not reached.

    Latents are compared as the pipeline returns them, log-probs as means over latent dimensions.
    """

    pipeline: str
    stock_difference: float | None = None
    """Latents without noise against the untouched pipeline; must be 0."""
    replay_difference: float | None = None
    """Log-prob at replay against the rollout's, over all trained steps; 0 on a CPU."""
    replay_allowed: float = 0.0
    """A tenth of the clip range."""
    calls_per_step: dict[str, list[int]] = field(default_factory=dict)
    """Denoiser calls in each iteration of the loop, by module."""
    gradient_share: float | None = None
    """Share of the trained tensors that got a gradient other than 0 in the window."""
    gradient_error: float | None = None
    """The gradient's slope along itself against a finite difference, relative; for information.

    In float32 only. Well below 0.05 where the model is smooth: routed experts jump, and a guider's
    momentum is state, through which no gradient goes.
    """
    frozen_unchanged: bool | None = None
    """Whether every frozen tensor is the same, bit for bit, after an optimiser step."""
    lora_round_trip: float | None = None
    """Latents of the saved adapter, loaded by plain diffusers, against the trainer's; must be 0."""
    micro_batch_difference: float | None = None
    """Latents of a sample alone against the same in a batch of two; for information."""
    seconds: float = 0.0
    peak_memory: int = 0
    """In bytes: of the GPU, or of the process on a CPU."""
    reason: str = ""
    """Why it cannot be trained, in one sentence."""

    @property
    def ok(self) -> bool:
        return not self.reason

    def lines(self) -> list[str]:
        """A table for people."""
        calls = ", ".join(
            f"{name} {min(counts)}" if len({*counts}) == 1 else f"{name} {counts}"
            for name, counts in self.calls_per_step.items()
        )
        rows = {
            "stock difference": _shown(self.stock_difference),
            "replay difference": f"{_shown(self.replay_difference)} (allowed "
            f"{self.replay_allowed:.0e})",
            "denoiser calls per step": calls or "-",
            "tensors with a gradient": _shown(self.gradient_share, "{:.0%}"),
            "gradient error": _shown(self.gradient_error) + " (information)",
            "frozen weights unchanged": _shown(self.frozen_unchanged),
            "LoRA round trip": _shown(self.lora_round_trip),
            "micro-batch difference": _shown(self.micro_batch_difference) + " (information)",
            "seconds": f"{self.seconds:.1f}",
            "peak memory": f"{self.peak_memory / 2**30:.2f} GiB",
            "verdict": "can be trained" if self.ok else "refused",
        }
        table = [f"{label:26}{value}" for label, value in rows.items()]
        return [self.pipeline, *table, *([] if self.ok else [self.reason])]


class _Refused(Exception):
    """One check failed; the sentence says which."""


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
    settings = settings or GRPOConfig()
    sampling = settings.sampling
    steps = call.pop("num_inference_steps", sampling.num_inference_steps)
    row = row or Row(prompt=PROMPT, place="check")
    row = replace(row, prompt=call.pop("prompt", row.prompt))
    call = {**sampling.call, **call, "num_inference_steps": steps, "output_type": "latent"}
    report = Report(
        pipeline=type(pipe).__name__, replay_allowed=min(settings.train.clip_range) / 10
    )
    start = time.perf_counter()
    flags = {m: m.training for part in modules_of(pipe).values() for m in part.modules()}
    trained = {p: p.requires_grad for part in modules_of(pipe).values() for p in part.parameters()}
    try:
        _check(report, pipe, row, call, settings)
    except _Refused as refused:
        report.reason = str(refused)
    except Exception as error:  # pipelines raise what they like
        report.reason = " ".join(f"{error}".split()) or type(error).__name__
        if not isinstance(error, (ValueError, RuntimeError)):
            report.reason = f"{type(error).__name__}: {report.reason}"
    finally:
        unload_lora(pipe, [n for n, m in vars(pipe).items() if getattr(m, "peft_config", None)])
        for module, training in flags.items():
            module.training = training
        for parameter, requires_grad in trained.items():
            parameter.requires_grad_(requires_grad)
    report.seconds = time.perf_counter() - start
    report.peak_memory = peak_memory()
    return report


def check_replay(policy: Policy, row: Row, settings: GRPOConfig) -> float:
    """The replay part alone: the largest difference in log-prob over all trained steps.

    Weights and counts stay as they are; in between the weights are moved a little, since a fresh
    LoRA would change nothing.

    Raises:
        ReplayError: the replay is not the rollout; training would be biased.
    """
    sampling, plan = settings.sampling, Plan(config=settings, rows=[row])
    call = {**sampling.call, "num_inference_steps": sampling.num_inference_steps}
    first, last = plan.window_bounds
    passes = dict(policy.passes)
    with trained_values(policy, _nudged(policy)):
        rollout = _rollout(policy, row, call, settings, range(first, last + 1))
        found = replay_differences(policy, rollout)
    policy.passes.update(passes)
    for parameter in policy.parameters.values():
        parameter.grad = None
    difference, worst = max((value, index) for index, value in found.items())
    allowed = min(settings.train.clip_range) / 10
    if not difference <= allowed:
        raise ReplayError(
            f"{type(policy.pipe).__name__} step {worst} replays {difference:.1e} away from its "
            f"rollout (allowed {allowed:.0e}, a tenth of train.clip_range); run flowgrpo check to "
            "see what differs, or widen the clip range."
        )
    return difference


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


def _check(report: Report, pipe: Any, row: Row, call: dict[str, Any], settings: GRPOConfig) -> None:
    if noisy := _live_dropout(pipe):
        raise _Refused(
            f"{noisy} of {report.pipeline} is in training mode, so dropout is on; call .eval()."
        )
    # Torch folds some matrix products another way for weights that require gradients, which moves
    # their last bit; so the untouched pipeline is frozen, too.
    for module in modules_of(pipe).values():
        module.requires_grad_(False)
    check_call(pipe, "call", {k: v for k, v in call.items() if k != "output_type"})
    single = find_style(pipe, row, call).single
    seeds = SEEDS[:1] if single else SEEDS
    stock = _stock(pipe, row, call, seeds)
    if (again := _difference(_stock(pipe, row, call, seeds), stock)) != 0:
        raise _Refused(
            f"{report.pipeline} differs from itself by {again:.1e} when it is called twice with "
            "the same seeds; it draws random numbers of its own or keeps state between calls."
        )
    if not single:
        alone = _stock(pipe, row, call, seeds[:1])
        report.micro_batch_difference = _difference(alone, stock[:1])

    policy = Policy(pipe, settings.train)
    plan = Plan(config=_with_steps(settings, call), rows=[row])
    silent = _rollout(policy, row, call, settings, range(0))
    report.stock_difference = _difference(silent.samples, stock)
    if report.stock_difference != 0:
        raise _Refused(
            f"{report.pipeline} without noise is {report.stock_difference:.1e} away from the "
            "untouched pipeline; a LoRA layer or the prompt memo changes its result."
        )
    frozen = _hashes(policy)
    load_weights(policy, _nudged(policy))
    rollout = _rollout(policy, row, call, settings, _window(settings, plan, silent.tape.iterations))
    report.calls_per_step = _calls_per_step(policy, rollout)
    for name, counts in report.calls_per_step.items():
        if sum(count > 0 for count in counts) < 2 and len(report.calls_per_step) == 1:
            raise _Refused(
                f"{name} of {report.pipeline} is called in fewer than two steps of the loop, but "
                "training needs a denoiser that is called again; use a pipeline with one."
            )
    report.replay_difference = max(replay_differences(policy, rollout).values())
    if not report.replay_difference <= report.replay_allowed:
        raise _Refused(
            f"{report.pipeline} replays {report.replay_difference:.1e} away from its rollout "
            f"(allowed {report.replay_allowed:.0e}); a denoiser keeps state of its own, or an "
            "option depends on more than its inputs."
        )
    report.gradient_share = _gradient_share(policy)
    dtypes = {p.dtype for denoiser in policy.denoisers.values() for p in denoiser.parameters()}
    if dtypes == {torch.float32} and report.gradient_share:
        report.gradient_error = _gradient_error(policy, rollout)
    if report.gradient_share == 0:
        raise _Refused(
            f"no trained tensor of {report.pipeline} got a gradient; the loop must let gradients "
            "through from the denoiser to the scheduler."
        )
    torch.optim.SGD(policy.parameters.values(), lr=1e-3).step()
    report.frozen_unchanged = _hashes(policy) == frozen
    if not report.frozen_unchanged:
        raise _Refused(f"an optimiser step changed frozen weights of {report.pipeline}.")
    if policy.is_lora:
        _check_round_trip(report, policy, row, call, seeds, stock)


def _check_round_trip(
    report: Report,
    policy: Policy,
    row: Row,
    call: dict[str, Any],
    seeds: Sequence[int],
    stock: Sequence[Any],
) -> None:
    """Saves, takes the adapter off, and loads what was saved into the stock pipeline again."""
    pipe = policy.pipe
    with as_used(policy):
        used = policy.generate(row, seeds, call)
    with tempfile.TemporaryDirectory() as folder, as_used(policy):
        policy.save(Path(folder))
        unload_lora(pipe, list(policy.denoisers))
        if (rest := _difference(_stock(pipe, row, call, seeds), stock)) != 0:
            raise _Refused(f"{report.pipeline} without its adapter is {rest:.1e} from the stock.")
        load_lora(pipe, Path(folder))
        report.lora_round_trip = _difference(_stock(pipe, row, call, seeds), used)
    if report.lora_round_trip != 0:
        raise _Refused(
            f"the saved LoRA of {report.pipeline} gives latents {report.lora_round_trip:.1e} away "
            "from the trainer's; its loader changes or drops weights."
        )
    if _difference(used, stock) == 0:
        raise _Refused(f"the LoRA of {report.pipeline} changes nothing; choose other targets.")


def _stock(pipe: Any, row: Row, call: dict[str, Any], seeds: Sequence[int]) -> list[Any]:
    with torch.no_grad():
        return generate(pipe, row, seeds, call)


def _rollout(
    policy: Policy, row: Row, call: dict[str, Any], settings: GRPOConfig, window: range
) -> Rollout:
    seeds = SEEDS[:1] if find_style(policy.pipe, row, call).single else SEEDS

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


def _window(settings: GRPOConfig, plan: Plan, iterations: int) -> range:
    """All steps that may be trained; a loop can have fewer than `num_inference_steps`."""
    first, last = plan.window_bounds
    if settings.sampling.window.last is None:
        last = min(last, iterations - 2)
    return range(first, last + 1)


def _with_steps(settings: GRPOConfig, call: dict[str, Any]) -> GRPOConfig:
    data = settings.model_dump()
    data["sampling"]["num_inference_steps"] = call["num_inference_steps"]
    return GRPOConfig.model_validate(data)


def _nudged(policy: Policy) -> dict[str, Tensor]:
    """The trained weights, moved: a fresh LoRA changes nothing and half of it gets no gradient."""
    return {
        name: parameter.detach() + NUDGE * normal(parameter.shape, "nudge", name).to(parameter)
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


def _difference(a: Sequence[Any], b: Sequence[Any]) -> float:
    """Largest absolute difference of two lists of samples, whatever these are."""
    return max(
        float((x.float() - y.float()).abs().max()) if x.shape == y.shape else float("inf")
        for x, y in zip(a, b, strict=True)
    )


def _shown(value: Any, form: str = "{:.1e}") -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "0" if value == 0 else form.format(value)
