"""Stock diffusers pipelines from outside: open one, find its parts, check a call's arguments."""

import difflib
import functools
import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.models.modeling_utils import ModelMixin
from PIL import Image
from torch import nn

from flowgrpo.config import OWN_ARGUMENTS, ConfigError, ModelConfig
from flowgrpo.media import Sample, opened
from flowgrpo.prompts import Row
from flowgrpo.randomness import seed_for
from flowgrpo.tape import swapped

COUNTS = ("num_images_per_prompt", "num_videos_per_prompt")
"""Arguments by which pipelines take the number of samples of one prompt."""

DENOISER_NAMES = ("transformer", "unet")
"""How the parts of a diffusers pipeline that denoise are called: these, or transformer_2, say."""


def open_pipeline(config: ModelConfig) -> Any:
    """Opens the pipeline of a config, with the scheduler and the VAE as the config wants them.

    Raises:
        ConfigError: there is no path, or no such scheduler.
        ValueError: the folder is missing or does not hold a diffusers pipeline.
    """
    if config.path is None:
        raise ConfigError("model.path is missing; name a pipeline folder or a hub name.")
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe = load_pipeline(config.path, getattr(torch, config.dtype), device)
    if config.scheduler or config.scheduler_kwargs:
        pipe.scheduler = _scheduler(pipe, config)
    vae = getattr(pipe, "vae", None)
    if vae is not None and vae.config.get("force_upcast"):
        vae.to(torch.float32)
    for flag, method in (
        (config.vae_slicing, "enable_slicing"),
        (config.vae_tiling, "enable_tiling"),
    ):
        if flag:
            if not hasattr(vae, method):
                raise ConfigError(
                    f"model.vae_{method.removeprefix('enable_')} is true, but the pipeline's VAE "
                    f"({type(vae).__name__}) has no {method}; leave it out."
                )
            getattr(vae, method)()
    return pipe


def load_pipeline(path: str, dtype: torch.dtype, device: str | torch.device) -> Any:
    """Opens a pipeline from a folder or a hub name; parts that it was saved without stay away.

    Raises:
        ValueError: the folder is missing or does not hold a diffusers pipeline.
    """
    path = str(Path(path).expanduser()) if path.startswith("~") else path
    folder = Path(path)
    # A hub name is owner/name; anything else, and what lies in a folder that exists, is a path.
    is_path = path.startswith((".", "/")) or len(folder.parts) != 2 or folder.parent.is_dir()
    if is_path and not (folder / DiffusionPipeline.config_name).is_file():
        state = "that folder is no pipeline" if folder.exists() else "there is no such folder"
        raise ValueError(
            f'model.path is "{path}", but {state}; give a folder written by a pipeline\'s '
            "save_pretrained, or a hub name."
        )
    try:
        absent = dict.fromkeys(absent_parts(path))
        pipe: Any = DiffusionPipeline.from_pretrained(path, dtype=dtype, **absent)
    except Exception as error:  # the loaders of three libraries raise what they like
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise ValueError(
            f'model.path is "{path}", but it cannot be opened ({reason}); '
            "give a whole pipeline folder, or check the hub name and your access."
        ) from error
    return pipe.to(device)


def absent_parts(path: str) -> list[str]:
    """Parts that a pipeline folder was saved without; `from_pretrained` wants to be told."""
    index = Path(path) / DiffusionPipeline.config_name
    if not index.is_file():
        return []
    return [name for name, value in json.loads(index.read_text()).items() if value == [None, None]]


def modules_of(pipe: Any) -> dict[str, nn.Module]:
    """Every module a pipeline holds, optional ones and those of its sub-pipelines too."""
    found: dict[str, nn.Module] = {}
    for name, part in vars(pipe).items():
        if isinstance(part, nn.Module):
            found[name] = part
        elif isinstance(part, DiffusionPipeline):
            found |= {f"{name}.{inner}": module for inner, module in modules_of(part).items()}
    return found


def find_models(pipe: Any) -> dict[str, nn.Module]:
    """Diffusers models that may predict in the loop: all but those that only encode and decode."""
    return {
        name: module
        for name, module in modules_of(pipe).items()
        if isinstance(module, ModelMixin) and not hasattr(module, "decode")
    }


