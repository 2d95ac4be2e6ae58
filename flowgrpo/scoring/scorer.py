"""Scores micro-batches while the next ones are sampled."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from flowgrpo.data.row import Row
from flowgrpo.data.samples import Sample
from flowgrpo.scoring.reward import Reward


class Scorer:
    """Scores micro-batches; rewards that may overlap run in one background thread, in order."""

    def __init__(self, rewards: Sequence[Reward]):
        self.rewards = rewards
        # One thread: a reward need not be thread-safe, and rewards may share models.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rewards")

    def submit(self, samples: Sequence[Sample], rows: Sequence[Row]) -> dict[str, Future[Tensor]]:
        """Returns futures of scores (B,) by reward name; only rewards that overlap are pending."""
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
