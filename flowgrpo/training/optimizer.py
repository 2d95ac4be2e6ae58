"""The optimizer of a run, by the name in its config, and its moments as plain tensors."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo.core.errors import ConfigError
from flowgrpo.core.train_config import TrainConfig
from flowgrpo.distributed.fsdp import placed_like


def make_optimizer(train: TrainConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, or AdamW with its moments in 8 bits: a byte per number and a scale per 256 of them; of
    tensors with fewer than 4,096 numbers they stay in float32.

    Raises:
        ConfigError, ImportError: as `optimizer_class`.
    """
    make = optimizer_class(train)
    return make(parameters, lr=train.lr, betas=train.betas, weight_decay=train.weight_decay)


def optimizer_class(train: TrainConfig) -> Any:
    """The class of `make_optimizer`, to be asked for before a model is loaded.

    Raises:
        ConfigError: 8 bits for sharded weights.
        ImportError: 8 bits without bitsandbytes.
    """
    if train.optimizer == "adamw":
        return torch.optim.AdamW
    if train.shard:
        raise ConfigError(
            "train.optimizer is adamw_8bit, but train.shard spreads the moments already, and "
            "bitsandbytes cannot work on shards; use adamw."
        )
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ImportError(
            "train.optimizer is adamw_8bit, but needs bitsandbytes, which is not installed; "
            "pip install bitsandbytes."
        ) from error
    return AdamW8bit


def optimizer_moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The optimizer's state by `key/parameter name`, not copied, and tensors may share memory; a
    count that is no tensor becomes one of int64."""
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
    """Puts what `moments_of` gave, as whole tensors, into an optimizer of the same kind."""
    optimizer.state.clear()
    for key_and_name, value in moments.items():
        key, name = key_and_name.split("/", 1)
        parameter = parameters[name]
        placed: Any = value
        if key != "step":
            same = value.shape == parameter.shape
            placed = placed_like(value, parameter) if same else value.to(parameter.device)
        elif value.dtype == torch.int64:  # AdamW counts its steps in a float32 tensor on the CPU
            placed = int(value)
        optimizer.state[parameter][key] = placed


def _count(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int64)
