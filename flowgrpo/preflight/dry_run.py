"""A micro-batch of a run without weights: what it keeps on tape, and how often it calls a denoiser.

The policy's pipeline is a `weightless` one, or any other: only shapes matter. A denoiser, and each
of its repeated blocks, computes once for inputs of the same shapes; after that its outputs stand.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from flowgrpo.data.plan import Plan
from flowgrpo.data.prompts import Row
from flowgrpo.pipelines.seams import patched_forwards
from flowgrpo.policy.policy import Policy, Rollout
from flowgrpo.policy.record import record
from flowgrpo.policy.tape import Tape
from flowgrpo.preflight.activations import activation_bytes


@dataclass(kw_only=True, frozen=True)
class MicroBatchCost:
    """One micro-batch through rollout and replay."""

    rollout_forwards: int
    replay_forwards: int
    """Of one replay; each is a backward too, where gradients are wanted."""
    tape_bytes: int


class DryRun:
    """Micro-batches of a plan, sampled from noise of zeros for the row with the longest prompt."""

    def __init__(self, policy: Policy, plan: Plan):
        self.policy, self.plan = policy, plan
        self._remembered: dict[Any, Any] = {}

    def micro_batch_costs(self) -> dict[tuple[int, int], MicroBatchCost]:
        """By the window's first step and the size of the micro-batch."""
        first, last = self.plan.window_bounds
        starts = range(first, last - self.plan.window_size + 2)
        sizes = sorted({len(batch) for batch in self.plan.micro_batches})
        return {(start, size): self._pass(start, size) for start in starts for size in sizes}

    def activations(self) -> tuple[int, int | None]:
        """As `activation_bytes`, of the largest micro-batch and any step that can be trained."""
        found = []
        for step in self._kinds_of_steps():
            taken = self._rollout(range(step, step + 1), self.plan.micro_batch_size)
            found.append(activation_bytes(self.policy, taken))
        plain, checkpointed = zip(*found, strict=True)
        return max(plain), None if None in checkpointed else max(checkpointed)

    def _pass(self, start: int, size: int) -> MicroBatchCost:
        taken = self._rollout(range(start, start + self.plan.window_size), size)
        with self._remembering():
            self.policy.replay(taken, lambda step, now: None, gradients=False)
        return MicroBatchCost(
            rollout_forwards=taken.tape.recorded_forwards,
            replay_forwards=taken.tape.replayed_forwards,
            tape_bytes=bytes_of_tape(taken.tape),
        )

    def _rollout(self, window: range, size: int) -> Rollout:
        """As `policy.rollout`, without decoding its samples."""
        policy, sampling = self.policy, self.plan.config.sampling
        row: Row = max(self.plan.rows, key=lambda row: len(row.prompt))
        call = {**self.plan.config.sampling_call, "output_type": "latent"}
        tape = Tape(sde=sampling.sde, noise_level=sampling.noise_level, window=window)
        seeds = list(range(size))
        with self._remembering(), torch.no_grad():
            with policy.prompt_cache.active():
                policy.batchings.of_micro_batch(row, call, size)
            with record(policy.pipe, policy.taped, tape, lambda step, stream, s: torch.zeros(s)):
                policy.generate(row, seeds, call)
        return Rollout(row=row, samples=[], tape=tape, call=call, seeds=seeds)

    def _kinds_of_steps(self) -> list[int]:
        """A step of each kind that can be trained: kinds call other denoisers, or more of them, or
        have other outputs."""
        first, last = self.plan.window_bounds
        tape = self._rollout(range(last, last + 1), self.plan.micro_batch_size).tape
        kinds: dict[Any, dict[str, int]] = {}
        for step in range(first, last + 1):
            calls = sorted((n, made) for (n, i), made in tape.outputs.items() if i == step)
            alike = kinds.setdefault(tuple((name, len(made)) for name, made in calls), {})
            # The last one's outputs are not kept; it is of a kind that calls as often, if any does.
            if not (step == last and alike):
                alike.setdefault(str(_shapes([made for _, made in calls])), step)
        return [step for alike in kinds.values() for step in alike.values()]

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        """Within the block models and their repeated blocks run once for inputs of given shapes."""

        modules = dict(enumerate(_with_blocks(self.policy.taped.values())))
        # Blocks of one class and of the same shapes share their results.
        keys = {
            index: (type(module), str(_shapes(dict(module.named_parameters()))))
            for index, module in modules.items()
        }

        def forward(index: int, stock: Any, *args: Any, **kwargs: Any) -> Any:
            call = (keys[index], str(_shapes((args, kwargs))))
            if call not in self._remembered:
                made = stock(*args, **kwargs)
                if not all(isinstance(t, Tensor) or t is None for t in tree_leaves(made)):
                    return made  # a cache, for example, which belongs to its own call
                self._remembered[call] = made
            return tree_map(lambda t: None if t is None else t.clone(), self._remembered[call])

        with patched_forwards(modules, forward):
            yield


def bytes_of_tape(tape: Tape) -> int:
    """Of all that a tape keeps: what its steps hold, and denoiser outputs."""
    kept = [list(vars(step).values()) for step in tape.steps.values()]
    leaves = tree_leaves([kept, list(tape.outputs.values())])
    return sum(t.numel() * t.element_size() for t in leaves if isinstance(t, Tensor))


def _with_blocks(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Models, and what stands in their lists."""
    found: dict[int, nn.Module] = {}
    for model in models:
        found[id(model)] = model
        for part in model.children():
            if isinstance(part, nn.ModuleList):
                found |= {id(block): block for block in part}
    return list(found.values())


def _shapes(values: Any) -> Any:
    """The same structure with shape and dtype in place of each tensor."""
    return tree_map(
        lambda leaf: (*leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf, values
    )
