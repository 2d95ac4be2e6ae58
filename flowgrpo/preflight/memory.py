"""Estimates the memory and the denoiser calls of a run, before any weights are loaded.

No model's formula is used: the stock pipeline itself runs, with fake weights, on one micro-batch of
each size, and what it does is counted. What cannot be known without values is left out, with the
reason.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.devices import tensor_bytes
from flowgrpo.core.errors import ConfigError
from flowgrpo.core.seeds import seed_for
from flowgrpo.data.plan import Plan
from flowgrpo.pipelines.call_checks import check_calls
from flowgrpo.pipelines.parts import modules_of
from flowgrpo.policy.policy import Policy
from flowgrpo.preflight.dry_run import DryRun, MicroBatchCost
from flowgrpo.preflight.fake_weights import fake_weights, open_with_fake_weights


@dataclass(kw_only=True, frozen=True)
class Size:
    """The size of a set of tensors."""

    tensors: int = 0
    parameters: int = 0
    bytes: int = 0


@dataclass(kw_only=True)
class MemoryEstimate:
    """Bytes and denoiser calls of a run, over all processes unless a name or docstring says
    otherwise.

    A field is None if it cannot be known; `missing` says why.
    """

    plan: Plan
    processes: int = 1
    parts: dict[str, Size] = field(default_factory=dict)
    """Weights of the stock pipeline by the name of the part."""
    denoisers: set[str] = field(default_factory=set)
    """Names of the parts that are trained or carry the adapter."""
    trained: Size | None = None
    """The adapter, or the denoisers' own weights if these are trained."""
    is_lora: bool = True
    reference: int | None = None
    """Bytes of the copy of the trained tensors from before training; 0 if there is none."""
    activations: int | None = None
    """Bytes saved for the backward pass of one step of the largest micro-batch."""
    activations_checkpointed: int | None = None
    """The same with gradient checkpointing, including its largest recomputed block."""
    micro_batch_costs: Mapping[tuple[int, int], MicroBatchCost] | None = None
    """By (first step of the window, size of the micro-batch)."""
    missing: dict[str, str] = field(default_factory=dict)
    """Reasons, by what could not be predicted."""

    @property
    def gradients(self) -> int | None:
        return None if self.trained is None else self.trained.bytes

    @property
    def optimizer(self) -> int | None:
        """Bytes of two moments and a float32 step count per tensor; with 8 bits, approximate."""
        if self.trained is None:
            return None
        if self.plan.config.train.optimizer == "adamw_8bit":
            return 2 * self.trained.parameters
        return 2 * self.trained.bytes + 4 * self.trained.tensors

    @property
    def average(self) -> int | None:
        if self.trained is None:
            return None
        return self.trained.bytes if self.plan.config.train.ema else 0

    @property
    def groups_per_process(self) -> int:
        return math.ceil(self.plan.config.sampling.groups_per_epoch / self.processes)

    def forwards(self, epoch: int = 0) -> int | None:
        """Number of denoiser calls in an epoch, if no group is tied."""
        replays = self.plan.config.train.inner_epochs * (
            2 if self.plan.config.objective.needs_reference else 1
        )
        costs = self._epoch_costs(epoch)
        if costs is None:
            return None
        return sum(cost.rollout_forwards + replays * cost.replay_forwards for cost in costs)

    def backwards(self, epoch: int = 0) -> int | None:
        """Number of backward passes of denoiser calls in an epoch, if no group is tied."""
        costs = self._epoch_costs(epoch)
        if costs is None:
            return None
        return self.plan.config.train.inner_epochs * sum(cost.replay_forwards for cost in costs)

    def tape_bytes(self, epoch: int = 0) -> int | None:
        """Bytes of the tapes of an epoch; all of them are kept until they have been trained on."""
        costs = self._epoch_costs(epoch)
        return None if costs is None else sum(cost.tape_bytes for cost in costs)

    def max_tape_bytes(self) -> int | None:
        """Largest number of bytes of one process's tapes, wherever its windows start."""
        if self.micro_batch_costs is None:
            return None
        sizes = [len(batch) for batch in self.plan.micro_batches]
        starts = {start for start, _ in self.micro_batch_costs}
        costs = self.micro_batch_costs
        group = max(sum(costs[start, size].tape_bytes for size in sizes) for start in starts)
        return self.groups_per_process * group

    def _epoch_costs(self, epoch: int) -> list[MicroBatchCost] | None:
        """The cost of each micro-batch of an epoch."""
        costs = self.micro_batch_costs
        if costs is None:
            return None
        sizes = [len(batch) for batch in self.plan.micro_batches]
        groups = self.plan.groups(epoch)
        return [costs[group.window.start, size] for group in groups for size in sizes]

    def per_process(self, count: int) -> int:
        """Bytes that one process holds of `count` bytes of weights that `train.shard` divides."""
        return math.ceil(count / self.processes) if self.plan.config.train.shard else count

    def total(self) -> int | None:
        """Most bytes on the device of one process; None if a part of the sum cannot be known."""
        config = self.plan.config
        tapes = 0 if config.sampling.tape_on_cpu else self.max_tape_bytes()
        activations = self.activations_checkpointed
        if not config.train.gradient_checkpointing:
            activations = self.activations
        copies = [self.gradients, self.optimizer, self.average, self.reference]
        if activations is None or tapes is None or self.trained is None or None in copies:
            return None
        sharded = [size.bytes for name, size in self.parts.items() if name in self.denoisers]
        sharded += [self.trained.bytes] if self.is_lora else []
        sharded += [count for count in copies if count is not None]
        others = [size.bytes for name, size in self.parts.items() if name not in self.denoisers]
        others = [] if config.model.offload else others
        return sum(map(self.per_process, sharded)) + sum(others) + activations + tapes


