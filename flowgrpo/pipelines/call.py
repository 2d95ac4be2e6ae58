"""How a stock pipeline is called: B samples of one row, each from a seed of its own."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from flowgrpo.core.sampling_config import SAMPLER_ARGUMENTS
from flowgrpo.core.seeds import seed_for
from flowgrpo.data.media import opened
from flowgrpo.data.prompts import Row
from flowgrpo.data.samples import Sample
from flowgrpo.pipelines.seams import patched_for_call

COUNTS = ("num_images_per_prompt", "num_videos_per_prompt")
"""Arguments by which pipelines take the number of samples per prompt."""


@dataclass(kw_only=True, frozen=True)
class Batching:
    """How one call of a pipeline makes B samples of one row. `batching.Batchings` finds it."""

    by_count: bool
    """With an argument of COUNTS; otherwise the prompt is repeated B times."""
    repeats_media: bool = False
    """Images are repeated B times, too."""
    one_per_call: bool = False
    """The pipeline takes a single generator, so every sample is a call of its own."""


def generate(
    pipe: Any, row: Row, seeds: Sequence[int], call: dict[str, Any], batching: Batching
) -> list[Sample]:
    """Samples of one row by the stock pipeline, one per seed of the initial noise.

    Args:
        row: its columns that are arguments of the pipeline's call (image, negative_prompt, ...)
            are passed on; images as PIL, videos as lists of PIL frames.
        call: further arguments of the pipeline, `num_inference_steps` among them.
        batching: how this pipeline makes several samples with these arguments.
    """
    return list(outputs(pipe, row, seeds, {"output_type": "pil", **call}, batching)[0])


def outputs(
    pipe: Any, row: Row, seeds: Sequence[int], call: dict[str, Any], batching: Batching
) -> list[Any]:
    """All fields that the pipeline returns, audio too, each with one entry per seed."""
    parts = [[seed] for seed in seeds] if batching.one_per_call else [seeds]
    made = [_fields(call_pipeline(pipe, row, part, call, batching)) for part in parts]
    return [
        torch.cat(field) if isinstance(field[0], torch.Tensor) else [s for f in field for s in f]
        for field in zip(*made, strict=True)
        if isinstance(field[0], (torch.Tensor, list))
    ]


def call_pipeline(
    pipe: Any, row: Row, seeds: Sequence[int], call: dict[str, Any], batching: Batching
) -> Any:
    """One call of the stock pipeline, with what it returns."""
    known = inspect.signature(type(pipe).__call__).parameters
    counts = [name for name in COUNTS if name in known]
    if batching.by_count and not counts:
        raise ValueError(f"{type(pipe).__name__} has no argument for the number of samples.")
    arguments = {**call, **opened(call_columns(pipe, row))}
    arguments |= {"prompt": row.prompt} if "prompt" in known else {}
    if batching.by_count:
        arguments[counts[0]] = len(seeds)
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
    """The row's columns that are arguments of the pipeline's call."""
    known = inspect.signature(type(pipe).__call__).parameters
    given = {k: v for k, v in row.columns.items() if v is not None}
    return {k: v for k, v in given.items() if k in known and k not in SAMPLER_ARGUMENTS}


def _fields(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else tuple(output.values())


def _is_repeated(name: str, value: Any, batching: Batching) -> bool:
    if name in ("prompt", "negative_prompt") and isinstance(value, str):
        return not batching.by_count
    return batching.repeats_media and _is_media(value)


def _is_media(value: Any) -> bool:
    """An image, or a list of images."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, Image.Image)


@contextmanager
def _seeded(pipe: Any) -> Iterator[None]:
    """Within the block a pipeline that draws without a generator always draws the same, as some
    VAEs do when they encode an image; the caller's random state is left alone."""
    devices = [pipe.device] if pipe.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed_for("pipeline"))
        yield
