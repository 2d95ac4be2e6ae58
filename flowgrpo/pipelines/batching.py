"""Finds out how a pipeline makes several samples of one row in one call, by trying."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from flowgrpo.core.errors import ConfigError
from flowgrpo.data.row import Row
from flowgrpo.pipelines.call import COUNT_ARGUMENTS, Batching, call_columns, call_pipeline
from flowgrpo.pipelines.seams import patched_step

CANDIDATES = (
    Batching(by_count=True),
    Batching(by_count=False),
    Batching(by_count=True, repeats_media=True),
    Batching(by_count=False, repeats_media=True),
    Batching(by_count=False, one_per_call=True),
)
"""Batchings in the order in which they are tried."""


class Batchings:
    """How one pipeline makes several samples, resolved once per set of argument names.

    Many pipelines have an argument for the number of samples, but not all of them honour it; and
    if a pipeline encodes an image with the first generator only, its other samples start from
    other latents than they would alone. So each candidate is run up to the scheduler's first step,
    and a sample of its batch is compared with the same sample made alone.
    """

    def __init__(self, pipe: Any):
        self.pipe = pipe
        self._resolved: dict[frozenset[str], Batching] = {}

    def of(self, row: Row, call: dict[str, Any]) -> Batching:
        """Returns the batching for the row's columns and the arguments of `call`.

        Raises:
            Exception: no candidate works; it is the error that the first candidate raised.
        """
        names = frozenset({*call, *call_columns(self.pipe, row)} - {"output_type"})
        if names not in self._resolved:
            self._resolved[names] = _resolve(self.pipe, row, call)
        return self._resolved[names]

    def of_micro_batch(self, row: Row, call: dict[str, Any], size: int) -> Batching:
        """Returns the same for a micro-batch of `size` samples, which is taped in one call.

        Raises:
            ConfigError: the pipeline makes one sample per call.
        """
        batching = self.of(row, call)
        if batching.one_per_call and size > 1:
            raise ConfigError(
                f"{type(self.pipe).__name__} makes one sample per call, but a micro-batch has "
                f"{size}; set sampling.micro_batch_size to 1."
            )
        return batching


def _resolve(pipe: Any, row: Row, call: dict[str, Any]) -> Batching:
    """Returns the first candidate that works."""
    errors = []
    has_count = any(
        name in inspect.signature(type(pipe).__call__).parameters for name in COUNT_ARGUMENTS
    )
    for candidate in (c for c in CANDIDATES if has_count or not c.by_count):
        try:
            _check(pipe, row, call, candidate)
        except torch.OutOfMemoryError:  # no candidate's fault
            raise
        except Exception as error:  # pipelines raise exceptions of any type
            errors.append(error)
        else:
            return candidate
    raise errors[0]


def _check(pipe: Any, row: Row, call: dict[str, Any], batching: Batching) -> None:
    """Raises if the pipeline cannot be called like this, or mixes the samples of a call."""
    if batching.one_per_call:
        _first_step(pipe, row, (0,), call, batching)
        return
    both = _first_step(pipe, row, (0, 1), call, batching)
    alone = _first_step(pipe, row, (1,), call, batching)
    for pair, single in zip(both, alone, strict=True):
        if len(pair) != 2:
            raise ValueError(
                f"{type(pipe).__name__} makes {len(pair)} samples, but 2 were requested."
            )
        off = (pair[1:].float() - single.float()).square().mean().sqrt()
        allowed = 1e-2 if pair.dtype == torch.float32 else 1e-1
        if off > allowed * single.float().square().mean().sqrt():  # False for NaN
            raise ValueError(f"samples of one call of {type(pipe).__name__} are not independent.")


class _FirstStep(BaseException):
    """Leaves the pipeline's call at its first step. Not an Exception, so that no
    `except Exception` in a pipeline swallows it."""


def _first_step(
    pipe: Any, row: Row, seeds: Sequence[int], call: dict[str, Any], batching: Batching
) -> list[torch.Tensor]:
    """Returns latents and prediction at the scheduler's first step; empty if it never steps."""
    reached: list[torch.Tensor] = []

    def step(
        scheduler: Any, model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any
    ) -> None:
        reached.extend([sample, model_output])
        raise _FirstStep

    try:
        with torch.no_grad(), patched_step(pipe.scheduler, step):
            call_pipeline(pipe, row, seeds, call, batching)
    except _FirstStep:
        pass
    return reached
