"""Checks of the arguments of a pipeline's call."""

import inspect
import re
from pathlib import Path
from typing import Any

from flowgrpo.core.errors import ConfigError, did_you_mean
from flowgrpo.data.samples import Sample, frames_of, is_video
from flowgrpo.pipelines.parts import find_denoisers, find_models


def check_call(pipe: Any, section: str, call: dict[str, Any]) -> None:
    """Refuses arguments that the pipeline's call does not take.

    Raises:
        ConfigError: names the argument and the nearest one.
    """
    known = [name for name in inspect.signature(type(pipe).__call__).parameters if name != "self"]
    for name in call.keys() - set(known):
        hint = did_you_mean(name, known, f"It takes {', '.join(known)}.")
        raise ConfigError(f"{section}.{name} is no argument of {type(pipe).__name__}; {hint}")


def call_warnings(pipe: Any, path: str | None, call: dict[str, Any], sample: Sample) -> list[str]:
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
