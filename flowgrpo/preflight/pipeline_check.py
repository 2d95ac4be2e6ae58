"""Can this pipeline be trained? Proves it on the pipeline itself, with the settings of a run.

`check_pipeline` compares the untouched pipeline with the sampler, the sampler with its replay, and
the trained adapter with the one that plain diffusers loads again. Every run starts with the middle
part, `replay_check.check_replay`.
"""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.config_file import parse_config
from flowgrpo.core.errors import one_line
from flowgrpo.core.sampling_config import reject_sampler_arguments, require_stochastic_steps
from flowgrpo.data.plan import Plan
from flowgrpo.data.row import Row
from flowgrpo.pipelines.batching import Batchings
from flowgrpo.pipelines.call_checks import check_call
from flowgrpo.pipelines.compile import compiled
from flowgrpo.pipelines.lora import unload_lora
from flowgrpo.pipelines.lora_files import load_lora
from flowgrpo.pipelines.parts import modules_of
from flowgrpo.pipelines.seams import restored_flags
from flowgrpo.policy.policy import Policy
from flowgrpo.policy.weights import load_weights
from flowgrpo.preflight.check_report import CheckReport
from flowgrpo.preflight.proofs import (
    FixedCall,
    frozen_hashes,
    prove_frozen,
    prove_gradients,
    prove_loop,
    prove_repeatable,
    prove_replay,
    prove_round_trip,
    prove_stock_sampling,
)
from flowgrpo.preflight.replay_check import check_rollout, check_seeds, nudged_weights

PROMPT = "a photo of a red cube on a table"


def check_pipeline(
    pipe: Any, *, settings: GRPOConfig | None = None, row: Row | None = None, **call: Any
) -> CheckReport:
    """Checks whether `pipe` can be trained with these settings.

    The pipeline is left as it was. If it fails, the report has a reason; nothing is raised.

    Args:
        pipe: any diffusers pipeline, without an adapter of its own.
        settings: those of the run; default: `GRPOConfig()`.
        row: the prompt, with its images if the pipeline takes some; default: `PROMPT`.
        call: arguments of the pipeline, which take precedence over `settings.sampling.call`; also
            `prompt` and `num_inference_steps`.
    """
    settings = settings or GRPOConfig()
    row = row or Row(prompt=PROMPT, source="check")
    row = replace(row, prompt=call.pop("prompt", row.prompt))
    report = CheckReport(
        pipeline=type(pipe).__name__, replay_allowed=settings.objective.replay_tolerance
    )
    start = time.perf_counter()
    with _left_as_it_was(pipe):
        try:
            _prove_all(pipe, settings, row, {**settings.sampling_call, **call}, report)
        except Exception as error:  # pipelines raise what they like
            reason = one_line(error)
            plain = isinstance(error, (ValueError, RuntimeError))
            report.reason = reason if plain else f"{type(error).__name__}: {reason}"
    report.seconds = time.perf_counter() - start
    report.peak_memory = peak_memory()
    return report


def peak_memory() -> int:
    """Peak memory in bytes: of the GPU if there is one, otherwise of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _prove_all(
    pipe: Any, settings: GRPOConfig, row: Row, call: dict[str, Any], report: CheckReport
) -> None:
    """The proofs in order; the first that fails raises."""
    settings = _checked_settings(pipe, settings, call)
    _freeze(pipe)
    batchings = Batchings(pipe)
    fixed = _fixed_call(batchings, row, {**call, "output_type": "latent"})
    base = fixed.latents()
    lora = settings.train.lora
    start = load_lora(pipe, Path(lora.start).expanduser()) if lora and lora.start else []
    stock = prove_repeatable(fixed, report)
    unload_lora(pipe, start)
    policy = Policy(pipe, settings.train, batchings=batchings)
    with _full_weights_restored(policy):
        prove_stock_sampling(policy, fixed, stock, settings.sampling.sde, report)
        frozen = frozen_hashes(policy)
        load_weights(policy, nudged_weights(policy))
        with compiled(policy.denoisers) if settings.model.compile else nullcontext():
            first, last = Plan(config=settings, rows=[row]).window_bounds
            window = range(first, last + 1)
            rollout = check_rollout(policy, row, fixed.call, settings, window)
            prove_loop(policy, rollout, report)
            prove_replay(policy, rollout, report)
            prove_gradients(policy, rollout, report)
        prove_frozen(policy, frozen, report)
        if policy.is_lora:
            prove_round_trip(policy, fixed, base, stock, report)


def _checked_settings(pipe: Any, settings: GRPOConfig, call: dict[str, Any]) -> GRPOConfig:
    """The settings with the number of steps of `call`.

    Raises:
        ValueError: settings, arguments or a dropout with which nothing can be proved.
    """
    require_stochastic_steps(settings.sampling)
    others = {name: value for name, value in call.items() if name != "num_inference_steps"}
    reject_sampler_arguments("call", others)
    data = settings.model_dump()
    data["sampling"]["num_inference_steps"] = call["num_inference_steps"]
    settings = parse_config(data)
    if name := _active_dropout(pipe):
        raise ValueError(
            f"{name} of {type(pipe).__name__} is in training mode, so dropout is on; call .eval()."
        )
    check_call(pipe, "call", call)
    return settings


def _active_dropout(pipe: Any) -> str:
    """The name of a module with dropout that is on; empty if there is none."""
    for name, part in modules_of(pipe).items():
        for inner in part.modules():
            if isinstance(inner, nn.modules.dropout._DropoutNd) and inner.training and inner.p > 0:
                return name
    return ""


def _freeze(pipe: Any) -> None:
    # Torch orders some matrix products differently for weights that require gradients, which moves
    # their last bit. The policy's weights are frozen, so the untouched pipeline's must be, too.
    for module in modules_of(pipe).values():
        module.requires_grad_(False)


def _fixed_call(batchings: Batchings, row: Row, call: dict[str, Any]) -> FixedCall:
    seeds = check_seeds(batchings, row, call)
    batching = batchings.of(row, call)
    return FixedCall(pipe=batchings.pipe, row=row, call=call, seeds=seeds, batching=batching)


@contextmanager
def _full_weights_restored(policy: Policy) -> Iterator[None]:
    """After the block fully trained denoisers have their weights back; a LoRA is unloaded later."""
    if policy.is_lora:
        yield
        return
    before = {name: p.detach().clone() for name, p in policy.parameters.items()}
    try:
        yield
    finally:
        load_weights(policy, before)


@contextmanager
def _left_as_it_was(pipe: Any) -> Iterator[None]:
    """After the block the pipeline has no new adapter, and its modules' flags are as before."""
    parts = modules_of(pipe)
    own = {name for name, part in parts.items() if getattr(part, "peft_config", None)}
    inner = [module for part in parts.values() for module in part.modules()]
    requires_grad = {p: p.requires_grad for part in parts.values() for p in part.parameters()}
    with restored_flags(inner, ("training", "gradient_checkpointing")):
        try:
            yield
        finally:
            adapted = [n for n, part in parts.items() if getattr(part, "peft_config", None)]
            unload_lora(pipe, [name for name in adapted if name not in own])
            for parameter, trained in requires_grad.items():
                parameter.requires_grad_(trained)
