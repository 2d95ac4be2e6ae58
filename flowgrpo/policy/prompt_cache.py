"""Caches the output of `encode_prompt`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

PROMPT_CACHE_BYTES = 2**30
"""Of remembered prompt embeddings; on the pipeline's device, or where that is offloaded, on the
CPU."""


def tensor_bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, Tensor))


def cache_key(value: Any) -> Any:
    """`value` as a hashable key; None where it holds tensors or pictures."""
    if isinstance(value, (str, int, float, bool, torch.device, torch.dtype, type(None))):
        return (type(value), value)
    if isinstance(value, Mapping):
        value = sorted(value.items())
    if isinstance(value, (list, tuple)):
        parts = tuple(cache_key(v) for v in value)
        return None if None in parts else parts
    return None
