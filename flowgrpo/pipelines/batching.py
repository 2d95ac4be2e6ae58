"""How a pipeline makes several samples of one prompt in one call."""

import functools
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.pipelines.call import Batching, call_columns, call_pipeline
from flowgrpo.pipelines.seams import patched


def find_batching(pipe: Any, row: Row, call: dict[str, Any]) -> "Batching":
    """How this pipeline takes several samples of one prompt, each with a seed of its own.

    Tried once for each set of names of arguments, up to the first step of the scheduler. Many
    pipelines have an argument for it, but not every one heeds it; and where one encodes a picture
    with the first generator only, that sample starts elsewhere than it would alone.

    Raises:
        Exception: no way works; whatever the pipeline raises for the first.
    """
    key = tuple(sorted({*call, *call_columns(pipe, row)} - {"output_type"}))
    known = _batchings.setdefault(pipe, {})
    if key not in known:
        errors = []
        for style in BATCHINGS:
            try:
                _prove_style(pipe, row, call, style)
                known[key] = style
                break
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # pipelines raise what they like
                errors.append(error)
        else:
            raise errors[0]
    return known[key]


BATCHINGS = (
    Batching(counted=True),
    Batching(counted=False),
    Batching(counted=True, media_repeated=True),
    Batching(counted=False, media_repeated=True),
    Batching(counted=False, single=True),
)


_batchings: WeakKeyDictionary[Any, dict[tuple[str, ...], Batching]] = WeakKeyDictionary()


class _FirstStep(BaseException):
    """The loop has begun. Not an Exception: no `except Exception` of a pipeline may swallow it."""


def _prove_style(pipe: Any, row: Row, call: dict[str, Any], style: Batching) -> None:
    """Raises where the pipeline cannot be called so, or mixes the samples of a call."""
    if style.single:
        _first_step(pipe, row, (0,), call, style)
        return
    both = _first_step(pipe, row, (0, 1), call, style)
    alone = _first_step(pipe, row, (1,), call, style)
    for together, single in zip(both, alone, strict=True):
        if len(together) != 2:
            raise ValueError(
                f"{type(pipe).__name__} makes {len(together)} samples where 2 are asked for."
            )
        off = (together[1:].float() - single.float()).square().mean().sqrt()
        allowed = 1e-2 if together.dtype == torch.float32 else 1e-1
        if off > allowed * single.float().square().mean().sqrt():  # NaN says nothing of styles
            raise ValueError(f"samples of one call of {type(pipe).__name__} are not independent.")


def _first_step(
    pipe: Any, row: Row, seeds: Sequence[int], call: dict[str, Any], style: Batching
) -> list[torch.Tensor]:
    """Latents and prediction that the loop gives its scheduler first; none where it never does."""
    reached: list[torch.Tensor] = []

    def step(model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> None:
        reached.extend([sample, model_output])
        raise _FirstStep

    step = functools.wraps(type(pipe.scheduler).step)(step)
    try:
        with torch.no_grad(), patched(pipe.scheduler, "step", step):
            call_pipeline(pipe, row, seeds, call, style)
    except _FirstStep:
        pass
    return reached
