"""A cache of prompt embeddings, so that `encode_prompt` runs once per prompt and set of options."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flowgrpo.core.devices import CPU, moved, tensor_devices, to_devices
from flowgrpo.pipelines.offload import is_offloaded
from flowgrpo.pipelines.seams import patched_encode_prompt

MAX_BYTES = 2**30
"""Of cached embeddings; they lie on the pipeline's device, or on the CPU if it is offloaded."""


class PromptCache:
    """What `pipe.encode_prompt` returned, by its arguments; the least recently used goes first."""

    def __init__(self, pipe: Any):
        self.pipe = pipe
        self.entries: OrderedDict[Any, Any] = OrderedDict()
        """(value, device of each of its tensors) by key."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the block the pipeline's `encode_prompt` goes through the cache."""
        with patched_encode_prompt(self.pipe, self._encode):
            yield

    def _encode(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # One micro-batch holds one prompt, so nothing is re-batched or re-padded: the arguments
        # decide the result. Tensors and images have no cheap key, so their calls are not cached.
        key = _key((args, tuple(sorted(kwargs.items()))))
        if key is None:
            return stock(*args, **kwargs)
        if key in self.entries:
            self.entries.move_to_end(key)
            return to_devices(*self.entries[key])
        with torch.no_grad():
            value = stock(*args, **kwargs)
        kept = moved(value, CPU) if is_offloaded(self.pipe) else value
        self.entries[key] = kept, tensor_devices(value)
        while sum(map(_tensor_bytes, self.entries.values())) > MAX_BYTES:
            self.entries.popitem(last=False)
        return value


def _tensor_bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, Tensor))


def _key(value: Any) -> Any:
    """`value` as a hashable key; None if it holds tensors or images."""
    if isinstance(value, (str, int, float, bool, torch.device, torch.dtype, type(None))):
        return (type(value), value)
    if isinstance(value, Mapping):
        value = sorted(value.items())
    if isinstance(value, (list, tuple)):
        parts = tuple(_key(v) for v in value)
        return None if None in parts else parts
    return None
