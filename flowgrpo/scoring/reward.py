"""Calls reward functions and checks what they return.

A reward function is a plain callable ``reward(images, prompts, **columns) -> list[float]``, or
takes ``videos``, each a list of PIL frames. A reward of images scores a video frame by frame, and
the mean counts. Columns of images and videos are opened first, and the column ``images`` is passed
as ``input_images``. `rewards.contract` describes the options that a function may declare.
"""

import functools
import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo.core.devices import on_device
from flowgrpo.core.errors import RewardError, RewardNotFinite
from flowgrpo.data.media import open_media
from flowgrpo.data.row import Row
from flowgrpo.data.samples import Sample, frames_of, is_video
from rewards.contract import options_of

RewardFunction = Callable[..., Sequence[float]]


SAMPLE_PARAMETERS = ("images", "videos", "prompts")
"""Parameters of a reward function that take no data column."""

LARGEST = 1e30
"""Scores of this size or larger are not accepted: their squares must stay finite."""


@dataclass(kw_only=True, frozen=True)
class Reward:
    """A named reward function with its weight in the total."""

    name: str
    """Unique name, as in the metrics."""
    function: RewardFunction
    """The function, with its configured params bound by functools.partial."""
    weight: float = 1.0
    """Factor of its scores in the total."""
    offload: bool = False
    """Whether its models are on the CPU while it does not score."""

    @property
    def models(self) -> list[nn.Module]:
        """The torch modules that its calls use, if it declares them."""
        find = options_of(self.function).models
        bound = self.function.keywords if isinstance(self.function, functools.partial) else {}
        return [] if find is None else list(find(**bound))

    @property
    def overlaps(self) -> bool:
        """Whether it may score in a background thread while the next samples are generated."""
        return options_of(self.function).overlap

    @property
    def takes_videos(self) -> bool:
        """Whether the function has a parameter `videos`."""
        return "videos" in inspect.signature(self.function).parameters

    @property
    def takes_images(self) -> bool:
        """Whether the function can score images."""
        return not self.takes_videos or "images" in inspect.signature(self.function).parameters

    def __call__(self, samples: Sequence[Sample], rows: Sequence[Row]) -> Tensor:
        """Scores B images or videos, each with its own row; returns (B,) float64.

        Raises:
            RewardError: the function failed, returned a wrong count or type, or takes only videos
                and got images.
            RewardNotFinite: a score is not a finite number.
        """
        videos = is_video(samples[0])
        if not (self.takes_images or videos):
            raise RewardError(
                f'reward "{self.name}" takes videos, but the pipeline generates images; use a '
                "reward f(images, prompts, **columns), or a pipeline of videos."
            )
        # The samples of a group share one row, so media are opened once per row.
        distinct = {id(row): row for row in rows}
        opened_columns = {
            key: reward_columns(open_media(row.columns)) for key, row in distinct.items()
        }
        columns = [opened_columns[id(row)] for row in rows]
        if videos and not self.takes_videos:
            # One call per video bounds the number of images per call.
            scores = [
                self._score("images", frames, [row] * len(frames), [values] * len(frames))
                for frames, row, values in zip(map(frames_of, samples), rows, columns, strict=True)
            ]
            return torch.stack([frame_scores.mean() for frame_scores in scores])
        return self._score("videos" if videos else "images", samples, rows, columns)

    def _score(
        self,
        modality: str,
        samples: Sequence[Sample],
        rows: Sequence[Row],
        columns: Sequence[Mapping[str, Any]],
    ) -> Tensor:
        """Calls the function once.

        Args:
            modality: parameter that takes the samples, `images` or `videos`.
            samples: B images or videos.
            rows: B rows, for their prompts.
            columns: the opened columns of each row; one that a row lacks is None there.
        """
        prompts = [row.prompt for row in rows]
        names = sorted({name for values in columns for name in values})
        keywords = {name: [values.get(name) for values in columns] for name in names}
        try:
            # Copies, because a reward may draw on its images.
            copies = [
                [f.copy() for f in frames_of(s)] if is_video(s) else frames_of(s)[0].copy()
                for s in samples
            ]
            models = self.models if self.offload else []
            with on_device(models), torch.no_grad():
                values = self.function(**{modality: copies}, prompts=prompts, **keywords)
            if isinstance(values, Iterator):
                values = list(values)
        except (ImportError, RewardError):
            raise
        except (Exception, SystemExit) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise RewardError(
                f'{self.name} failed on prompt "{prompts[0]}" ({type(error).__name__}: {error}, '
                f"{frame.filename} line {frame.lineno}); correct the function."
            ) from error
        return _checked(self.name, modality, values, prompts)


def _checked(name: str, modality: str, values: Any, prompts: Sequence[str]) -> Tensor:
    """Returns what a reward returned for B prompts as scores (B,), float64.

    Raises:
        RewardError: it is not a sequence of B values.
        RewardNotFinite: a value is not a finite number.
    """
    if hasattr(values, "shape"):  # a tensor or an array, perhaps (B, 1)
        values = values.reshape(values.shape[0], -1).squeeze(-1).tolist()
    if not isinstance(values, (list, tuple)):
        raise RewardError(
            f"{name} returned a {type(values).__name__}, but must return a list of "
            f"{len(prompts)} numbers."
        )
    if len(values) != len(prompts):
        raise RewardError(
            f"{name} returned {len(values)} rewards for {len(prompts)} {modality} (prompt "
            f'"{prompts[0]}"); return one per prompt.'
        )
    numbers = [_number(value) for value in values]
    invalid = [i for i, number in enumerate(numbers) if not math.isfinite(number)]
    if invalid:
        raise RewardNotFinite(
            f"{len(invalid)} of {len(prompts)} rewards are not finite numbers ({name}, prompt "
            f'"{prompts[invalid[0]]}"); raise an error in the reward if a sample cannot be scored.'
        )
    return torch.tensor(numbers, dtype=torch.float64)


def _number(value: Any) -> float:
    """Returns the value as a float, or NaN if it is not a number or is too large to square."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if abs(number) < LARGEST else math.nan


def reward_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row's columns by keyword of a reward: `images` is passed as `input_images`."""
    return {"input_images" if k == "images" else k: value for k, value in columns.items()}
