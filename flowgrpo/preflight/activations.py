"""What a replayed step keeps in memory for its backward pass, counted as autograd keeps it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from flowgrpo.pipelines.parts import modules_of
from flowgrpo.policy.policy import Policy, Rollout


def activation_bytes(policy: Policy, rollout: Rollout) -> tuple[int, int | None]:
    """The most that a window step of the rollout keeps until its backward pass.

    Returns:
        Bytes without and with gradient checkpointing. The latter are what the step keeps and, on
        top, the largest block, which is computed again; None where a denoiser has no checkpointing.
    """
    kept, most = Kept(policy.pipe), [0, 0]

    def on_step(step: Any, now: Any) -> None:
        most[:] = max(most[0], kept.bytes), max(most[1], kept.checkpointed_bytes)
        kept.clear()

    with kept.blocks_of(policy.denoisers) as has_blocks, kept.counted():
        policy.replay(rollout, on_step)
    return most[0], most[1] if has_blocks else None


class Kept:
    """Storages that autograd keeps, each counted once; weights, which are there anyway, are not."""

    def __init__(self, pipe: Any):
        modules = modules_of(pipe).values()
        self._weights = {
            _storage(t) for m in modules for part in (m.parameters(), m.buffers()) for t in part
        }
        self._all: dict[int, Tensor] = {}  # tensors, too: no storage may be given twice
        self._outside: dict[int, Tensor] = {}
        """Kept under gradient checkpointing: what is outside of blocks, and the inputs of these."""
        self._block: dict[int, Tensor] | None = None
        self.largest_block = 0
        """Bytes of the largest block that gradient checkpointing computes again."""

    @property
    def bytes(self) -> int:
        return tensor_bytes(self._all)

    @property
    def checkpointed_bytes(self) -> int:
        return tensor_bytes(self._outside) + self.largest_block

    def clear(self) -> None:
        self._all.clear()
        self._outside.clear()
        self.largest_block = 0

    def counted(self) -> saved_tensors_hooks:
        """Within the block, what autograd keeps is counted."""
        return saved_tensors_hooks(self._keep, lambda tensor: tensor)

    @contextmanager
    def blocks_of(self, denoisers: dict[str, Any]) -> Iterator[bool]:
        """Within the block, parts that gradient checkpointing would run again are told apart; says
        whether all denoisers know it."""
        able = [d for d in denoisers.values() if d._supports_gradient_checkpointing]
        on = [d for d in able if d.is_gradient_checkpointing]
        for denoiser in able:
            denoiser.enable_gradient_checkpointing(self._run_block)
        try:
            yield len(able) == len(denoisers)
        finally:
            for denoiser in able:
                denoiser.disable_gradient_checkpointing()
            for denoiser in on:
                denoiser.enable_gradient_checkpointing()

    def _run_block(self, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._add(self._outside, tensor)
        self._block = {}
        output = block(*args, **kwargs)
        again = {key: t for key, t in self._block.items() if key not in self._outside}
        self._block = None
        self.largest_block = max(self.largest_block, tensor_bytes(again))
        return output

    def _keep(self, tensor: Tensor) -> Tensor:
        self._add(self._all, tensor)
        self._add(self._outside if self._block is None else self._block, tensor)
        return tensor

    def _add(self, kept: dict[int, Tensor], tensor: Tensor) -> None:
        if (key := _storage(tensor)) not in self._weights:
            kept.setdefault(key, tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tensor_bytes(kept: dict[int, Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
