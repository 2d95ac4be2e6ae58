"""Writes configs/README.md: every setting, from the fields of the config and their docstrings.

python scripts/document_configs.py      # a test fails if the file is not up to date
"""

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.sections import RewardConfig, Section

CONFIGS = Path(__file__).parents[1] / "configs"
README = CONFIGS / "README.md"

INTRODUCTION = """\
# Configs and settings

<!-- Written by scripts/document_configs.py; change the docstrings in flowgrpo/core instead. -->

A run is a YAML file. All settings but the model, the prompts and the reward have a default, so a
file holds only what differs from it:

```yaml
model: {path: stabilityai/stable-diffusion-3.5-medium, dtype: bfloat16}
prompts: {train: assets/prompts/signs_train.txt}
reward: ocr
sampling: {call: {height: 512, width: 512, guidance_scale: 4.5}}
```

The command line overrides single settings as `section.key=value`, where the value is YAML:

```
flowgrpo train configs/sd35_medium_ocr.yaml train.lr=1e-4 sampling.window.size=2
```

An unknown setting or an impossible value is refused before a model is loaded. `flowgrpo plan
CONFIG` prints what a run will do and how much memory it needs. Python takes the same settings:
`GRPOConfig(train={"lr": 1e-4})`.
"""

MEMORY = (
    "model.dtype",
    "model.vae_slicing",
    "model.vae_tiling",
    "model.offload",
    "sampling.micro_batch_size",
    "sampling.tape_on_cpu",
    "objective.kl_weight",
    "train.gradient_checkpointing",
    "train.optimizer",
    "train.shard",
)
"""Settings that change how much memory a run needs."""

TYPES = {str: "text", int: "integer", float: "number", dict: "mapping", Any: "any"}
PLURALS = {str: "texts", int: "integers", float: "numbers", RewardConfig: "rewards"}
END_OF_SCALAR = "\n..."
"""What YAML writes behind a value that is not a collection."""
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def sections(model: type[Section] = GRPOConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted prefix and the class of every section, the config itself first."""
    yield prefix, model
    for name, field in model.model_fields.items():
        for section in _sections_of(field.annotation):
            yield from sections(section, f"{prefix}{name}.")


def settings() -> dict[str, FieldInfo]:
    """Every field by its dotted name, sections and the fields of a reward included."""
    found = {
        f"{prefix}{name}": field
        for prefix, model in sections()
        for name, field in model.model_fields.items()
    }
    return found | {f"rewards.{name}": f for name, f in RewardConfig.model_fields.items()}


def document() -> str:
    """The text of configs/README.md."""
    parts = [INTRODUCTION, _configs()]
    for prefix, model in sections():
        title = f"`{prefix.rstrip('.')}`" if prefix else "Top level"
        fields = {f"{prefix}{name}": field for name, field in model.model_fields.items()}
        parts.append(_section(title, model.__doc__, fields))
        if prefix == "prompts.":
            title = "Each of `rewards` and `held_out`"
            parts.append(_section(title, RewardConfig.__doc__, RewardConfig.model_fields))
    known = settings()
    memory = {name: known[name] for name in MEMORY}
    hint = "Repeated from the tables above, for runs that do not fit into memory."
    parts.append(_section("Settings that save memory", hint, memory))
    return "\n".join(parts)


def _configs() -> str:
    rows = [
        f"| [`{path.stem}`]({path.name}) | {path.read_text().splitlines()[0].lstrip('# ')} |"
        for path in sorted(CONFIGS.glob("*.yaml"))
    ]
    intro = (
        "Those for real models say in their comments where their numbers come from and how much "
        "memory to expect."
    )
    head = ["## Configs in this folder", "", intro, "", "| config | what it does |", "|---|---|"]
    return "\n".join([*head, *rows, ""])


def _section(title: str, description: str | None, fields: dict[str, FieldInfo]) -> str:
    assert description is not None, title
    text = "\n".join(line.strip() for line in description.strip().splitlines())
    lines = [f"## {title}", "", text, ""]
    lines += ["| setting | values | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        if _sections_of(field.annotation) and "." not in name:
            continue  # sections of the top level have tables of their own
        assert field.description is not None, name
        cells = (f"`{name}`", _values(field), _default(field), " ".join(field.description.split()))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _values(field: FieldInfo) -> str:
    """Type and bounds of a field."""
    bounds = [
        f"{sign} {getattr(bound, name):g}"
        for bound in field.metadata
        for name, sign in BOUNDS.items()
        if hasattr(bound, name)
    ]
    return " ".join([_type(field.annotation), ", ".join(bounds)]).strip()


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(a) for a in arguments if a is not type(None))
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin is list:
        return f"list of {PLURALS[arguments[0]]}"
    if origin is tuple:
        return "two numbers"
    if annotation is bool:
        return "`true`, `false`"
    return "mapping" if _sections_of(annotation) else TYPES[origin or annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        value = value.model_dump(mode="json", exclude_none=True)
    value = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=200)
    return f"`{text.partition(END_OF_SCALAR)[0].strip()}`"


def _sections_of(annotation: Any) -> list[type[Section]]:
    """Section classes of a field that holds one section; several if it is one of a union."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    candidates = get_args(annotation) if is_union else [annotation]
    return [c for c in candidates if isinstance(c, type) and issubclass(c, Section)]


if __name__ == "__main__":
    README.write_text(document(), encoding="utf-8")
