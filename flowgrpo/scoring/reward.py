"""Rewards: find the functions that a config names, call them, and trust nothing they return.

A reward is a plain callable ``reward(images, prompts, **columns) -> list[float]``, or takes
``videos``, each a list of PIL frames. One of images scores a video frame by frame; the mean counts.
Columns of pictures and videos come opened; the column ``images`` is called ``input_images`` here.

Four attributes are read where a function has them: ``validate(prompt, **row)`` raises ValueError
for a data row that it cannot score, ``overlap = True`` lets it run in a thread while the next
images are sampled, ``columns`` names the parameters that are data columns, where the others are
settings, and ``models(**settings)`` gives the torch modules that a call with these settings uses:
with model.offload they are on their device only while it scores.
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
from flowgrpo.data.media import opened
from flowgrpo.data.prompts import Row
from flowgrpo.data.samples import Sample, frames_of, is_video

RewardFunction = Callable[..., Sequence[float]]


SAMPLE_PARAMETERS = ("images", "videos", "prompts")
"""Parameters of a reward that are no data columns."""


@dataclass(kw_only=True, frozen=True)
class Reward:
    """A named reward function with its weight in the total."""

    name: str
    function: RewardFunction
    weight: float = 1.0
    offload: bool = False
    """Its models wait on the CPU while it does not score."""

    @property
    def models(self) -> list[nn.Module]:
        """The torch modules that its calls use, as far as it tells."""
        find = reward_attribute(self.function, "models")
        bound = self.function.keywords if isinstance(self.function, functools.partial) else {}
        return [] if find is None else list(find(**bound))

    @property
    def overlaps(self) -> bool:
        return bool(reward_attribute(self.function, "overlap"))

    @property
    def takes_videos(self) -> bool:
        return "videos" in inspect.signature(self.function).parameters

    @property
    def takes_images(self) -> bool:
        return not self.takes_videos or "images" in inspect.signature(self.function).parameters

    def __call__(self, samples: Sequence[Sample], rows: Sequence[Row]) -> Tensor:
        """Scores of B images or videos, each for its own row: (B,) float64.

        Raises:
            RewardError: a wrong count, a value that is not a finite number, or pictures for a
                reward of videos.
        """
        videos = is_video(samples[0])
        if not (self.takes_images or videos):
            raise RewardError(
                f'reward "{self.name}" takes videos, but the pipeline makes pictures; use a reward '
                "f(images, prompts, **columns), or a pipeline of videos."
            )
        # Opened once a row, not once a sample: a group shares its row.
        distinct = {id(row): row for row in rows}
        columns = {key: reward_columns(opened(row.columns)) for key, row in distinct.items()}
        each = [columns[id(row)] for row in rows]
        if videos and not self.takes_videos:
            scores = [
                self._score("images", frames, [row] * len(frames), [own] * len(frames))
                for frames, row, own in zip(map(frames_of, samples), rows, each, strict=True)
            ]
            return torch.stack([of_frames.mean() for of_frames in scores])
        return self._score("videos" if videos else "images", samples, rows, each)

    def _score(
        self,
        kind: str,
        samples: Sequence[Sample],
        rows: Sequence[Row],
        each: Sequence[Mapping[str, Any]],
    ) -> Tensor:
        """One call of the function; `each` holds the opened columns of each sample."""
        prompts = [row.prompt for row in rows]
        names = sorted({name for own in each for name in own})
        columns = {name: [own.get(name) for own in each] for name in names}
        try:
            # Copies: a reward may draw on its pictures.
            copies = [
                [f.copy() for f in frames_of(s)] if is_video(s) else frames_of(s)[0].copy()
                for s in samples
            ]
            models = self.models if self.offload else []
            with on_device(models), torch.no_grad():
                values = self.function(**{kind: copies}, prompts=prompts, **columns)
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
        return _checked(self.name, kind, values, prompts)


def _checked(name: str, kind: str, values: Any, prompts: Sequence[str]) -> Tensor:
    if hasattr(values, "shape"):  # a tensor or an array, perhaps (B, 1)
        values = values.reshape(values.shape[0], -1).squeeze(-1).tolist()
    if not isinstance(values, (list, tuple)):
        raise RewardError(
            f"{name} returned a {type(values).__name__}, but must return a list of "
            f"{len(prompts)} numbers."
        )
    if len(values) != len(prompts):
        raise RewardError(
            f"{name} returned {len(values)} rewards for {len(prompts)} {kind} (prompt "
            f'"{prompts[0]}"); return one each.'
        )
    numbers = [_number(value) for value in values]
    odd = [i for i, number in enumerate(numbers) if not math.isfinite(number)]
    if odd:
        raise RewardNotFinite(
            f"{len(odd)} of {len(prompts)} rewards are not finite numbers ({name}, prompt "
            f'"{prompts[odd[0]]}"); '
            "a failed score must be an error of the reward."
        )
    return torch.tensor(numbers, dtype=torch.float64)


def _number(value: Any) -> float:
    """NaN for what is no number, or too large to square."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if abs(number) < 1e30 else math.nan


def reward_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns under the names that rewards see: `images` are the samples there."""
    return {"input_images" if k == "images" else k: value for k, value in columns.items()}


def reward_attribute(function: Any, name: str) -> Any:
    """An attribute of a function, also through functools.partial."""
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, name, None)
