"""How a result is used without this package: lines of plain diffusers."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowgrpo.core.config import GRPOConfig, frame_rate
from flowgrpo.core.sampling_config import SAMPLER_ARGUMENTS
from flowgrpo.data.media import is_mask, is_media, is_video_file
from flowgrpo.data.prompts import Row
from flowgrpo.pipelines.loading import absent_parts
from flowgrpo.pipelines.lora import loading_lines, saved_denoisers


def inference_snippet(config: GRPOConfig, pipeline: Any, lora: Path, row: Row | str) -> str:
    """A few lines of plain diffusers that use the result for a row, or for a prompt alone.

    Args:
        pipeline: the pipeline's class.
        lora: the folder of that name in the run folder.
    """
    path, model = config.model.path, config.model
    if path is None:
        return ""
    needed = set(absent_parts(path)) - set(pipeline._optional_components)
    absent = "".join(f", {name}=None" for name in sorted(needed))
    dtype = "" if model.dtype == "float32" else f", dtype=torch.{model.dtype}"
    whole = {name: repr(str(lora / name)) for name in saved_denoisers(lora)}
    lines = [
        f"pipe = {pipeline.__name__}.from_pretrained({path!r}{dtype}{absent})",
        *_scheduler_lines(model.scheduler, model.scheduler_kwargs),
        *(f"pipe.{n} = type(pipe.{n}).from_pretrained({place})" for n, place in whole.items()),
        *loading_lines(pipeline, lora),
    ]
    call = f"pipe({_arguments(config, pipeline, row)})"
    if any(lora.parent.glob("eval/epoch-*/*/*.mp4")):
        lines += [
            f"frames = {call}.frames[0]",
            f"export_to_video(frames, 'video.mp4', fps={frame_rate(config):g})",
        ]
    else:
        lines.append(f"image = {call}.images[0]")
    code = "\n".join(lines)
    used = [f"import {name}" for name in ("peft", "torch") if f"{name}." in code]
    used.append(
        f"from diffusers import {', '.join(n for n in (pipeline.__name__, model.scheduler) if n)}"
    )
    helpers = [name for name in ("export_to_video", "load_image", "load_video") if name in code]
    used += [f"from diffusers.utils import {', '.join(helpers)}"] if helpers else []
    return "\n".join([*used, code])


def _scheduler_lines(name: str | None, changes: Mapping[str, Any]) -> list[str]:
    if not (name or changes):
        return []
    arguments = "".join(f", {key}={value!r}" for key, value in changes.items())
    cls = name or "pipe.scheduler"
    return [f"pipe.scheduler = {cls}.from_config(pipe.scheduler.config{arguments})"]


def _arguments(config: GRPOConfig, pipeline: Any, row: Row | str) -> str:
    """The arguments of the pipeline's call: the row's, and those of the evaluation."""
    row = Row(prompt=row, source="") if isinstance(row, str) else row
    parameters = [*inspect.signature(pipeline.__call__).parameters][1:]
    prompt = [repr(row.prompt) if parameters[0] == "prompt" else f"prompt={row.prompt!r}"]
    given = {
        name: code_that_opens(name, value) if is_media(name) else repr(value)
        for name, value in row.columns.items()
        if name in parameters and name not in SAMPLER_ARGUMENTS and value is not None
    }
    of_call = {name: repr(value) for name, value in config.evaluation_call.items()}
    prompt = prompt if "prompt" in parameters else []
    return ", ".join([*prompt, *(f"{name}={code}" for name, code in {**of_call, **given}.items())])


def code_that_opens(name: str, value: Any) -> str:
    """Python that opens a media value as `opened` does; what has no path is called `NAME.png`."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(code_that_opens(name, item) for item in value)}]"
    path = value if isinstance(value, str) else f"{name}.png"
    if is_video_file(name, Path(path)):
        return f"load_video({path!r})"
    return f"load_image({path!r})" + (".convert('L')" if is_mask(name) else "")
