"""Rewards: find the functions that a config names, call them, and trust nothing they return.

A reward is a plain callable ``reward(images, prompts, **columns) -> list[float]``. Three attributes
are read where a function has them: ``validate(prompt, **row)`` raises ValueError for a data row
that it cannot score, ``overlap = True`` lets it run in a thread while the next images are sampled,
and ``columns`` names the parameters that are data columns, where the others are settings.
"""

import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from flowgrpo.config import ConfigError, RewardConfig
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


def load_rewards(configs: Sequence[RewardConfig]) -> list[Reward]:
    """The rewards that a config names, each with a name of its own.

    Raises:
        ConfigError: a reward that cannot be found or imported, or params that it does not take.
    """
    rewards = []
    for config in configs:
        function = find_reward(config.reward)
        _check_params(config, function)
        bound = functools.partial(function, **config.params) if config.params else function
        rewards.append(Reward(name=_name(config), function=bound, weight=config.weight))
    return unique(rewards)


def unique(rewards: Sequence[Reward]) -> list[Reward]:
    """The same rewards; scores are kept by name, so two of one name are an error.

    Raises:
        ConfigError: names the name.
    """
    names = [reward.name for reward in rewards]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f'two rewards are called "{name}"; give one of them a name.')
    return list(rewards)


def as_rewards(functions: Any) -> list[Reward]:
    """Rewards from a callable, a name, or a list of these, as the Python API takes them."""
    items = functions if isinstance(functions, (list, tuple)) else [functions]
    rewards = []
    for item in items:
        if isinstance(item, Reward):
            rewards.append(item)
        elif callable(item):
            rewards.append(Reward(name=_function_name(item), function=item))
        else:
            rewards += load_rewards([RewardConfig(reward=item)])
    return unique(rewards)


def weighted(rewards: Sequence[Reward], weights: Sequence[float]) -> list[Reward]:
    """The rewards with these weights, one each."""
    if len(weights) != len(rewards):
        raise ConfigError(
            f"reward_weights has {len(weights)} numbers, but there are {len(rewards)} rewards; "
            "give one each."
        )
    return [replace(r, weight=float(w)) for r, w in zip(rewards, weights, strict=True)]


def find_reward(spec: str) -> RewardFunction:
    """The function behind a built-in name, `file.py:function` or `package.module:function`."""
    place, separator, name = spec.rpartition(":")
    if not separator:
        place, name = f"rewards.{spec}", spec
        known = built_in_rewards()
        if spec not in known:
            close = difflib.get_close_matches(spec, known, n=1)
            hint = f' did you mean "{close[0]}"?' if close else ""
            raise ConfigError(
                f'reward "{spec}" is unknown;{hint} Known: {", ".join(known)}, file.py:function, '
                "package.module:function."
            )
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = (
            _module_from_file(Path(place))
            if place.endswith(".py")
            else importlib.import_module(place)
        )
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f'reward "{spec}" cannot be imported ({type(error).__name__}: {error}); '
            "correct it, or install what it needs."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f'reward "{spec}" is not there: {place} has no function "{name}".')
    return function


def built_in_rewards() -> list[str]:
    """Modules of the rewards package that hold a function of their own name."""
    package = importlib.import_module("rewards")
    found = []
    for module in pkgutil.iter_modules(package.__path__):
        if callable(getattr(importlib.import_module(f"rewards.{module.name}"), module.name, None)):
            found.append(module.name)
    return found


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


def _module_from_file(path: Path) -> Any:
    path = path.expanduser()
    if not path.is_file():
        raise ConfigError(f"reward file is {path}, but there is no such file; correct the path.")
    return _run_file(path.resolve())


@functools.cache
def _run_file(path: Path) -> Any:
    """The file as a module, run once: it may hold a model. It may import its neighbours."""
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def _check_params(config: RewardConfig, function: RewardFunction) -> None:
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for key in config.params:
        if key not in named:
            close = difflib.get_close_matches(key, named, n=1)
            hint = f'did you mean "{close[0]}"?' if close else f"it takes {', '.join(named)}."
            raise ConfigError(f'reward "{config.reward}" has no parameter "{key}"; {hint}')


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


def _name(config: RewardConfig) -> str:
    """As given, else the function with its params: names must not depend on the other rewards."""
    params = ", ".join(f"{key}={value}" for key, value in config.params.items())
    name = config.reward.rpartition(":")[2]
    return config.name or (f"{name}({params})" if params else name)


def _function_name(function: Any) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__name__", type(inner).__name__)


def _attribute(function: Any, name: str) -> Any:
    """An attribute of a function, also through functools.partial."""
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, name, None)
