"""How a stock pipeline is called: for several samples of a row, each with a seed of its own.

Also what is wrong, or odd, about the arguments of a call.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from flowgrpo.core.errors import ConfigError
from flowgrpo.core.sampling_config import SAMPLER_ARGUMENTS
from flowgrpo.core.seeds import seed_for
from flowgrpo.data.media import opened
from flowgrpo.data.prompts import Row
from flowgrpo.data.samples import Sample
from flowgrpo.pipelines.batching import find_batching
from flowgrpo.pipelines.seams import float32_decoding, without_progress_bar

COUNTS = ("num_images_per_prompt", "num_videos_per_prompt")
"""Arguments by which pipelines take the number of samples of one prompt."""


def generate(pipe: Any, row: Row, seeds: Sequence[int], call: dict[str, Any]) -> list[Sample]:
    """One call of the stock pipeline: B samples of one row, one per seed of the initial noise.

    Columns of the row that are arguments of the pipeline's call (image, negative_prompt, ...) go
    there; pictures come as PIL, videos as lists of PIL frames.
    """
    return list(outputs(pipe, row, seeds, {"output_type": "pil", **call})[0])


def outputs(pipe: Any, row: Row, seeds: Sequence[int], call: dict[str, Any]) -> list[Any]:
    """All that the pipeline returns for these samples, audio too: fields of B things each."""
    style = find_batching(pipe, row, call)
    parts = [[seed] for seed in seeds] if style.single else [seeds]
    made = [_fields(call_pipeline(pipe, row, part, call, style)) for part in parts]
    return [
        torch.cat(field) if isinstance(field[0], torch.Tensor) else [s for f in field for s in f]
        for field in zip(*made, strict=True)
        if isinstance(field[0], (torch.Tensor, list))
    ]


def _fields(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else tuple(output.values())


@dataclass(kw_only=True, frozen=True)
class Batching:
    """A way to ask for B samples."""

    counted: bool
    """By an argument of COUNTS; else the prompt is repeated."""
    media_repeated: bool = False
    """Whether pictures are repeated, too."""
    single: bool = False
    """One sample a call, with one generator: the pipeline knows no more."""


def one_sample_per_call_error(pipe: Any, count: int) -> ConfigError:
    """The error where a micro-batch of `count` cannot be one call."""
    return ConfigError(
        f"{type(pipe).__name__} makes one sample a call, but a micro-batch has {count}; set "
        "sampling.micro_batch_size to 1."
    )


def call_pipeline(
    pipe: Any, row: Row, seeds: Sequence[int], call: dict[str, Any], style: Batching
) -> Any:
    known = inspect.signature(type(pipe).__call__).parameters
    counts = [name for name in COUNTS if name in known]
    if style.counted and not counts:
        raise ValueError(f"{type(pipe).__name__} has no argument for the number of samples.")
    arguments = {**call, **opened(call_columns(pipe, row))}
    arguments |= {"prompt": row.prompt} if "prompt" in known else {}
    if style.counted:
        arguments[counts[0]] = len(seeds)
    for name, value in arguments.items():
        text = name in ("prompt", "negative_prompt") and isinstance(value, str)
        if not style.single and (
            (text and not style.counted) or (style.media_repeated and _is_media(value))
        ):
            arguments[name] = [value] * len(seeds)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    with without_progress_bar(pipe), float32_decoding(pipe), _seeded(pipe):
        return pipe(generator=generators[0] if style.single else generators, **arguments)


@contextmanager
def _seeded(pipe: Any) -> Iterator[None]:
    """Within the block what a pipeline draws without a generator is always the same, as the sample
    that some VAEs make of a picture; the caller's random state is left alone."""
    devices = [pipe.device] if pipe.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed_for("pipeline"))
        yield


def call_columns(pipe: Any, row: Row) -> dict[str, Any]:
    """The row's columns that are arguments of the pipeline's call."""
    known = inspect.signature(type(pipe).__call__).parameters
    given = {k: v for k, v in row.columns.items() if v is not None}
    return {k: v for k, v in given.items() if k in known and k not in SAMPLER_ARGUMENTS}


def _is_media(value: Any) -> bool:
    """A picture, or a list of pictures."""
    return isinstance(value, Image.Image) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], Image.Image)
    )