def find_denoisers(pipe: Any, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The models that can be trained: those with diffusers' names for a denoiser, and where the
    pipeline has a LoRA loader, known to it.

    Args:
        names: only these.

    Raises:
        ValueError: there is none, or not one of such a name.
    """
    models = find_models(pipe)
    loadable = [name for name in getattr(pipe, "_lora_loadable_modules", []) if name in models]
    by_name = [name for name in models if name.startswith(DENOISER_NAMES)]
    found = {name: models[name] for name in by_name if name in loadable or not loadable}
    if not found:
        raise ValueError(
            f"{type(pipe).__name__} has no denoiser of diffusers' model classes; use a pipeline "
            "with a transformer or a unet."
        )
    for name in names or []:
        if name not in found:
            raise ConfigError(
                f"train.modules names {name}, but the denoisers of {type(pipe).__name__} are "
                f"{', '.join(found)}."
            )
    return {name: module for name, module in found.items() if names is None or name in names}


def generate(pipe: Any, row: Row, seeds: Sequence[int], call: dict[str, Any]) -> list[Sample]:
    """One call of the stock pipeline: B samples of one row, one per seed of the initial noise.

    Columns of the row that are arguments of the pipeline's call (image, negative_prompt, ...) go
    there; pictures come as PIL, videos as lists of PIL frames.
    """
    style, call = find_style(pipe, row, call), {"output_type": "pil", **call}
    parts = [[seed] for seed in seeds] if style.single else [seeds]
    return [sample for part in parts for sample in _called(pipe, row, part, call, style)[0]]


def find_style(pipe: Any, row: Row, call: dict[str, Any]) -> "Style":
    """How this pipeline takes several samples of one prompt, each with a seed of its own.

    Tried once for each set of arguments, up to the first step of the scheduler: many pipelines have
    an argument for it, but not every one of these heeds it, or repeats its pictures too.

    Raises:
        Exception: no way works; whatever the pipeline raises for the first.
    """
    key = tuple(sorted({*call, *_columns(pipe, row)}))
    known = _styles.setdefault(pipe, {})
    if key not in known:
        errors = []
        for style in STYLES:
            try:
                _reach_first_step(pipe, row, call, style)
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


class _FirstStep(BaseException):
    """The loop has begun. Not an Exception: no `except Exception` of a pipeline may swallow it."""


def _reach_first_step(pipe: Any, row: Row, call: dict[str, Any], style: Style) -> None:
    """Raises where the pipeline cannot be called so for two samples, or for one at least."""
    count = 1 if style.single else 2

    def step(model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> None:
        if len(sample) != count or len(model_output) != count:
            raise ValueError(
                f"{type(pipe).__name__} makes {len(sample)} samples where {count} are asked for."
            )
        raise _FirstStep

    step = functools.wraps(type(pipe.scheduler).step)(step)
    try:
        with torch.no_grad(), swapped(pipe.scheduler, "step", step):
            _called(pipe, row, range(count), call, style)
    except _FirstStep:
        pass


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
    with quiet(pipe), _vae_in_its_dtype(pipe), _seeded(pipe, seeds):
        return pipe(generator=generators[0] if style.single else generators, **arguments)


@contextmanager
def _seeded(pipe: Any, seeds: Sequence[int]) -> Iterator[None]:
    """Within the block what a pipeline draws without a generator follows from the seeds, too, as
    the VAE samples that some make of a picture; the caller's random state is left alone."""
    devices = [pipe.device] if pipe.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed_for("pipeline", *seeds))
        yield


def _columns(pipe: Any, row: Row) -> dict[str, Any]:
    """The row's columns that are arguments of the pipeline's call."""
    known = inspect.signature(type(pipe).__call__).parameters
    return {k: v for k, v in row.columns.items() if k in known and k not in OWN_ARGUMENTS}


def _is_media(value: Any) -> bool:
    """A picture, or a list of pictures."""
    return isinstance(value, Image.Image) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], Image.Image)
    )


def _scheduler(pipe: Any, config: ModelConfig) -> Any:
    """The pipeline's scheduler, or one of the class that the config names, by its configuration."""
    cls: Any = type(pipe.scheduler)
    if config.scheduler:
        cls = getattr(diffusers, config.scheduler, None)
        if not hasattr(cls, "set_timesteps"):
            known = [name for name in dir(diffusers) if name.endswith("Scheduler")]
            close = difflib.get_close_matches(config.scheduler, known, n=1)
            hint = f'did you mean "{close[0]}"?' if close else "use DDIMScheduler, say."
            raise ConfigError(f"model.scheduler is {config.scheduler}, but is unknown; {hint}")
    return cls.from_config(pipe.scheduler.config, **config.scheduler_kwargs)


@contextmanager
def _vae_in_its_dtype(pipe: Any) -> Iterator[None]:
    """Within the block a float32 VAE beside half-precision parts takes what they give."""
    vae = getattr(pipe, "vae", None)
    if vae is None:
        yield
        return

    def cast(method: Any) -> Any:
        @functools.wraps(method)
        def casting(values: Any, *args: Any, **kwargs: Any) -> Any:
            return method(values.to(vae.dtype), *args, **kwargs)

        return casting

    with swapped(vae, "decode", cast(vae.decode)), swapped(vae, "encode", cast(vae.encode)):
        yield


def check_call(pipe: Any, section: str, call: dict[str, Any]) -> None:
    """Refuses arguments that the pipeline's call does not take.

    Raises:
        ConfigError: names the argument and the nearest one.
    """
    known = [name for name in inspect.signature(type(pipe).__call__).parameters if name != "self"]
    for name in call.keys() - set(known):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f' did you mean "{close[0]}"?' if close else f" It takes {', '.join(known)}."
        raise ConfigError(f"{section}.{name} is no argument of {type(pipe).__name__};{hint}")


@contextmanager
def quiet(pipe: Any) -> Iterator[None]:
    """No progress bar of the pipeline's own."""
    with swapped(pipe, "_progress_bar_config", {"disable": True}):
        yield
