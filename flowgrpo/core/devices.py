"""Moving tensors and modules between devices."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

CPU = torch.device("cpu")


def wake(module: nn.Module, device: torch.device) -> None:
    """Puts a module's weights on the device where it works."""
    module.to(device)


def rest(module: nn.Module) -> None:
    """Puts a module's weights on the CPU, where they wait."""
    module.to(CPU)


_homes: WeakKeyDictionary[nn.Module, torch.device] = WeakKeyDictionary()
"""Where a model of a reward was when it was seen first, and works."""


_one_at_a_time = threading.RLock()
"""Rewards may share a model, and score in two threads."""


@contextmanager
def on_device(models: Sequence[nn.Module]) -> Iterator[None]:
    """Within the block the models are on the devices that they were loaded to, and after it on the
    CPU."""
    if not models:
        yield
        return
    with _one_at_a_time:
        for model in models:
            wake(model, _homes.setdefault(model, _device_of(model)))
        try:
            yield
        finally:
            for model in models:
                rest(model)


def moved(value: Any, device: torch.device) -> Any:
    """The value with every tensor on `device`; one that is there already is not copied."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def detached_copy(value: Any) -> Any:
    """The value with a copy of every tensor, outside of any autograd graph."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def tensor_devices(value: Any) -> Any:
    """The value's tree with the device of each tensor in its place, for `returned`."""
    return tree_map(lambda leaf: leaf.device if isinstance(leaf, Tensor) else None, value)


def to_devices(value: Any, devices: Any) -> Any:
    """The value with each tensor on its own device."""
    return tree_map(
        lambda leaf, device: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value, devices
    )


def _device_of(model: nn.Module) -> torch.device:
    return next((weight.device for weight in model.parameters()), CPU)
