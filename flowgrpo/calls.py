"""How a stock pipeline is called: for several samples of a row, each with a seed of its own.

Also what is wrong, or odd, about the arguments of a call.
"""

import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from PIL import Image

from flowgrpo.config import OWN_ARGUMENTS, ConfigError, did_you_mean
from flowgrpo.media import Sample, frames_of, is_video, opened
from flowgrpo.pipelines import find_denoisers, find_models
from flowgrpo.prompts import Row
from flowgrpo.randomness import seed_for
from flowgrpo.tape import swapped

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
    style = find_style(pipe, row, call)
    parts = [[seed] for seed in seeds] if style.single else [seeds]
    made = [_fields(_called(pipe, row, part, call, style)) for part in parts]
    return [
        torch.cat(field) if isinstance(field[0], torch.Tensor) else [s for f in field for s in f]
        for field in zip(*made, strict=True)
        if isinstance(field[0], (torch.Tensor, list))
    ]


def _fields(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else tuple(output.values())


def find_style(pipe: Any, row: Row, call: dict[str, Any]) -> "Style":
    """How this pipeline takes several samples of one prompt, each with a seed of its own.

    Tried once for each set of names of arguments, up to the first step of the scheduler. Many
    pipelines have an argument for it, but not every one heeds it; and where one encodes a picture
    with the first generator only, that sample starts elsewhere than it would alone.

    Raises:
        Exception: no way works; whatever the pipeline raises for the first.
    """
    key = tuple(sorted({*call, *_columns(pipe, row)} - {"output_type"}))
    known = _styles.setdefault(pipe, {})
    if key not in known:
        errors = []
        for style in STYLES:
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


@dataclass(kw_only=True, frozen=True)
class Style:
    """A way to ask for B samples."""

    counted: bool
    """By an argument of COUNTS; else the prompt is repeated."""
    media_repeated: bool = False
    """Whether pictures are repeated, too."""
    single: bool = False
    """One sample a call, with one generator: the pipeline knows no more."""


STYLES = (
    Style(counted=True),
    Style(counted=False),
    Style(counted=True, media_repeated=True),
    Style(counted=False, media_repeated=True),
    Style(counted=False, single=True),
)


_styles: WeakKeyDictionary[Any, dict[tuple[str, ...], Style]] = WeakKeyDictionary()


def one_sample_a_call(pipe: Any, count: int) -> ConfigError:
    """The error where a micro-batch of `count` cannot be one call."""
    return ConfigError(
        f"{type(pipe).__name__} makes one sample a call, but a micro-batch has {count}; set "
        "sampling.micro_batch_size to 1."
    )


class _FirstStep(BaseException):
    """The loop has begun. Not an Exception: no `except Exception` of a pipeline may swallow it."""


def _prove_style(pipe: Any, row: Row, call: dict[str, Any], style: Style) -> None:
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
    pipe: Any, row: Row, seeds: Sequence[int], call: dict[str, Any], style: Style
) -> list[torch.Tensor]:
    """Latents and prediction that the loop gives its scheduler first; none where it never does."""
    reached: list[torch.Tensor] = []

    def step(model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> None:
        reached.extend([sample, model_output])
        raise _FirstStep

    step = functools.wraps(type(pipe.scheduler).step)(step)
    try:
        with torch.no_grad(), swapped(pipe.scheduler, "step", step):
            _called(pipe, row, seeds, call, style)
    except _FirstStep:
        pass
    return reached


def _called(pipe: Any, row: Row, seeds: Sequence[int], call: dict[str, Any], style: Style) -> Any:
    known = inspect.signature(type(pipe).__call__).parameters
    counts = [name for name in COUNTS if name in known]
    if style.counted and not counts:
        raise ValueError(f"{type(pipe).__name__} has no argument for the number of samples.")
    arguments = {**call, **opened(_columns(pipe, row))}
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
    with quiet(pipe), _decoding_in_float32(pipe), _seeded(pipe):
        return pipe(generator=generators[0] if style.single else generators, **arguments)


@contextmanager
def _seeded(pipe: Any) -> Iterator[None]:
    """Within the block what a pipeline draws without a generator is always the same, as the sample
    that some VAEs make of a picture; the caller's random state is left alone."""
    devices = [pipe.device] if pipe.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed_for("pipeline"))
        yield


def _columns(pipe: Any, row: Row) -> dict[str, Any]:
    """The row's columns that are arguments of the pipeline's call."""
    known = inspect.signature(type(pipe).__call__).parameters
    given = {k: v for k, v in row.columns.items() if v is not None}
    return {k: v for k, v in given.items() if k in known and k not in OWN_ARGUMENTS}


def _is_media(value: Any) -> bool:
    """A picture, or a list of pictures."""
    return isinstance(value, Image.Image) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], Image.Image)
    )


