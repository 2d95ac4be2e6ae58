"""Calls a stock pipeline for B samples of one row, each from its own seed."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from flowgrpo.core.sampling_config import SAMPLER_ARGUMENTS
from flowgrpo.core.seeds import seed_for
from flowgrpo.data.media import open_media
from flowgrpo.data.row import Row
from flowgrpo.data.samples import Sample
from flowgrpo.pipelines.seams import patched_for_call

COUNT_ARGUMENTS = ("num_images_per_prompt", "num_videos_per_prompt")
"""Names of the argument for the number of samples per prompt."""


@dataclass(kw_only=True, frozen=True)
class Batching:
    """How one call of a pipeline makes B samples of one row, as `batching.Batchings` finds out."""

    by_count: bool
    """Whether an argument of COUNT_ARGUMENTS is B; otherwise the prompt is repeated B times."""
    repeats_media: bool = False
    """Whether image arguments are repeated B times."""
    one_per_call: bool = False
    """Whether the pipeline takes a single generator, so that each sample needs its own call."""


def generate(
    pipe: Any, row: Row, seeds: Sequence[int], call: dict[str, Any], batching: Batching
) -> list[Sample]:
    """Returns samples of one row by the stock pipeline, one per seed of the initial noise.

    Args:
        row: its columns that are arguments of the pipeline's call (image, negative_prompt, ...)
            are passed on: images as PIL, videos as lists of PIL frames.
        call: further arguments of the pipeline, including `num_inference_steps`.
        batching: how this pipeline makes several samples with these arguments.
    """
    return list(outputs(pipe, row, seeds, {"output_type": "pil", **call}, batching)[0])


def outputs(
    pipe: Any, row: Row, seeds: Sequence[int], call: dict[str, Any], batching: Batching
) -> list[Any]:
    """Returns all fields of the pipeline's output, also audio, each with one entry per seed."""
    batches = [[seed] for seed in seeds] if batching.one_per_call else [seeds]
    results = [_fields(call_pipeline(pipe, row, batch, call, batching)) for batch in batches]
    return [
        torch.cat(field) if isinstance(field[0], torch.Tensor) else [s for f in field for s in f]
        for field in zip(*results, strict=True)
        if isinstance(field[0], (torch.Tensor, list))
    ]


def call_pipeline(
    pipe: Any, row: Row, seeds: Sequence[int], call: dict[str, Any], batching: Batching
) -> Any:
    """Calls the stock pipeline once for one sample per seed, and returns its output."""
    known = inspect.signature(type(pipe).__call__).parameters
    arguments = {**call, **open_media(call_columns(pipe, row))}
    arguments |= {"prompt": row.prompt} if "prompt" in known else {}
    if batching.by_count:
        arguments[next(name for name in COUNT_ARGUMENTS if name in known)] = len(seeds)
    if not batching.one_per_call:
        arguments |= {
            name: [value] * len(seeds)
            for name, value in arguments.items()
            if _is_repeated(name, value, batching)
        }
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    with patched_for_call(pipe), _seeded(pipe):
        return pipe(generator=generators[0] if batching.one_per_call else generators, **arguments)


def call_columns(pipe: Any, row: Row) -> dict[str, Any]:
    """Returns the row's columns that are arguments of the pipeline's call."""
    names = inspect.signature(type(pipe).__call__).parameters.keys() - SAMPLER_ARGUMENTS
    return {k: v for k, v in row.columns.items() if k in names and v is not None}


def _fields(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else tuple(output.values())


def _is_repeated(name: str, value: Any, batching: Batching) -> bool:
    if name in ("prompt", "negative_prompt") and isinstance(value, str):
        return not batching.by_count
    return batching.repeats_media and _is_media(value)


def _is_media(value: Any) -> bool:
    """Whether an argument is an image, or a list of images."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, Image.Image)


@contextmanager
def _seeded(pipe: Any) -> Iterator[None]:
    """Within the block the global random state has a fixed seed; afterwards it is as before.

    Some pipelines draw without a generator, for example when their VAE encodes an image, and a
    replay must draw the same again.
    """
    devices = [pipe.device] if pipe.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed_for("pipeline"))
        yield
