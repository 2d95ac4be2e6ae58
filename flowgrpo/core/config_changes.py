"""Which settings may change when a run is resumed."""

from typing import Any

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
"""Settings that a resumed run may have changed; any other would make it a different run."""


def changes(then: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """What differs between two configs, as "was ... and is ..." by key."""
    before, after = _flat(then), _flat(now)
    return {
        key: f"was {before.get(key)!r} and is {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }


def may_change_on_resume(key: str) -> bool:
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in RESUMABLE_CHANGES)


def check_resumable(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises ConfigError where settings of a run to resume differ, but for those of MAY_CHANGE."""
    refused = [
        f"{key} {how}" for key, how in changes(then, now).items() if not may_change_on_resume(key)
    ]
    if refused:
        raise ConfigError(
            f"the run to resume had other settings ({'; '.join(refused)}), but only "
            f"{', '.join(RESUMABLE_CHANGES)} may change; put them back, or start another run."
        )


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
