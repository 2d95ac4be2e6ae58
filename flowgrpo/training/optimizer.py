"""The optimizer of a run, by the name in its config, and its moments as plain tensors."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo.core.errors import ConfigError
from flowgrpo.core.train_config import TrainConfig
from flowgrpo.distributed.fsdp import placed_like


def make_optimizer(train: TrainConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, or AdamW with moments in 8 bits: one byte per number and a scale per 256 numbers.
    Tensors of fewer than 4,096 numbers keep float32 moments.

    Raises:
        ConfigError, ImportError: as `optimizer_class`.
    """
    make = optimizer_class(train)
    return make(parameters, lr=train.lr, betas=train.betas, weight_decay=train.weight_decay)


def optimizer_class(train: TrainConfig) -> Any:
    """The optimizer's class; call it before a model is loaded, to fail early.

    Raises:
        ConfigError: 8-bit moments of sharded weights.
        ImportError: 8-bit moments without bitsandbytes.
    """
    if train.optimizer == "adamw":
        return torch.optim.AdamW
    if train.shard:
        raise ConfigError(
            "train.optimizer is adamw_8bit, but train.shard shards the moments already, and "
            "bitsandbytes cannot work on shards; use adamw."
        )
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ImportError(
            "train.optimizer is adamw_8bit, but bitsandbytes is not installed; "
            "pip install bitsandbytes."
        ) from error
    return AdamW8bit


def optimizer_moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The optimizer's state by `key/parameter name`, without copies; a count that is not a tensor
    becomes one of dtype int64."""
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{key}/{name}"] = value if isinstance(value, Tensor) else _count(value)
    return found


def load_optimizer_moments(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    moments: Mapping[str, Tensor],
) -> None:
    """Puts full tensors from `optimizer_moments` into an optimizer of the same class."""
    optimizer.state.clear()
    for key_and_name, value in moments.items():
        key, name = key_and_name.split("/", 1)
        optimizer.state[parameters[name]][key] = _restored(key, value, parameters[name])


def _restored(key: str, value: Tensor, parameter: nn.Parameter) -> Any:
    """One entry of an optimizer's state, as the optimizer itself would hold it."""
    if key == "step":
        # AdamW counts its steps in a float32 tensor on the CPU, bitsandbytes in an int.
        return int(value) if value.dtype == torch.int64 else value
    has_shape = value.shape == parameter.shape
    return placed_like(value, parameter) if has_shape else value.to(parameter.device)


def _count(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int64)
