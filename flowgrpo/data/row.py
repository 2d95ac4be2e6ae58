"""A row of a prompt file."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, frozen=True)
class Row:
    """One row of a prompt file or data set."""

    prompt: str
    """Text of the prompt."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Other columns, passed to the rewards, and to the pipeline if its call has a parameter of that
    name. Images and videos are not loaded: `media.open_media` opens them."""
    source: str
    """Where the row comes from, for messages: `signs.txt line 3`."""
