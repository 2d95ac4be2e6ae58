"""Context managers that exchange the trained weights for the length of a block."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from flowgrpo.distributed.fsdp import placed_like
from flowgrpo.pipelines.lora import inference_dtypes
from flowgrpo.policy.policy import Policy


@contextmanager
def reference(policy: Policy) -> Iterator[None]:
    """Within the block the policy is the reference: the model as it was before training.

    That is the base model with the adapter switched off, or `policy.start_weights` if there is one.
    """
    if policy.start_weights is not None:
        with trained_values(policy, policy.start_weights):
            yield
        return
    # peft's public `enable_adapters` would also change requires_grad, so this sets its switch.
    layers = [
        m for d in policy.denoisers.values() for m in d.modules() if isinstance(m, BaseTunerLayer)
    ]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def inference_weights(policy: Policy, average: dict[str, Tensor] | None = None) -> Iterator[None]:
    """Within the block the weights are those that a user will load.

    They are the average, if there is one, and an adapter has the dtype of its layers, because
    diffusers casts an adapter to it on loading.
    """
    values = average or {name: p.data for name, p in policy.parameters.items()}
    dtypes = {
        f"{name}.{key}": dtype
        for name, module in policy.denoisers.items()
        for key, dtype in inference_dtypes(module).items()
    }
    cast = {name: value.to(dtypes.get(name, value.dtype)) for name, value in values.items()}
    with trained_values(policy, cast):
        yield


@contextmanager
def trained_values(policy: Policy, values: dict[str, Tensor]) -> Iterator[None]:
    """Within the block the trained weights have these values."""
    parameters = policy.parameters
    if policy.is_sharded:
        # Shards are views of the buffer from which FSDP gathers, so they must be written in place.
        live = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        load_weights(policy, values)
        try:
            yield
        finally:
            load_weights(policy, live)
        return
    live = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = values[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = live[name]


def load_weights(policy: Policy, values: dict[str, Tensor]) -> None:
    """Copies `values`, full or sharded tensors by name, into the trained weights.

    Raises:
        ValueError: the names or shapes differ from those of the trained weights.
    """
    parameters = policy.parameters
    shapes = {name: value.shape for name, value in values.items()}
    expected = {name: parameter.shape for name, parameter in parameters.items()}
    if shapes != expected:
        odd = min(name for name, _ in shapes.items() ^ expected.items())
        raise ValueError(f"trained weights differ in {odd}; use the settings they were made with.")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(placed_like(values[name], parameter))
