"""Options of a reward function: `@reward(...)` stores them, `options_of` reads them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import nn

Function = TypeVar("Function", bound=Callable[..., Any])

ATTRIBUTE = "reward_options"
"""Name of the attribute of a reward that holds its options."""


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """Options of one reward function; the defaults are those of a function without a decorator."""

    validate: Callable[..., None] | None = None
    """Called as `validate(prompt, **row)` for each data row before a run; raises ValueError for a
    row that the reward cannot score."""
    overlap: bool = False
    """Whether calls may run in a background thread while the next samples are generated."""
    columns: tuple[str, ...] | None = None
    """Parameters that take data columns; all others are settings, which no column may set. None
    lets a column set any parameter that has no configured value."""
    models: Callable[..., Iterable[nn.Module]] | None = None
    """Called as `models(**settings)`; returns the torch modules that a call with these settings
    uses, so that they can be on the GPU only while the reward scores."""


def reward(
    *,
    validate: Callable[..., None] | None = None,
    overlap: bool = False,
    columns: Iterable[str] | None = None,
    models: Callable[..., Iterable[nn.Module]] | None = None,
) -> Callable[[Function], Function]:
    """Returns a decorator that stores these options on a reward and leaves it a plain callable.

    The options are the fields of `RewardOptions`.

    Raises:
        ValueError: `columns` is a single string instead of a collection of names.
    """
    if isinstance(columns, str):
        raise ValueError(
            f'columns is "{columns}", but must be a tuple of names; use ("{columns}",).'
        )
    options = RewardOptions(
        validate=validate,
        overlap=overlap,
        columns=None if columns is None else tuple(columns),
        models=models,
    )

    def decorate(function: Function) -> Function:
        setattr(function, ATTRIBUTE, options)
        return function

    return decorate


def options_of(function: Callable[..., Any]) -> RewardOptions:
    """Returns the options of a reward, or the defaults if it was not decorated.

    Reads through functools.partial. A callable object is decorated itself, or its `__call__` is.
    """
    for holder in (function, type(function).__call__):
        options = getattr(holder, ATTRIBUTE, None)
        if isinstance(options, RewardOptions):
            return options
    if isinstance(function, functools.partial):
        return options_of(function.func)
    return RewardOptions()
