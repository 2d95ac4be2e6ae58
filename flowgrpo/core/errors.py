"""Errors that flowgrpo raises on purpose: one sentence each, with a machine-readable reason."""

import difflib
from collections.abc import Iterable


class FlowgrpoError(Exception):
    """Base of every error that flowgrpo raises on purpose.

    `str(error)` is one sentence: what is wrong, the value, what to do.
    """

    reason = "error"
    """Short name of the error in summary.json."""
    on_all_processes = False
    """Whether every process raises it at the same point, so that none has to notify the others."""


class ConfigError(FlowgrpoError, ValueError):
    """A setting, prompt, reward or model that cannot work; raised before training starts."""

    reason = "config"


class DiskError(FlowgrpoError, RuntimeError):
    """The run folder cannot be written."""

    reason = "disk"


class ReplayError(FlowgrpoError, RuntimeError):
    """A replay differs from its rollout, so training on it would be biased."""

    reason = "replay"


class ProcessLost(FlowgrpoError, RuntimeError):
    """Another process of the run is gone."""

    reason = "process_lost"


class RewardError(FlowgrpoError, RuntimeError):
    """A reward failed, or returned something other than one finite number per sample."""

    reason = "reward_failed"


class RunStopped(FlowgrpoError, RuntimeError):
    """A run must not go on.

    Args:
        reason: short name of what is wrong, as in summary.json.
        message: what is wrong and what to do, in one sentence.
        on_all_processes: whether every process raises it at the same point.
        blamed_epoch: epoch whose weights caused the problem and would cause it again; None if a
            lower learning rate from its checkpoint may help.
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
        self.reason, self.on_all_processes = reason, on_all_processes
        self.blamed_epoch = blamed_epoch


class RewardNotFinite(RewardError, RunStopped):
    """A reward returned NaN, infinity, or something that is not a number."""

    def __init__(self, message: str):
        RunStopped.__init__(self, "rewards_not_finite", message)


class Interrupted(SystemExit):
    """A run ended after SIGTERM or SIGINT, its state saved; the exit code is 128 + the signal."""

    def __init__(self, signal_number: int, message: str):
        super().__init__(128 + signal_number)
        self.message = message

    def __str__(self) -> str:
        return self.message


def one_line(error: BaseException) -> str:
    """The text of an error in one line; the name of its class if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Returns a question with the most similar known name, or `otherwise` if none is similar."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f'did you mean "{close[0]}"?' if close else otherwise
