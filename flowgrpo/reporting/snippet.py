"""Code that uses the result of a run with plain diffusers, without this package."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowgrpo.core.config import GRPOConfig, frame_rate
from flowgrpo.core.sampling_config import SAMPLER_ARGUMENTS
from flowgrpo.data.columns import is_mask, is_media
from flowgrpo.data.media import is_video_file
from flowgrpo.data.row import Row
from flowgrpo.pipelines.loading import absent_parts
from flowgrpo.pipelines.lora_files import loading_lines, saved_denoisers


def inference_snippet(config: GRPOConfig, pipeline: Any, lora: Path, row: Row | str) -> str:
    """Returns a few lines of plain diffusers that use the result for a row, or a prompt alone.

    Args:
        pipeline: the pipeline's class.
        lora: the folder `lora` of the run.
    """
    if config.model.path is None:
        return ""
    call = f"pipe({_arguments(config, pipeline, row)})"
    if any(lora.parent.glob("eval/epoch-*/*/*.mp4")):
        use = [
            f"frames = {call}.frames[0]",
            f"export_to_video(frames, 'video.mp4', fps={frame_rate(config):g})",
        ]
    else:
        use = [f"image = {call}.images[0]"]
    code = "\n".join([*_pipeline_lines(config, pipeline, lora), *use])
    classes = [name for name in (pipeline.__name__, config.model.scheduler) if name]
    imports = [f"import {name}" for name in ("peft", "torch") if f"{name}." in code]
    imports.append(f"from diffusers import {', '.join(classes)}")
    helpers = [name for name in ("export_to_video", "load_image", "load_video") if name in code]
    if helpers:
        imports.append(f"from diffusers.utils import {', '.join(helpers)}")
    return "\n".join([*imports, code])


def _pipeline_lines(config: GRPOConfig, pipeline: Any, lora: Path) -> list[str]:
    """Lines that make `pipe` with the trained weights."""
    model, path = config.model, str(config.model.path)
    missing = sorted(set(absent_parts(path)) - set(pipeline._optional_components))
    absent = "".join(f", {name}=None" for name in missing)
    dtype = "" if model.dtype == "float32" else f", dtype=torch.{model.dtype}"
    denoisers = [
        f"pipe.{name} = type(pipe.{name}).from_pretrained({str(lora / name)!r})"
        for name in saved_denoisers(lora)
    ]
    return [
        f"pipe = {pipeline.__name__}.from_pretrained({path!r}{dtype}{absent})",
        *_scheduler_lines(model.scheduler, model.scheduler_kwargs),
        *denoisers,
        *loading_lines(pipeline, lora),
    ]


def _scheduler_lines(name: str | None, changes: Mapping[str, Any]) -> list[str]:
    """A line that replaces the scheduler, if the config names a class or settings of it."""
    if not (name or changes):
        return []
    arguments = "".join(f", {key}={value!r}" for key, value in changes.items())
    cls = name or "pipe.scheduler"
    return [f"pipe.scheduler = {cls}.from_config(pipe.scheduler.config{arguments})"]


def _arguments(config: GRPOConfig, pipeline: Any, row: Row | str) -> str:
    """Arguments of the pipeline's call; those of the row take precedence over the evaluation's."""
    row = Row(prompt=row, source="") if isinstance(row, str) else row
    parameters = [*inspect.signature(pipeline.__call__).parameters][1:]
    # Some pipelines take another argument first, such as an image.
    prompt = [repr(row.prompt) if parameters[0] == "prompt" else f"prompt={row.prompt!r}"]
    prompt = prompt if "prompt" in parameters else []
    from_row = {
        name: _media_code(name, value) if is_media(name) else repr(value)
        for name, value in row.columns.items()
        if name in parameters and name not in SAMPLER_ARGUMENTS and value is not None
    }
    from_config = {name: repr(value) for name, value in config.evaluation_call.items()}
    arguments = {**from_config, **from_row}
    return ", ".join([*prompt, *(f"{name}={code}" for name, code in arguments.items())])


def _media_code(name: str, value: Any) -> str:
    """Code that opens a media value as rewards get it; one without a path is called `NAME.png`."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_media_code(name, item) for item in value)}]"
    path = value if isinstance(value, str) else f"{name}.png"
    if is_video_file(name, Path(path)):
        return f"load_video({path!r})"
    return f"load_image({path!r})" + (".convert('L')" if is_mask(name) else "")
