"""Rewards: find the functions that a config names, call them, and trust nothing they return.

A reward is a plain callable ``reward(images, prompts, **columns) -> list[float]``. Three attributes
are read where a function has them: ``validate(prompt, **row)`` raises ValueError for a data row
that it cannot score, ``overlap = True`` lets it run in a thread while the next images are sampled,
and ``columns`` names the parameters that are data columns, where the others are settings.
"""

import functools
import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from flowgrpo.config import ConfigError
from flowgrpo.prompts import Row

RewardFunction = Callable[..., Sequence[float]]


class RewardError(RuntimeError):
    """A reward returned something that is not one finite number an image."""


@dataclass(kw_only=True, frozen=True)
class Reward:
    """A named reward function with its weight in the total."""

    name: str
    function: RewardFunction
    weight: float = 1.0

    @property
    def overlaps(self) -> bool:
        return bool(_attribute(self.function, "overlap"))

    def __call__(self, images: Sequence[Any], rows: Sequence[Row]) -> Tensor:
        """Scores of B images, each for its own row: (B,) float64.

        Raises:
            RewardError: a wrong count, or a value that is not a finite number.
        """
        prompts = [row.prompt for row in rows]
        names = sorted({name for row in rows for name in row.columns})
        columns = {name: [row.columns.get(name) for row in rows] for name in names}
        try:
            # Copies: a reward may draw on its pictures.
            copies = [image.copy() for image in images]
            with torch.no_grad():
                values = self.function(images=copies, prompts=prompts, **columns)
            if isinstance(values, Iterator):
                values = list(values)
        except (ImportError, RewardError):
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise RewardError(
                f'{self.name} failed on prompt "{prompts[0]}" ({type(error).__name__}: {error}, '
                f"{frame.filename} line {frame.lineno}); correct the function."
            ) from error
        return _checked(self.name, values, prompts)


def validate_rows(rewards: Iterable[Reward], rows: Iterable[Row]) -> None:
    """Lets each reward refuse rows that it cannot score, before any model is loaded.

    Raises:
        ConfigError: names the file, the line and the reason.
    """
    for reward in rewards:
        validate = _attribute(reward.function, "validate")
        required = _required_columns(reward.function)
        for row in rows:
            missing = [name for name in required if row.columns.get(name) is None]
            if missing:
                raise ConfigError(
                    f'{row.place} has no column "{missing[0]}", but reward "{reward.name}" '
                    "needs it; add it."
                )
            _check_columns(reward, row)
            if validate is None:
                continue
            try:
                validate(row.prompt, **row.columns)
            except ValueError as error:
                raise ConfigError(f"{row.place}: {error}") from None


class Scorer:
    """Scores micro-batches; rewards that overlap run in one background thread, in order."""

    def __init__(self, rewards: Sequence[Reward]):
        self.rewards = rewards
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rewards")

    def submit(self, images: Sequence[Any], rows: Sequence[Row]) -> dict[str, Future[Tensor]]:
        """Futures of (B,) scores by reward name."""
        return {reward.name: self._start(reward, images, rows) for reward in self.rewards}

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _start(self, reward: Reward, images: Sequence[Any], rows: Sequence[Row]) -> Future[Tensor]:
        if reward.overlaps:
            return self._thread.submit(reward, images, rows)
        done: Future[Tensor] = Future()
        done.set_result(reward(images, rows))
        return done


def refuse_constant(reward: Reward, row: Row, call: Mapping[str, Any]) -> None:
    """Stops before training where a reward cannot tell black, white and noise apart.

    The pictures have the size that `call` asks for. A reward of text rightly gives 0 to all
    three, so equal zeros pass.

    Raises:
        RewardError: the three scores are one number other than 0.
    """
    size = (int(call.get("width") or 512), int(call.get("height") or 512))
    noise = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(0))
    pictures = [
        Image.new("RGB", size, "black"),
        Image.new("RGB", size, "white"),
        Image.fromarray(noise.to(torch.uint8).numpy()),
    ]
    scores = reward(pictures, [row] * 3)
    if bool((scores == scores[0]).all()) and scores[0] != 0:
        raise RewardError(
            f"{reward.name} is {scores[0]:g} for a black, a white and a noise image, but must "
            "depend on "
            "the image; check the function."
        )


def _checked(name: str, values: Any, prompts: Sequence[str]) -> Tensor:
    if hasattr(values, "shape"):  # a tensor or an array, perhaps (B, 1)
        values = values.reshape(values.shape[0], -1).squeeze(-1).tolist()
    if not isinstance(values, (list, tuple)):
        raise RewardError(
            f"{name} returned a {type(values).__name__}, but must return a list of "
            f"{len(prompts)} numbers."
        )
    if len(values) != len(prompts):
        raise RewardError(
            f"{name} returned {len(values)} rewards for {len(prompts)} images (prompt "
            f'"{prompts[0]}"); '
            "return one an image."
        )
    numbers = [_number(value) for value in values]
    odd = [i for i, number in enumerate(numbers) if not math.isfinite(number)]
    if odd:
        raise RewardError(
            f"{len(odd)} of {len(prompts)} rewards are not finite numbers ({name}, prompt "
            f'"{prompts[odd[0]]}"); '
            "a failed score must be an error of the reward."
        )
    return torch.tensor(numbers, dtype=torch.float64)


def _number(value: Any) -> float:
    """NaN for what is no number, or too large to square."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if abs(number) < 1e30 else math.nan


def _check_columns(reward: Reward, row: Row) -> None:
    """The function takes images, prompts and every column, and no column stands in for a param."""
    function = reward.function
    parameters = inspect.signature(function).parameters
    bound = function.keywords if isinstance(function, functools.partial) else {}
    declared = _attribute(function, "columns")
    params = {*bound, *(set() if declared is None else set(parameters) - {*declared})}
    for name in row.columns:
        if name in params or name in ("images", "prompts"):
            raise ConfigError(
                f'{row.place} has a column "{name}", but reward "{reward.name}" has a param of '
                "that name; rename the column."
            )
    try:
        inspect.signature(function).bind(images=[], prompts=[], **row.columns)
    except TypeError as error:
        raise ConfigError(
            f'reward "{reward.name}" cannot be called for {row.place} ({error}); '
            "define it as f(images, prompts, **columns)."
        ) from None


def _required_columns(function: RewardFunction) -> list[str]:
    """Keyword parameters without a default, but for images and prompts."""
    parameters = inspect.signature(function).parameters.values()
    return [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        and p.name not in ("images", "prompts")
    ]


def _attribute(function: Any, name: str) -> Any:
    """An attribute of a function, also through functools.partial."""
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, name, None)
