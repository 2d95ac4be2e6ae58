"""Checks the rows of prompt files against the rewards that read them."""

import functools
import inspect
from collections.abc import Iterable

from flowgrpo.core.errors import ConfigError
from flowgrpo.data.media import open_media
from flowgrpo.data.row import Row
from flowgrpo.scoring.reward import SAMPLE_PARAMETERS, Reward, RewardFunction, reward_columns
from rewards.contract import options_of


def validate_rows(rewards: Iterable[Reward], rows: Iterable[Row]) -> None:
    """Checks that each reward can score each row, before any model is loaded.

    Raises:
        ConfigError: a missing or clashing column, or a row that a reward refuses; names the file,
            the line and the reason.
    """
    for reward in rewards:
        validate = options_of(reward.function).validate
        required = _required_columns(reward.function)
        for row in rows:
            missing = [n for n in required if reward_columns(row.columns).get(n) is None]
            if missing:
                raise ConfigError(
                    f'{row.source} has no column "{missing[0]}", but reward "{reward.name}" '
                    "needs it; add it."
                )
            _check_columns(reward, row)
            if validate is None:
                continue
            try:
                validate(row.prompt, **reward_columns(open_media(row.columns)))
            except ValueError as error:
                raise ConfigError(f"{row.source}: {error}") from None


def _check_columns(reward: Reward, row: Row) -> None:
    """Checks that the function accepts the row's columns and that none of them sets a param."""
    function = reward.function
    parameters = inspect.signature(function).parameters
    bound = function.keywords if isinstance(function, functools.partial) else {}
    declared = options_of(function).columns
    params = {*bound, *(set() if declared is None else set(parameters) - {*declared})}
    columns = reward_columns(row.columns)
    for name in columns:
        if name in params or name in SAMPLE_PARAMETERS:
            raise ConfigError(
                f'{row.source} has a column "{name}", but reward "{reward.name}" has a param of '
                "that name; rename the column."
            )
    modality = "images" if reward.takes_images else "videos"
    try:
        inspect.signature(function).bind(**{modality: []}, prompts=[], **columns)
    except TypeError as error:
        raise ConfigError(
            f'reward "{reward.name}" cannot be called for {row.source} ({error}); '
            "define it as f(images, prompts, **columns) or f(videos, prompts, **columns)."
        ) from None


def _required_columns(function: RewardFunction) -> list[str]:
    """Returns the names of the parameters that have no default and take a data column."""
    parameters = inspect.signature(function).parameters.values()
    return [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        and p.name not in SAMPLE_PARAMETERS
    ]
