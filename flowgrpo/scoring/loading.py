"""Rewards by name: built-in ones, functions of a file or a module, callables."""

import functools
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowgrpo.core.errors import ConfigError, did_you_mean
from flowgrpo.core.sections import RewardConfig
from flowgrpo.scoring.reward import Reward, RewardFunction


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


def find_reward(spec: str) -> RewardFunction:
    """The function behind a built-in name, `file.py:function` or `package.module:function`."""
    place, separator, name = spec.rpartition(":")
    if not separator:
        place, name = f"rewards.{spec}", spec
        known = built_in_rewards()
        if spec not in known:
            hint = f"{did_you_mean(spec, known)} Known: {', '.join(known)}"
            raise ConfigError(
                f'reward "{spec}" is unknown; {hint.lstrip()}, file.py:function, '
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
            hint = did_you_mean(key, named, f"it takes {', '.join(named)}.")
            raise ConfigError(f'reward "{config.reward}" has no parameter "{key}"; {hint}')


def _name(config: RewardConfig) -> str:
    """As given, else the function with its params: names must not depend on the other rewards."""
    params = ", ".join(f"{key}={value}" for key, value in config.params.items())
    name = config.reward.rpartition(":")[2]
    return config.name or (f"{name}({params})" if params else name)


def _function_name(function: Any) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__name__", type(inner).__name__)
