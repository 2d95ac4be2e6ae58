"""A cache of prompt embeddings, so that `encode_prompt` runs once per prompt and set of options."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from flowgrpo.core.devices import CPU, move_tensors, tensor_bytes, tensor_devices, to_devices
from flowgrpo.pipelines.offload import is_offloaded
from flowgrpo.pipelines.seams import patched_encode_prompt

MAX_BYTES = 2**30
"""Largest size of the cache. Embeddings stay on the pipeline's device; offloaded, on the CPU."""


class PromptCache:
    """Results of `pipe.encode_prompt` by its arguments; evicts the least recently used first."""

    def __init__(self, pipe: Any):
        self.pipe = pipe
        self.entries: OrderedDict[Any, Any] = OrderedDict()
        """(result, devices of its tensors) by key."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the block the pipeline's `encode_prompt` goes through the cache."""
        with patched_encode_prompt(self.pipe, self._encode):
            yield

    def _encode(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A micro-batch holds one prompt, so nothing is batched or padded with other prompts: the
        # arguments determine the result. Calls with tensors or images have no cheap key.
        key = _key((args, tuple(sorted(kwargs.items()))))
        if key is None:
            return stock(*args, **kwargs)
        if key in self.entries:
            self.entries.move_to_end(key)
            return to_devices(*self.entries[key])
        with torch.no_grad():
            value = stock(*args, **kwargs)
        kept = move_tensors(value, CPU) if is_offloaded(self.pipe) else value
        self.entries[key] = kept, tensor_devices(value)
        while sum(map(tensor_bytes, self.entries.values())) > MAX_BYTES:
            self.entries.popitem(last=False)
        return value


def _key(value: Any) -> Any:
    """Returns `value` as a hashable key; None if it holds tensors or images."""
    # With the type: 1, 1.0 and True are equal, but need not be encoded alike.
    if isinstance(value, (str, int, float, bool, torch.device, torch.dtype, type(None))):
        return (type(value), value)
    if isinstance(value, Mapping):
        value = sorted(value.items())
    if isinstance(value, (list, tuple)):
        parts = tuple(_key(v) for v in value)
        return None if None in parts else parts
    return None
