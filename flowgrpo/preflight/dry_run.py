"""Runs a plan's micro-batches without weights, and counts denoiser calls and bytes.

The policy's pipeline usually has fake weights; any other works too, since only shapes matter. A
denoiser, and each of its repeated blocks, computes once for inputs of the same shapes; its output
is then reused.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from flowgrpo.core.devices import tensor_bytes
from flowgrpo.data.plan import Plan
from flowgrpo.data.row import Row
from flowgrpo.pipelines.seams import patched_forwards
from flowgrpo.policy.policy import Policy, Rollout
from flowgrpo.policy.record import record
from flowgrpo.policy.tape import Tape
from flowgrpo.preflight.activations import activation_bytes


@dataclass(kw_only=True, frozen=True)
class MicroBatchCost:
    """Denoiser calls and tape of one micro-batch, through rollout and one replay."""

    rollout_forwards: int
    replay_forwards: int
    """Number of denoiser calls of a replay, each with a backward pass if gradients are computed."""
    tape_bytes: int


class DryRun:
    """Micro-batches of a plan, sampled from zero noise for the row with the longest prompt."""

    def __init__(self, policy: Policy, plan: Plan):
        self.policy, self.plan = policy, plan
        self._outputs: dict[Any, Any] = {}
        """Outputs of modules by their class and the shapes of their weights and inputs."""

    def micro_batch_costs(self) -> dict[tuple[int, int], MicroBatchCost]:
        """Costs by (first step of the window, size of the micro-batch)."""
        first, last = self.plan.window_bounds
        starts = range(first, last - self.plan.window_size + 2)
        sizes = sorted({len(batch) for batch in self.plan.micro_batches})
        return {(start, size): self._cost(start, size) for start in starts for size in sizes}

    def activations(self) -> tuple[int, int | None]:
        """The most `activation_bytes` of the largest micro-batch, over all steps that can be
        trained."""
        found = []
        for step in self._distinct_steps():
            rollout = self._rollout(range(step, step + 1), self.plan.micro_batch_size)
            found.append(activation_bytes(self.policy, rollout))
        plain, checkpointed = zip(*found, strict=True)
        return max(plain), None if None in checkpointed else max(checkpointed)

    def _cost(self, start: int, size: int) -> MicroBatchCost:
        rollout = self._rollout(range(start, start + self.plan.window_size), size)
        with self._cached_forwards():
            self.policy.replay(rollout, lambda step, now: None, gradients=False)
        return MicroBatchCost(
            rollout_forwards=rollout.tape.recorded_forwards,
            replay_forwards=rollout.tape.replayed_forwards,
            tape_bytes=bytes_of_tape(rollout.tape),
        )

    def _rollout(self, window: range, size: int) -> Rollout:
        """As `policy.rollout`, but without decoding its samples."""
        policy, sampling = self.policy, self.plan.config.sampling
        row: Row = max(self.plan.rows, key=lambda row: len(row.prompt))
        call = {**self.plan.config.sampling_call, "output_type": "latent"}
        tape = Tape(sde=sampling.sde, noise_level=sampling.noise_level, window=window)
        seeds = list(range(size))
        with self._cached_forwards(), torch.no_grad():
            with policy.prompt_cache.active():
                policy.batchings.of_micro_batch(row, call, size)
            with record(policy.pipe, policy.taped, tape, lambda step, stream, s: torch.zeros(s)):
                policy.generate(row, seeds, call)
        return Rollout(row=row, samples=[], tape=tape, call=call, seeds=seeds)

    def _distinct_steps(self) -> list[int]:
        """One of each group of trainable steps that make the same calls with outputs of the same
        shapes: steps may differ in which denoisers they call, and how often."""
        first, last = self.plan.window_bounds
        tape = self._rollout(range(last, last + 1), self.plan.micro_batch_size).tape
        by_calls: dict[Any, dict[str, int]] = {}
        for step in range(first, last + 1):
            calls = sorted((n, made) for (n, i), made in tape.outputs.items() if i == step)
            by_shapes = by_calls.setdefault(tuple((name, len(made)) for name, made in calls), {})
            # The last step is the window, whose outputs are not kept: their shapes are unknown. It
            # is represented by any step with as many calls, if there is one.
            if not (step == last and by_shapes):
                by_shapes.setdefault(str(_shapes([made for _, made in calls])), step)
        return [step for by_shapes in by_calls.values() for step in by_shapes.values()]

    @contextmanager
    def _cached_forwards(self) -> Iterator[None]:
        """Within the block, models and their repeated blocks run once per shapes of inputs."""
        modules = dict(enumerate(_with_blocks(self.policy.taped.values())))
        # Blocks of one class and of the same shapes share their results.
        keys = {
            index: (type(module), str(_shapes(dict(module.named_parameters()))))
            for index, module in modules.items()
        }

        def forward(index: int, stock: Any, *args: Any, **kwargs: Any) -> Any:
            key = (keys[index], str(_shapes((args, kwargs))))
            if key not in self._outputs:
                output = stock(*args, **kwargs)
                if not all(isinstance(t, Tensor) or t is None for t in tree_leaves(output)):
                    return output  # a key-value cache, for example, which belongs to its own call
                self._outputs[key] = output
            return tree_map(lambda t: None if t is None else t.clone(), self._outputs[key])

        with patched_forwards(modules, forward):
            yield


def bytes_of_tape(tape: Tape) -> int:
    """Bytes of all tensors that a tape keeps: its steps' and the denoiser outputs."""
    kept = [list(vars(step).values()) for step in tape.steps.values()]
    return tensor_bytes([kept, list(tape.outputs.values())])


def _with_blocks(models: Iterable[nn.Module]) -> list[nn.Module]:
    """The models and the members of their module lists, each once."""
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
