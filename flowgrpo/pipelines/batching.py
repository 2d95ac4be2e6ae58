"""Finds out how a pipeline makes several samples of one row in one call, by trying."""

from collections.abc import Sequence
from typing import Any

import torch

from flowgrpo.core.errors import ConfigError
from flowgrpo.data.prompts import Row
from flowgrpo.pipelines.call import Batching, call_columns, call_pipeline
from flowgrpo.pipelines.seams import patched_step

CANDIDATES = (
    Batching(by_count=True),
    Batching(by_count=False),
    Batching(by_count=True, repeats_media=True),
    Batching(by_count=False, repeats_media=True),
    Batching(by_count=False, one_per_call=True),
)
"""In the order of trial."""


class Batchings:
    """How one pipeline makes several samples, resolved once per set of argument names.

    Many pipelines have an argument for the number of samples, but not all of them honour it; and
    if one encodes an image with the first generator only, the other samples start elsewhere than
    they would alone. So each candidate is run up to the scheduler's first step, and its samples are
    compared with the same sample made alone.
    """

    def __init__(self, pipe: Any):
        self.pipe = pipe
        self._resolved: dict[frozenset[str], Batching] = {}

    def of(self, row: Row, call: dict[str, Any]) -> Batching:
        """The batching for the row's columns and the arguments of `call`.

        Raises:
            Exception: no candidate works; whatever the pipeline raised for the first.
        """
        names = frozenset({*call, *call_columns(self.pipe, row)} - {"output_type"})
        if names not in self._resolved:
            self._resolved[names] = _resolve(self.pipe, row, call)
        return self._resolved[names]

    def of_micro_batch(self, row: Row, call: dict[str, Any], size: int) -> Batching:
        """The same, for a micro-batch that is taped: `size` samples in one call.

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
    errors = []
    for candidate in CANDIDATES:
        try:
            _prove(pipe, row, call, candidate)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # pipelines raise what they like
            errors.append(error)
        else:
            return candidate
    raise errors[0]


def _prove(pipe: Any, row: Row, call: dict[str, Any], batching: Batching) -> None:
    """Raises if the pipeline cannot be called like this, or mixes the samples of a call."""
    if batching.one_per_call:
        _first_step(pipe, row, (0,), call, batching)
        return
    both = _first_step(pipe, row, (0, 1), call, batching)
    alone = _first_step(pipe, row, (1,), call, batching)
    for pair, single in zip(both, alone, strict=True):
        if len(pair) != 2:
            raise ValueError(
                f"{type(pipe).__name__} makes {len(pair)} samples when 2 are asked for."
            )
        off = (pair[1:].float() - single.float()).square().mean().sqrt()
        allowed = 1e-2 if pair.dtype == torch.float32 else 1e-1
        if off > allowed * single.float().square().mean().sqrt():  # False for NaN: not our concern
            raise ValueError(f"samples of one call of {type(pipe).__name__} are not independent.")


class _FirstStep(BaseException):
    """The loop has begun. Not an Exception: no `except Exception` of a pipeline may swallow it."""


def _first_step(
    pipe: Any, row: Row, seeds: Sequence[int], call: dict[str, Any], batching: Batching
) -> list[torch.Tensor]:
    """Latents and prediction of the scheduler's first step; empty if it is never stepped."""
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
