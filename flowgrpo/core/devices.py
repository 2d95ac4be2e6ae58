"""Moving tensors and modules between devices."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")


def to_device(module: nn.Module, device: torch.device) -> None:
    """Moves a module's weights to the device where it works."""
    module.to(device)


def to_cpu(module: nn.Module) -> None:
    """Moves a module's weights to the CPU, where they wait."""
    module.to(CPU)


_home_devices: WeakKeyDictionary[nn.Module, torch.device] = WeakKeyDictionary()
"""Device that each model of a reward was loaded to, and works on."""


_models_in_use = threading.RLock()
"""Held while models are on their devices, because two threads may score with one model."""


@contextmanager
def on_device(models: Sequence[nn.Module]) -> Iterator[None]:
    """Moves the models to the devices that they were loaded to, and to the CPU after the block."""
    if not models:
        yield
        return
    with _models_in_use:
        for model in models:
            to_device(model, _home_devices.setdefault(model, _device_of(model)))
        try:
            yield
        finally:
            for model in models:
                to_cpu(model)


def move_tensors(value: Any, device: torch.device) -> Any:
    """The value, a tree, with every tensor on `device`; one that is there already is not copied."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a tree of containers."""
    return sum(t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, Tensor))


def detached_copy(value: Any) -> Any:
    """The value with a copy of every tensor, outside of any autograd graph."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def tensor_devices(value: Any) -> Any:
    """The value with each tensor replaced by its device, and other leaves by None."""
    return tree_map(lambda leaf: leaf.device if isinstance(leaf, Tensor) else None, value)


def to_devices(value: Any, devices: Any) -> Any:
    """The value with each tensor on its device, as `tensor_devices` returned it."""
    return tree_map(
        lambda leaf, device: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value, devices
    )


def _device_of(model: nn.Module) -> torch.device:
    return next((weight.device for weight in model.parameters()), CPU)
