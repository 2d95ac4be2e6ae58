"""Finds rewards: built-in ones, functions of a file or a module, and callables."""

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

OLD_OPTIONS = ("validate", "overlap", "models")
"""Attributes that declared a reward's options before there was a decorator."""


def load_rewards(configs: Sequence[RewardConfig]) -> list[Reward]:
    """Returns the configured rewards, each with a unique name.

    Raises:
        ConfigError: a reward that cannot be found or imported, params that it does not take, or
            options outside of the decorator.
    """
    rewards = []
    for config in configs:
        function = find_reward(config.reward)
        _refuse_old_options(function)
        _check_params(config, function)
        bound = functools.partial(function, **config.params) if config.params else function
        rewards.append(Reward(name=_name(config), function=bound, weight=config.weight))
    return unique(rewards)


def as_rewards(functions: Any) -> list[Reward]:
    """Returns the rewards given as a callable, a `Reward`, a name, or a list of these.

    Raises:
        ConfigError: as `load_rewards`.
    """
    items = functions if isinstance(functions, (list, tuple)) else [functions]
    rewards = []
    for item in items:
        if isinstance(item, Reward):
            rewards.append(item)
        elif callable(item):
            _refuse_old_options(item)
            rewards.append(Reward(name=_function_name(item), function=item))
        else:
            rewards += load_rewards([RewardConfig(reward=item)])
    return unique(rewards)


def weighted(rewards: Sequence[Reward], weights: Sequence[float]) -> list[Reward]:
    """Returns the rewards with these weights, one per reward.

    Raises:
        ConfigError: another number of weights.
    """
    if len(weights) != len(rewards):
        raise ConfigError(
            f"reward_weights has {len(weights)} numbers, but there are {len(rewards)} rewards; "
            "give one per reward."
        )
    return [replace(r, weight=float(w)) for r, w in zip(rewards, weights, strict=True)]


def unique(rewards: Sequence[Reward]) -> list[Reward]:
    """Returns the same rewards if their names are unique; metrics identify a reward by its name.

    Raises:
        ConfigError: two rewards have the same name.
    """
    names = [reward.name for reward in rewards]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f'two rewards are called "{name}"; give one of them a name.')
    return list(rewards)


def find_reward(spec: str) -> RewardFunction:
    """Returns the function for a built-in name, `file.py:function` or `package.module:function`.

    Raises:
        ConfigError: it is unknown, or its module cannot be imported.
    """
    source, separator, name = spec.rpartition(":")
    if not separator:
        source, name = f"rewards.{spec}", spec
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
            _module_from_file(Path(source))
            if source.endswith(".py")
            else importlib.import_module(source)
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
        raise ConfigError(
            f'reward "{spec}" is unknown: {source} has no function "{name}"; correct it.'
        )
    return function


def built_in_rewards() -> list[str]:
    """Returns the modules of the rewards package that define a function of their own name."""
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
    """Imports a file, which may import others of its folder; once, since it may load a model."""
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def _refuse_old_options(function: Any) -> None:
    """Refuses a function whose options are attributes, which would be ignored.

    Raises:
        ConfigError: names the option and the decorator.
    """
    while isinstance(function, functools.partial):
        function = function.func
    if not inspect.isfunction(function):
        return
    for option, value in vars(function).items():
        # A `columns` that is not a tuple was never an option of a reward.
        if option in OLD_OPTIONS or (option == "columns" and isinstance(value, tuple)):
            raise ConfigError(
                f'reward "{function.__name__}" has an attribute "{option}", but options are '
                f"read from its decorator; use @reward({option}=...) from rewards."
            )


def _check_params(config: RewardConfig, function: RewardFunction) -> None:
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for key in config.params:
        if key not in named:
            hint = did_you_mean(key, named, f"it takes {', '.join(named)}.")
            raise ConfigError(f'reward "{config.reward}" has no parameter "{key}"; {hint}')


def _name(config: RewardConfig) -> str:
    """Returns the configured name, or else the function's name with its params.

    The params are always part of it, so that a name does not depend on the other rewards.
    """
    params = ", ".join(f"{key}={value}" for key, value in config.params.items())
    name = config.reward.rpartition(":")[2]
    return config.name or (f"{name}({params})" if params else name)


def _function_name(function: Any) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__name__", type(inner).__name__)
