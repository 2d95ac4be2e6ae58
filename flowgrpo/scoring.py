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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from flowgrpo.config import ConfigError
from flowgrpo.guards import Stopped
from flowgrpo.media import Sample, frames_of, is_video, opened
from flowgrpo.placement import at_work
from flowgrpo.prompts import Row

RewardFunction = Callable[..., Sequence[float]]

OWN_PARAMETERS = ("images", "videos", "prompts")
"""Parameters of a reward that are no data columns."""


class RewardError(RuntimeError):
    """A reward returned something that is not one finite number an image."""

    reason = "reward_failed"


class RewardNotFinite(RewardError, Stopped):
    """A reward returned NaN, infinity, or no number at all."""

    def __init__(self, message: str):
        Stopped.__init__(self, "rewards_not_finite", message)


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
        find = _attribute(self.function, "models")
        bound = self.function.keywords if isinstance(self.function, functools.partial) else {}
        return [] if find is None else list(find(**bound))

    @property
    def overlaps(self) -> bool:
        return bool(_attribute(self.function, "overlap"))

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
        columns = {key: _as_seen(opened(row.columns)) for key, row in distinct.items()}
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
            with at_work(models), torch.no_grad():
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


def validate_rows(rewards: Iterable[Reward], rows: Iterable[Row]) -> None:
    """Lets each reward refuse rows that it cannot score, before any model is loaded.

    Raises:
        ConfigError: names the file, the line and the reason.
    """
    for reward in rewards:
        validate = _attribute(reward.function, "validate")
        required = _required_columns(reward.function)
        for row in rows:
            missing = [n for n in required if _as_seen(row.columns).get(n) is None]
            if missing:
                raise ConfigError(
                    f'{row.place} has no column "{missing[0]}", but reward "{reward.name}" '
                    "needs it; add it."
                )
            _check_columns(reward, row)
            if validate is None:
                continue
            try:
                validate(row.prompt, **_as_seen(opened(row.columns)))
            except ValueError as error:
                raise ConfigError(f"{row.place}: {error}") from None


class Scorer:
    """Scores micro-batches; rewards that overlap run in one background thread, in order."""

    def __init__(self, rewards: Sequence[Reward]):
        self.rewards = rewards
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rewards")

    def submit(self, samples: Sequence[Sample], rows: Sequence[Row]) -> dict[str, Future[Tensor]]:
        """Futures of (B,) scores by reward name."""
        return {reward.name: self._start(reward, samples, rows) for reward in self.rewards}

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _start(
        self, reward: Reward, samples: Sequence[Sample], rows: Sequence[Row]
    ) -> Future[Tensor]:
        if reward.overlaps:
            return self._thread.submit(reward, samples, rows)
        done: Future[Tensor] = Future()
        done.set_result(reward(samples, rows))
        return done


def refuse_constant(
    reward: Reward, row: Row, call: Mapping[str, Any], *, videos: bool | None = None
) -> None:
    """Stops before training where a reward cannot tell black, white and noise apart.

    The pictures and clips have the size and number of frames that `call` asks for. A reward of text
    rightly gives 0 to all three, so equal zeros pass.

    Args:
        videos: whether the pipeline makes videos; None where that is not known.

    Raises:
        RewardError: the three scores are one number other than 0, or the reward takes videos and
            there are none.
    """
    size = (int(call.get("width") or 512), int(call.get("height") or 512))
    # A reward of images scores the frames of a video one by one, so pictures tell enough.
    clips = reward.takes_videos and (not reward.takes_images or videos) and videos is not False
    count = int(call.get("num_frames") or 8) if clips else 1
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (count, size[1], size[0], 3), generator=generator)
    plain = [[Image.new("RGB", size, colour)] * count for colour in ("black", "white")]
    three = [*plain, [Image.fromarray(frame) for frame in noise.to(torch.uint8).numpy()]]
    samples: list[Sample] = [*three] if clips else [frames[0] for frames in three]
    scores = reward(samples, [row] * 3)
    if bool((scores == scores[0]).all()) and scores[0] != 0:
        kind = "video" if clips else "image"
        raise RewardError(
            f"{reward.name} is {scores[0]:g} for a black, a white and a noise {kind}, but must "
            f"depend on the {kind}; check the function."
        )


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


def _check_columns(reward: Reward, row: Row) -> None:
    """The function takes samples, prompts and every column, and no column stands in for a param."""
    function = reward.function
    parameters = inspect.signature(function).parameters
    bound = function.keywords if isinstance(function, functools.partial) else {}
    declared = _attribute(function, "columns")
    params = {*bound, *(set() if declared is None else set(parameters) - {*declared})}
    columns = _as_seen(row.columns)
    for name in columns:
        if name in params or name in OWN_PARAMETERS:
            raise ConfigError(
                f'{row.place} has a column "{name}", but reward "{reward.name}" has a param of '
                "that name; rename the column."
            )
    kind = "images" if reward.takes_images else "videos"
    try:
        inspect.signature(function).bind(**{kind: []}, prompts=[], **columns)
    except TypeError as error:
        raise ConfigError(
            f'reward "{reward.name}" cannot be called for {row.place} ({error}); '
            "define it as f(images, prompts, **columns) or f(videos, prompts, **columns)."
        ) from None


def _as_seen(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns under the names that rewards see: `images` are the samples there."""
    return {"input_images" if k == "images" else k: value for k, value in columns.items()}


def _required_columns(function: RewardFunction) -> list[str]:
    """Keyword parameters without a default, but for those that are no columns."""
    parameters = inspect.signature(function).parameters.values()
    return [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        and p.name not in OWN_PARAMETERS
    ]


def _attribute(function: Any, name: str) -> Any:
    """An attribute of a function, also through functools.partial."""
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, name, None)
