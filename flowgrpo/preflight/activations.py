"""Activation memory: counts what autograd saves for the backward pass of a replayed step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from flowgrpo.pipelines.parts import modules_of
from flowgrpo.policy.policy import Policy, Rollout


def activation_bytes(policy: Policy, rollout: Rollout) -> tuple[int, int | None]:
    """Largest number of bytes that a window step of the rollout saves for its backward pass.

    Returns:
        Bytes without and with gradient checkpointing. The second number is what a step saves plus
        the largest block, which is recomputed; None if a denoiser does not support checkpointing.
    """
    saved, largest = SavedTensors(policy.pipe), [0, 0]

    def on_step(step: Any, now: Any) -> None:
        largest[:] = max(largest[0], saved.bytes), max(largest[1], saved.checkpointed_bytes)
        saved.clear()

    with saved.separating_blocks(policy.denoisers) as has_blocks, saved.counting():
        policy.replay(rollout, on_step)
    return largest[0], largest[1] if has_blocks else None


class SavedTensors:
    """Storages that autograd saves, each counted once; weights are excluded."""

    def __init__(self, pipe: Any):
        modules = modules_of(pipe).values()
        self._weights = {
            _storage(t) for m in modules for part in (m.parameters(), m.buffers()) for t in part
        }
        # By storage. The tensors are held, too: a freed storage's address could be used again.
        self._all: dict[int, Tensor] = {}
        self._outside: dict[int, Tensor] = {}
        """Saved under gradient checkpointing: everything outside blocks, and the blocks' inputs."""
        self._block: dict[int, Tensor] | None = None
        """Saved within the current block; None outside blocks."""
        self.largest_block = 0
        """Bytes of the largest block that gradient checkpointing recomputes."""

    @property
    def bytes(self) -> int:
        return storage_bytes(self._all)

    @property
    def checkpointed_bytes(self) -> int:
        return storage_bytes(self._outside) + self.largest_block

    def clear(self) -> None:
        self._all.clear()
        self._outside.clear()
        self.largest_block = 0

    def counting(self) -> saved_tensors_hooks:
        """Context in which everything that autograd saves is counted."""
        return saved_tensors_hooks(self._save, lambda tensor: tensor)

    @contextmanager
    def separating_blocks(self, denoisers: dict[str, Any]) -> Iterator[bool]:
        """Within the block, counts what gradient checkpointing would recompute apart from the rest.

        Yields:
            Whether all denoisers support gradient checkpointing.
        """
        able = [d for d in denoisers.values() if d._supports_gradient_checkpointing]
        on = [d for d in able if d.is_gradient_checkpointing]
        for denoiser in able:
            # diffusers calls this function for each block, in place of torch's checkpoint.
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
        recomputed = {key: t for key, t in self._block.items() if key not in self._outside}
        self._block = None
        self.largest_block = max(self.largest_block, storage_bytes(recomputed))
        return output

    def _save(self, tensor: Tensor) -> Tensor:
        self._add(self._all, tensor)
        self._add(self._outside if self._block is None else self._block, tensor)
        return tensor

    def _add(self, saved: dict[int, Tensor], tensor: Tensor) -> None:
        if (key := _storage(tensor)) not in self._weights:
            saved.setdefault(key, tensor)


def storage_bytes(tensors: dict[int, Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


def _storage(tensor: Tensor) -> int:
    # Not data_ptr: tensors without storage have none.
    return tensor.untyped_storage()._cdata
