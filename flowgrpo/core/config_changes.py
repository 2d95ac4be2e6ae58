"""Which settings may change when a run is resumed."""

from typing import Any

from flowgrpo.core.config import RENAMED_KEYS
from flowgrpo.core.errors import ConfigError

RESUMABLE_CHANGES = (
    "output_dir",
    "checkpoint_every",
    "train.epochs",
    "evaluation.every",
    "model.device",
    "model.offload",
    "sampling.tape_on_cpu",
    "train.shard",
    "checkpoint_keep",
    "trackers",
    "guards",
    "fps",
)
"""Settings, or sections, that may change on resume; any other would make it a different run."""


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    """Differences of two configs: "was ... and is ..." by dotted key."""
    old, new = _flat(before), _flat(after)
    return {
        key: f"was {old.get(key)!r} and is {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    }


def may_change_on_resume(key: str) -> bool:
    """Whether the setting with this dotted key may change on resume."""
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in RESUMABLE_CHANGES)


def check_resumable(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raises ConfigError if a setting differs that is not one of RESUMABLE_CHANGES, or if the run
    was made by an earlier version that called settings differently."""
    if old := sorted(RENAMED_KEYS.keys() & _flat(before).keys()):
        raise ConfigError(
            f"the run to resume was made by an earlier version with other names of settings "
            f"({', '.join(old)}); finish it with that version, or start another run."
        )
    refused = [
        f"{key} {change}"
        for key, change in changes(before, after).items()
        if not may_change_on_resume(key)
    ]
    if refused:
        raise ConfigError(
            f"the run to resume had other settings ({'; '.join(refused)}), but only "
            f"{', '.join(RESUMABLE_CHANGES)} may change; change them back, or start another run."
        )


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
