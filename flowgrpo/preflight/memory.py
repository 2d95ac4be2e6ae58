"""What a run costs in memory and denoiser calls, before any weights are loaded.

Nothing here is a formula of a model: the stock pipeline itself runs, without weights, for one group
of each kind, and what it does is counted. What it cannot say without values is left out, with the
reason.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.errors import ConfigError
from flowgrpo.core.seeds import seed_for
from flowgrpo.data.plan import Plan
from flowgrpo.pipelines.call_checks import check_call, check_frames
from flowgrpo.pipelines.parts import modules_of
from flowgrpo.policy.policy import Policy
from flowgrpo.preflight.dry_run import DryRun, MicroBatchCost
from flowgrpo.preflight.fake_weights import fake_weights, open_with_fake_weights


@dataclass(kw_only=True, frozen=True)
class Size:
    """Of some tensors."""

    tensors: int = 0
    parameters: int = 0
    bytes: int = 0


@dataclass(kw_only=True)
class MemoryEstimate:
    """Bytes and denoiser calls of a run, for each process where they are divided among several.

    A field is None where it cannot be known; `missing` says why.
    """

    plan: Plan
    processes: int = 1
    parts: dict[str, Size] = field(default_factory=dict)
    """Weights of the stock pipeline by the name of its part."""
    denoisers: set[str] = field(default_factory=set)
    """Parts that are trained, or carry what is trained."""
    trained: Size | None = None
    """The adapter; where all weights are trained, these."""
    is_lora: bool = True
    reference: int | None = None
    """Bytes of the copy of what is trained as it was before training; 0 where there is none."""
    activations: int | None = None
    """Bytes kept for the backward pass of one step of the largest micro-batch."""
    activations_checkpointed: int | None = None
    """The same with gradient checkpointing, and its largest recomputed block."""
    micro_batches: Mapping[tuple[int, int], MicroBatchCost] | None = None
    """By the window's first step and the size of the micro-batch."""
    missing: dict[str, str] = field(default_factory=dict)
    """What could not be predicted: the reason by what it is about."""

    @property
    def gradients(self) -> int | None:
        return None if self.trained is None else self.trained.bytes

    @property
    def optimizer(self) -> int | None:
        """Two moments and a float32 count of steps a tensor; with 8 bits an estimate."""
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
        """Denoiser calls of an epoch over all processes, if no group is tied."""
        replays = self.plan.config.train.inner_epochs * (
            2 if self.plan.config.objective.needs_reference else 1
        )
        parts = self._passes_of(epoch)
        if parts is None:
            return None
        return sum(p.rollout_forwards + replays * p.replay_forwards for p in parts)

    def backwards(self, epoch: int = 0) -> int | None:
        """Backward passes of denoiser calls, likewise."""
        parts = self._passes_of(epoch)
        if parts is None:
            return None
        return self.plan.config.train.inner_epochs * sum(p.replay_forwards for p in parts)

    def tape_bytes(self, epoch: int = 0) -> int | None:
        """Of all rollouts of an epoch over all processes: they stay until it is trained on."""
        parts = self._passes_of(epoch)
        return None if parts is None else sum(p.tape_bytes for p in parts)

    def most_tape_bytes(self) -> int | None:
        """Of one process's share of an epoch, wherever its windows start."""
        if self.micro_batches is None:
            return None
        sizes = [len(batch) for batch in self.plan.micro_batches]
        starts = {start for start, _ in self.micro_batches}
        group = max(sum(self.micro_batches[s, size].tape_bytes for size in sizes) for s in starts)
        return self.groups_per_process * group

    def _passes_of(self, epoch: int) -> list[MicroBatchCost] | None:
        if self.micro_batches is None:
            return None
        sizes = [len(batch) for batch in self.plan.micro_batches]
        groups = self.plan.groups(epoch)
        return [self.micro_batches[group.window.start, size] for group in groups for size in sizes]

    def share(self, count: int) -> int:
        """Of weights that are spread over all processes: what one of them holds."""
        return math.ceil(count / self.processes) if self.plan.config.train.shard else count

    def total(self) -> int | None:
        """Bytes of one process's device at most: all of these but what waits on the CPU."""
        config = self.plan.config
        tapes = 0 if config.sampling.tape_on_cpu else self.most_tape_bytes()
        held = self.activations_checkpointed
        if not config.train.gradient_checkpointing:
            held = self.activations
        extra = [self.gradients, self.optimizer, self.average, self.reference]
        if held is None or tapes is None or self.trained is None or None in extra:
            return None
        spread = [size.bytes for name, size in self.parts.items() if name in self.denoisers]
        whole = [size.bytes for name, size in self.parts.items() if name not in self.denoisers]
        spread += [self.trained.bytes] if self.is_lora else []
        spread += [count for count in extra if count is not None]
        whole = [] if config.model.offload else whole
        return sum(map(self.share, spread)) + sum(whole) + held + tapes

    def describe(self) -> dict[str, str]:
        """The numbers by label, for people."""
        shared = {*self.denoisers, "adapter"}
        lines = {name: self._size(size, name in shared) for name, size in self._weights()}
        copies = {
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "average": self.average,
            "reference copy": self.reference,
        }
        lines |= {label: in_units(self.share(count)) for label, count in copies.items() if count}
        if self.plan.config.train.optimizer == "adamw_8bit" and "optimizer state" in lines:
            lines["optimizer state"] += " (estimate: 2 bytes a parameter)"
        lines |= self._describe_run()
        if (total := self.total()) is not None:
            what = "without decoding, prompts and rewards"
            what += ", text encoders and VAE" if self.plan.config.model.offload else ""
            lines["sum, a process"] = f"{in_units(total)} ({what})"
        lines |= {what: f"not predicted ({why})" for what, why in self.missing.items()}
        return lines

    def _weights(self) -> Iterator[tuple[str, Size]]:
        yield from self.parts.items()
        if self.trained is not None and self.is_lora:
            yield "adapter", self.trained

    def _size(self, size: Size, spread: bool) -> str:
        count = self.share(size.bytes) if spread else size.bytes
        return f"{in_units(count)} ({size.parameters / 1e6:.1f} M parameters)"

    def _describe_run(self) -> dict[str, str]:
        lines, sampling = {}, self.plan.config.sampling
        if self.activations is not None:
            checkpointed = self.activations_checkpointed
            also = f", {in_units(checkpointed)} with gradient checkpointing" if checkpointed else ""
            lines["activations of a step"] = (
                f"{in_units(self.activations)}{also} ({self.plan.micro_batch_size} images)"
            )
        if (tapes := self.most_tape_bytes()) is not None:
            where = ", on the CPU" if sampling.tape_on_cpu else ""
            lines["tapes of an epoch"] = (
                f"{in_units(tapes)} ({self.groups_per_process} groups a process{where})"
            )
        if self.micro_batches is not None:
            calls = max(p.rollout_forwards for p in self.micro_batches.values())
            lines["denoiser calls a rollout"] = f"{calls} in {sampling.num_inference_steps} steps"
            lines["denoiser forwards, epoch 1"] = f"{self.forwards()} (if no group is tied)"
            lines["denoiser backwards, epoch 1"] = f"{self.backwards()}"
        return lines