@contextmanager
def _decoding_in_float32(pipe: Any) -> Iterator[None]:
    """Within the block a half-precision VAE whose configuration says `force_upcast` decodes in
    float32; some would overflow. Encoding stays the pipeline's own."""
    vae = getattr(pipe, "vae", None)
    if vae is None or not vae.config.get("force_upcast") or vae.dtype == torch.float32:
        yield
        return
    dtype, stock = vae.dtype, vae.decode

    @functools.wraps(stock)
    def decode(latents: Any, *args: Any, **kwargs: Any) -> Any:
        vae.to(torch.float32)
        try:
            return stock(latents.float(), *args, **kwargs)
        finally:
            vae.to(dtype)

    with swapped(vae, "decode", decode):
        yield


@contextmanager
def quiet(pipe: Any) -> Iterator[None]:
    """No progress bar of the pipeline's own."""
    with swapped(pipe, "_progress_bar_config", {"disable": True}):
        yield


def check_call(pipe: Any, section: str, call: dict[str, Any]) -> None:
    """Refuses arguments that the pipeline's call does not take.

    Raises:
        ConfigError: names the argument and the nearest one.
    """
    known = [name for name in inspect.signature(type(pipe).__call__).parameters if name != "self"]
    for name in call.keys() - set(known):
        hint = did_you_mean(name, known, f"It takes {', '.join(known)}.")
        raise ConfigError(f"{section}.{name} is no argument of {type(pipe).__name__}; {hint}")


def surprises(pipe: Any, path: str | None, call: dict[str, Any], sample: Sample) -> list[str]:
    """Sentences about settings that work, but hardly as meant.

    Args:
        path: the model's folder or name.
        call: the arguments of sampling, `num_inference_steps` too.
        sample: what they made.
    """
    found = []
    if (mark := _distilled(pipe, path)) and call["num_inference_steps"] > 8:
        found.append(
            f"the model looks distilled ({mark}); such models are used at 1 to 8 steps, mostly 4, "
            f"but sampling.num_inference_steps is {call['num_inference_steps']}."
        )
    frames = frames_of(sample)
    asked = {"width": frames[0].width, "height": frames[0].height}
    asked |= {"num_frames": len(frames)} if is_video(sample) else {}
    for name, made in asked.items():
        if isinstance(call.get(name), int) and call[name] != made:
            found.append(f"sampling.call.{name} is {call[name]}, but the pipeline makes {made}.")
    native, area = _native_size(pipe), frames[0].width * frames[0].height
    if native and not 0.5 <= area / native**2 <= 2:
        found.append(
            f"samples are {frames[0].width} x {frames[0].height}, but the model was made for "
            f"{native} x {native}."
        )
    rate = inspect.signature(type(pipe).__call__).parameters.get("frame_rate")
    if rate is not None and "frame_rate" not in call:
        found.append(
            f"the model is told {rate.default} frames a second by default; set frame_rate in "
            "sampling.call, so that saved videos play at the same."
        )
    return found


def _distilled(pipe: Any, path: str | None) -> str:
    """What says that a model was distilled to few steps: its configuration, or its name."""
    if pipe.config.get("is_distilled"):
        return "is_distilled is true"
    models: dict[str, Any] = find_models(pipe)
    paths = [path or "", *(str(m.config.get("_name_or_path")) for m in models.values())]
    words = " ".join(Path(path).name.lower() for path in paths)
    marks = re.search(r"\b(turbo|lightning|distill(ed)?|lcm|hyper|dmd)\b", words)
    return f'its name says "{marks[0]}"' if marks else ""


def _native_size(pipe: Any) -> int | None:
    """Side of the pictures that the denoiser's configuration is made for, in pixels."""
    scale = getattr(pipe, "vae_scale_factor", None)
    denoisers: dict[str, Any] = find_denoisers(pipe)
    sizes = [module.config.get("sample_size") for module in denoisers.values()]
    if not (isinstance(scale, int) and isinstance(sizes[0], int)):
        return None
    return sizes[0] * scale


def check_frames(pipe: Any, section: str, call: dict[str, Any]) -> None:
    """Refuses a frame count that the VAE's stride in time does not give.

    Raises:
        ConfigError: names the nearest two.
    """
    count = call.get("num_frames")
    strides = [
        value
        for name, value in vars(pipe).items()
        if name.startswith("vae") and "temporal" in name and isinstance(value, int) and value > 1
    ]
    if not isinstance(count, int) or not strides or (count - 1) % strides[0] == 0:
        return
    below = count - (count - 1) % strides[0]
    raise ConfigError(
        f"{section}.num_frames is {count}, but must be 1 more than a multiple of {strides[0]}, the "
        f"VAE's stride in time; use {below} or {below + strides[0]}."
    )
