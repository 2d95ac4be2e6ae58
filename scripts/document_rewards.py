"""Writes the table of built-in rewards in rewards/README.md from their docstrings and signatures.

python scripts/document_rewards.py
"""

import importlib
import inspect
import re
from pathlib import Path

from flowgrpo.scoring.loading import built_in_rewards
from rewards import options_of

README = Path(__file__).parents[1] / "rewards" / "README.md"
BEGIN, END = "<!-- written by scripts/document_rewards.py -->", "<!-- end of the table -->"
HEADER = (
    "| name | question | returns | data columns | settings | weights |\n|---|---|---|---|---|---|"
)


def section(docstring: str, title: str) -> str:
    """Returns a section of a Google-style docstring as one line."""
    found = re.search(rf"^{title}:\n((?: +.+\n?)+)", docstring, re.MULTILINE)
    assert found, f"a docstring has no section {title}"
    return " ".join(found[1].split())


def row(name: str) -> str:
    """Returns the table row of a built-in reward."""
    module = importlib.import_module(f"rewards.{name}")
    function = getattr(module, name)
    about, usage = inspect.getdoc(module) or "", inspect.getdoc(function) or ""
    weights = re.search(r"^Weights: ((?:.+\n?)+)", about, re.MULTILINE)
    assert weights, f"the docstring of rewards.{name} has no paragraph that begins with Weights:"
    columns = options_of(function).columns or ()
    settings = [
        f"`{parameter.name}={parameter.default!r}`".replace("'", '"')
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in columns
    ]
    cells = [
        f"[`{name}`]({name}.py)",
        about.partition("?")[0].replace("\n", " ") + "?",
        section(usage, "Returns").removesuffix("."),
        ", ".join(f"`{column}`" for column in columns) or "none",
        ", ".join(settings),
        " ".join(weights[1].split()).removesuffix("."),
    ]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """Returns the table between its markers, as it should be in the README."""
    return "\n".join([BEGIN, HEADER, *map(row, built_in_rewards()), END])


def updated(text: str) -> str:
    """Returns the README's text with the current table."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return before + table() + after


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