def estimate_memory(config: GRPOConfig, plan: Plan, processes: int = 1) -> MemoryEstimate:
    """Predicts the cost of a run. Of a hub name, configurations and tokenizers are fetched.

    Raises:
        ConfigError: a setting that the pipeline shows to be wrong.
    """
    found = MemoryEstimate(plan=plan, processes=processes, is_lora=config.train.lora is not None)
    if config.model.path is None:
        found.missing["model"] = "model.path is not set"
        return found
    try:
        pipe = open_with_fake_weights(config.model)
    except ConfigError:
        raise
    except Exception as error:  # the loaders of three libraries raise what they like
        found.missing["model"] = (
            f"{config.model.path} cannot be looked up; check the name, the network and your "
            f"access: {_reason(error)}"
        )
        return found
    check_call(pipe, "sampling.call", config.sampling.call)
    check_frames(pipe, "sampling.call", config.sampling.call)
    measure(found, pipe)
    return found


def measure(found: MemoryEstimate, pipe: Any) -> None:
    """Fills in what can be learnt of a pipeline without weights."""
    config = found.plan.config
    found.parts = {name: size_of(part.parameters()) for name, part in modules_of(pipe).items()}
    alone = {"gradient_checkpointing": False, "shard": False}
    train = config.train.model_copy(update=alone)
    try:
        with fake_weights(building=True):
            policy = Policy(pipe, train, seed_for(config.seed, "lora"))
    except ConfigError:
        raise
    except Exception as error:
        found.missing["what is trained"] = _reason(error)
        return
    found.denoisers = set(policy.denoisers)
    found.trained = size_of(policy.parameters.values())
    found.reference = size_of((policy.start or {}).values()).bytes
    run = DryRun(policy, found.plan)
    with fake_weights():
        try:
            found.micro_batches = run.micro_batch_costs()
            found.activations, found.activations_checkpointed = run.activations()
            if config.train.gradient_checkpointing and found.activations_checkpointed is None:
                found.missing["gradient checkpointing"] = "a denoiser has none"
        except Exception as error:
            what = "denoiser calls and memory" if found.micro_batches is None else "activations"
            found.missing[what] = _reason(error)


def size_of(tensors: Iterable[Tensor]) -> Size:
    """Count and bytes of tensors; one that occurs twice counts once."""
    unique = list({id(tensor): tensor for tensor in tensors}.values())
    return Size(
        tensors=len(unique),
        parameters=sum(t.numel() for t in unique),
        bytes=sum(t.numel() * t.element_size() for t in unique),
    )


def in_units(count: int) -> str:
    """Bytes as people read them."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


def _reason(error: Exception) -> str:
    """An error in one line."""
    first = f"{type(error).__name__}: {error}".strip().splitlines()[0].rstrip(". ")
    return first if len(first) <= 160 else first[:157] + "..."
