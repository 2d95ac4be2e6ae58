"""Guards: what is wrong with a run, found in the metrics of its epochs.

`findings` is a pure function of the lines of metrics.jsonl, so every process and every resumed run
finds the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowgrpo.core.train_config import Action, GuardsConfig

Lines = Sequence[Mapping[str, Any]]
"""Lines of metrics.jsonl, from epoch 1 on."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something wrong with the last epoch."""

    reason: str
    """Name of the guard, as in the config."""
    message: str
    action: Action


def findings(lines: Lines, guards: GuardsConfig) -> list[Finding]:
    """Everything wrong with the last of these epochs, except for guards that are `off`; those that
    stop the run come first."""
    checks = (
        (guards.constant_images, "constant_images", _constant_images(lines)),
        (guards.dead_rewards, "dead_rewards", _dead_rewards(lines, guards.dead_epochs)),
        (guards.kl, "kl", _kl(lines, guards.max_kl)),
        (guards.velocity, "velocity", _velocity(lines, guards.max_velocity_growth)),
    )
    found = [
        Finding(reason=reason, message=message, action=action)
        for action, reason, message in checks
        if message and action != "off"
    ]
    return sorted(found, key=lambda finding: finding.action != "stop")


def _constant_images(lines: Lines) -> str:
    if lines[-1].get("flat_images", 0) < 1:
        return ""
    return (
        f"every image of epoch {lines[-1]['epoch']} has a single colour, so there is nothing to "
        "learn from; look at samples/, and lower train.lr or set model.dtype to float32."
    )


def _dead_rewards(lines: Lines, epochs: int) -> str:
    if len(lines) < epochs or any(line["tied_groups"] < 1 for line in lines[-epochs:]):
        return ""
    return (
        f"all rewards of each group have been equal for {epochs} epochs, so there is nothing to "
        "learn from; use a denser reward, other prompts or more noise (guards.dead_epochs sets the "
        "limit)."
    )


def _kl(lines: Lines, max_kl: float | None) -> str:
    value = lines[-1].get("kl", 0.0)
    if max_kl is None or value <= max_kl:
        return ""
    return (
        f"kl is {value:.3g} in epoch {lines[-1]['epoch']}, but guards.max_kl is {max_kl:g}; lower "
        "train.lr or raise objective.kl_weight."
    )


def _velocity(lines: Lines, max_growth: float | None) -> str:
    if max_growth is None or lines[-1]["velocity_rms"] <= max_growth * lines[0]["velocity_rms"]:
        return ""
    growth = lines[-1]["velocity_rms"] / max(lines[0]["velocity_rms"], 1e-30)
    return (
        f"the velocity is {growth:.3g} times as large in epoch {lines[-1]['epoch']} as in epoch "
        f"{lines[0]['epoch']}, but guards.max_velocity_growth is {max_growth:g}; lower train.lr or "
        "raise objective.kl_weight."
    )
