"""Configs as YAML files, with overrides; every mistake is reported in one sentence."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.errors import ConfigError, did_you_mean


class _Loader(yaml.SafeLoader):
    """Reads numbers as YAML 1.2 does, so that 1e-4 is one, and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"{key} is set twice, line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"), None
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> GRPOConfig:
    """Reads a YAML file and applies `section.key=value` overrides.

    Raises:
        ConfigError: a missing file, an unknown key, a wrong type or an impossible value.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"config is {path}, but there is no such file; give a YAML file.")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}, but must hold keys and values.")
    return parse_config(data, overrides)


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Overrides as nested mappings: `section.key=value` becomes `{section: {key: value}}`."""
    data: dict[str, Any] = {}
    for override in overrides:
        _apply(data, override)
    return data


def parse_config(data: dict[str, Any], overrides: Sequence[str] = ()) -> GRPOConfig:
    """Validates a mapping, changed by `section.key=value` overrides.

    Raises:
        ConfigError: the first mistake.
    """
    for override in overrides:
        _apply(data, override)
    try:
        return GRPOConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from None


def dump_config(config: GRPOConfig) -> str:
    """The config as YAML, with every default written out."""
    return yaml.safe_dump(config_as_json(config), sort_keys=False)


def config_as_json(config: GRPOConfig) -> dict[str, Any]:
    """The config as JSON values, with the repr of other values, such as an image of a call."""
    return config.model_dump(mode="json", fallback=repr)


def _apply(data: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise ConfigError(f'override is "{override}", but must look like section.key=value.')
    *sections, key = name.lstrip("-").split(".")
    if name in ("reward", "rewards"):  # two spellings of one setting
        data.pop("reward", None), data.pop("rewards", None)
    for section in sections:
        inner = data.get(section)
        if inner is not None and not isinstance(inner, dict):
            raise ConfigError(
                f'override is "{override}", but {section} is {inner!r}, which has no keys; '
                f"override {section} as a whole."
            )
        data[section] = dict(inner or {})
        data = data[section]
    try:
        data[key] = yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise ConfigError(
            f'override is "{override}", but its value is not YAML; quote it.'
        ) from None


def _sentence(error: ValidationError) -> str:
    fault = error.errors()[0]
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    location = [part for part in fault["loc"] if not isinstance(part, int)]
    name = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        known = _known_keys([str(part) for part in location[:-1]])
        hint = did_you_mean(str(location[-1]), known, f"known: {', '.join(known)}.")
        return f"{name} is not a setting; {hint}"
    if fault["type"] == "missing":
        return f"{name} is missing; add it."
    if fault["type"] == "model_type":
        keys = ", ".join(_known_keys([str(part) for part in location]))
        return f"{name} is {fault['input']!r}, but must be a section with keys; known: {keys}."
    reason = fault["msg"].removeprefix("Input should be ").removeprefix("a ")
    return f"{name} is {fault['input']!r}, but must be {reason}."


def _known_keys(sections: list[str]) -> list[str]:
    model: Any = GRPOConfig
    for section in sections:
        inner = model.model_fields[section].annotation
        model = next((a for a in (inner, *get_args(inner)) if hasattr(a, "model_fields")), None)
        if model is None:
            return []
    return sorted(model.model_fields)
