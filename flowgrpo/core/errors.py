"""Errors that flowgrpo raises on purpose: one sentence each, with a machine-readable reason."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A setting that cannot work, in one sentence."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """A question with the known name that is nearest; `otherwise` where none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f'did you mean "{close[0]}"?' if close else otherwise


class DiskError(RuntimeError):
    """The run folder cannot be written."""

    reason = "disk"


class RunStopped(RuntimeError):
    """A run that must not go on, with the reason's name.

    Args:
        on_all_processes: all processes raise it at the same point.
        blamed: the epoch whose weights gave what is wrong, and would give it again; None where a
            lower learning rate from there may help.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        on_all_processes: bool = False,
        blamed_epoch: int | None = None,
    ):
        super().__init__(message)
        self.reason, self.on_all_processes, self.blamed_epoch = (
            reason,
            on_all_processes,
            blamed_epoch,
        )


class Interrupted(SystemExit):
    """A run that was asked to stop, and has saved what it had. Its code is 128 + the signal's."""

    on_all_processes = True
    """All processes leave at the same point."""

    def __init__(self, signal_number: int, message: str):
        super().__init__(128 + signal_number)
        self.message = message

    def __str__(self) -> str:
        return self.message


class ReplayError(RuntimeError):
    """The loop did not play back as it was recorded; training on it would be biased."""

    reason = "replay"


LOST = "process_lost"
"""Reason of a run whose process is gone without a word."""


class ProcessLost(RuntimeError):
    """A message to the other processes failed."""

    reason = LOST


class RewardError(RuntimeError):
    """A reward returned something that is not one finite number an image."""

    reason = "reward_failed"


class RewardNotFinite(RewardError, RunStopped):
    """A reward returned NaN, infinity, or no number at all."""

    def __init__(self, message: str):
        RunStopped.__init__(self, "rewards_not_finite", message)
