"""Checks of the arguments for a pipeline's call, and warnings about unusual ones."""

import inspect
import re
from pathlib import Path
from typing import Any

from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.errors import ConfigError, did_you_mean
from flowgrpo.data.samples import Sample, frames_of, is_video
from flowgrpo.pipelines.parts import find_denoisers, find_models


def check_calls(pipe: Any, config: GRPOConfig) -> None:
    """Checks the arguments of rollouts and evaluations against the pipeline's call.

    Raises:
        ConfigError: an argument that the pipeline does not take, or an impossible frame count.
    """
    check_call(pipe, "sampling.call", config.sampling.call)
    check_call(pipe, "evaluation.call", config.evaluation.call or {})
    check_frames(pipe, "sampling.call", config.sampling.call)
    check_frames(pipe, "evaluation.call", config.evaluation_call)


def check_call(pipe: Any, section: str, call: dict[str, Any]) -> None:
    """Refuses arguments that the pipeline's call does not take.

    Args:
        section: config section of the arguments, for the message.

    Raises:
        ConfigError: names the argument and the most similar one that exists.
    """
    known = [name for name in inspect.signature(type(pipe).__call__).parameters if name != "self"]
    for name in call.keys() - set(known):
        hint = did_you_mean(name, known, f"It takes {', '.join(known)}.")
        raise ConfigError(f"{section}.{name} is not an argument of {type(pipe).__name__}; {hint}")


def call_warnings(pipe: Any, path: str | None, call: dict[str, Any], sample: Sample) -> list[str]:
    """Returns warnings, one sentence each, about settings that work but are probably a mistake.

    Args:
        path: folder or hub name of the model.
        call: arguments of the call, including `num_inference_steps`.
        sample: an image or video that the pipeline made with them.
    """
    found = []
    if (evidence := _distillation_evidence(pipe, path)) and call["num_inference_steps"] > 8:
        found.append(
            f"sampling.num_inference_steps is {call['num_inference_steps']}, but the model looks "
            f"distilled ({evidence}); such models are used with 1 to 8 steps, usually 4."
        )
    frames = frames_of(sample)
    width, height = frames[0].size
    actual = {"width": width, "height": height}
    actual |= {"num_frames": len(frames)} if is_video(sample) else {}
    for name, value in actual.items():
        if isinstance(call.get(name), int) and call[name] != value:
            found.append(f"sampling.call.{name} is {call[name]}, but the pipeline makes {value}.")
    native = _native_size(pipe)
    if native and not 0.5 <= width * height / native**2 <= 2:
        found.append(
            f"samples are {width} x {height}, but the model was made for {native} x {native}."
        )
    rate = inspect.signature(type(pipe).__call__).parameters.get("frame_rate")
    if rate is not None and "frame_rate" not in call:
        found.append(
            f"sampling.call has no frame_rate, so the model makes videos of {rate.default} frames "
            "per second; set it, so that they are saved with the same rate."
        )
    return found


def _distillation_evidence(pipe: Any, path: str | None) -> str:
    """Returns what suggests that a model was distilled to few steps; "" if nothing does."""
    if pipe.config.get("is_distilled"):
        return "is_distilled is true"
    models: dict[str, Any] = find_models(pipe)
    paths = [path or "", *(str(m.config.get("_name_or_path")) for m in models.values())]
    words = " ".join(Path(path).name.lower() for path in paths)
    marks = re.search(r"\b(turbo|lightning|distill(ed)?|lcm|hyper|dmd)\b", words)
    return f'its name says "{marks[0]}"' if marks else ""


def _native_size(pipe: Any) -> int | None:
    """Returns the side in pixels of the square images that the denoiser was made for, if known."""
    scale = getattr(pipe, "vae_scale_factor", None)
    denoisers: dict[str, Any] = find_denoisers(pipe)
    sizes = [module.config.get("sample_size") for module in denoisers.values()]
    if not (isinstance(scale, int) and isinstance(sizes[0], int)):
        return None
    return sizes[0] * scale


def check_frames(pipe: Any, section: str, call: dict[str, Any]) -> None:
    """Refuses a number of frames that the VAE cannot decode, because of its stride in time.

    Args:
        section: config section of the arguments, for the message.

    Raises:
        ConfigError: names the nearest two numbers that work.
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
