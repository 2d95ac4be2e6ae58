"""The optimiser of a run, by the name in its config, and its moments as plain tensors."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo.config import TrainConfig


def make_optimiser(train: TrainConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, or AdamW with its moments in 8 bits.

    In 8 bits a moment is a byte per number and a scale per 256 numbers; of tensors with fewer than
    4,096 numbers it stays in float32.

    Raises:
        ImportError: `adamw_8bit` without bitsandbytes.
    """
    make: Any = torch.optim.AdamW if train.optimiser == "adamw" else _in_8_bits()
    return make(parameters, lr=train.lr, betas=train.betas, weight_decay=train.weight_decay)


def _in_8_bits() -> Any:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ImportError(
            "train.optimiser is adamw_8bit, but needs bitsandbytes, which is not installed; "
            "pip install bitsandbytes."
        ) from error
    return AdamW8bit


def moments_of(
    optimiser: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The optimiser's state by `key/parameter name`; no two tensors share memory, and a count that
    is no tensor becomes one of int64."""
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimiser.state.get(parameter, {}).items():
            found[f"{key}/{name}"] = value.clone() if isinstance(value, Tensor) else _count(value)
    return found


def load_moments(
    optimiser: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    moments: Mapping[str, Tensor],
) -> None:
    """Puts what `moments_of` gave into an optimiser of the same kind."""
    for key_and_name, value in moments.items():
        key, name = key_and_name.split("/", 1)
        parameter = parameters[name]
        if key != "step":
            optimiser.state[parameter][key] = value.to(parameter.device)
        else:  # AdamW counts its steps in a tensor on the CPU, others in an int
            is_count = value.dtype == torch.int64
            optimiser.state[parameter][key] = int(value) if is_count else value


def _count(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int64)