def estimate_memory(config: GRPOConfig, plan: Plan, processes: int = 1) -> MemoryEstimate:
    """Estimates the cost of a run. For a hub name, downloads configurations and tokenizers only.

    Raises:
        ConfigError: a setting does not fit the pipeline.
    """
    estimate = MemoryEstimate(plan=plan, processes=processes, is_lora=config.train.lora is not None)
    if config.model.path is None:
        estimate.missing["model"] = "model.path is not set"
        return estimate
    try:
        pipe = open_with_fake_weights(config.model)
    except ConfigError:
        raise
    except Exception as error:  # the loaders of three libraries raise what they like
        estimate.missing["model"] = (
            f"{config.model.path} cannot be looked up; check the name, the network and your "
            f"access: {_reason(error)}"
        )
        return estimate
    check_calls(pipe, config)
    _measure(estimate, pipe)
    return estimate


def _measure(estimate: MemoryEstimate, pipe: Any) -> None:
    """Fills in everything that a pipeline with fake weights shows."""
    config = estimate.plan.config
    estimate.parts = {name: size_of(part.parameters()) for name, part in modules_of(pipe).items()}
    # Neither changes a size: shards are divided afterwards, and DryRun counts with and without
    # gradient checkpointing.
    train = config.train.model_copy(update={"gradient_checkpointing": False, "shard": False})
    try:
        with fake_weights(building=True):
            policy = Policy(pipe, train, seed_for(config.seed, "lora"))
    except ConfigError:
        raise
    except Exception as error:
        estimate.missing["what is trained"] = _reason(error)
        return
    estimate.denoisers = set(policy.denoisers)
    estimate.trained = size_of(policy.parameters.values())
    estimate.reference = size_of((policy.start_weights or {}).values()).bytes
    run = DryRun(policy, estimate.plan)
    with fake_weights():
        try:
            estimate.micro_batch_costs = run.micro_batch_costs()
            estimate.activations, estimate.activations_checkpointed = run.activations()
        except Exception as error:
            no_costs = estimate.micro_batch_costs is None
            unknown = "denoiser calls and memory" if no_costs else "activations"
            estimate.missing[unknown] = _reason(error)
            return
    if config.train.gradient_checkpointing and estimate.activations_checkpointed is None:
        estimate.missing["gradient checkpointing"] = "a denoiser does not support it"


def size_of(tensors: Iterable[Tensor]) -> Size:
    """Counts tensors, parameters and bytes; a tensor that occurs twice counts once."""
    unique = list({id(tensor): tensor for tensor in tensors}.values())
    return Size(
        tensors=len(unique),
        parameters=sum(t.numel() for t in unique),
        bytes=tensor_bytes(unique),
    )


def _reason(error: Exception) -> str:
    """The first line of an error, with its type, shortened to 160 characters."""
    first = f"{type(error).__name__}: {error}".strip().splitlines()[0].rstrip(". ")
    return first if len(first) <= 160 else first[:157] + "..."
