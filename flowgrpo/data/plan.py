"""The groups of each epoch, and other numbers that follow from a config.

Groups, windows and seeds are pure functions of the epoch, so a resumed run continues exactly as if
it had never stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.seeds import integer, permutation, seed_for
from flowgrpo.data.row import Row


@dataclass(kw_only=True, frozen=True)
class Group:
    """One occurrence of a prompt in an epoch; the same line twice makes two groups."""

    epoch: int
    """Index of the epoch, from 0."""
    index: int
    """Index of the group within the epoch, over all processes."""
    row: Row
    """The prompt and its columns."""
    window: range
    """Indices of the steps that are stochastic and trained."""
    seeds: tuple[int, ...]
    """Seeds of the initial noise, one per image; all equal with shared noise."""

    def noise_key(self, sample: int, step: int, stream: int) -> tuple[int | str, ...]:
        """Key of the noise of one step of one image, which unlike `seeds` is never shared.

        Args:
            sample: index of the image within the group.
            step: index of the step in the schedule.
            stream: index of the latents, for pipelines that denoise several at once.
        """
        return (self.epoch, self.index, sample, "step", step, stream)


@dataclass(kw_only=True, frozen=True)
class Plan:
    """The derived numbers of a run, known before any model is loaded."""

    config: GRPOConfig
    rows: Sequence[Row]
    """Training prompts."""

    @property
    def micro_batches(self) -> list[range]:
        """Indices, within a group, of the images that go through the denoiser together."""
        size, group = self.micro_batch_size, self.config.sampling.group_size
        return [range(start, min(start + size, group)) for start in range(0, group, size)]

    @property
    def micro_batch_size(self) -> int:
        """Number of images per denoiser call; the last micro-batch of a group may be smaller."""
        sampling = self.config.sampling
        return min(sampling.micro_batch_size or sampling.group_size, sampling.group_size)

    @property
    def window_size(self) -> int:
        """Number of stochastic, trained steps."""
        first, last = self.window_bounds
        return self.config.sampling.window.size or last - first + 1

    @property
    def transitions_per_group(self) -> int:
        """Number of trained steps of all images of a group."""
        return self.config.sampling.group_size * self.window_size

    @property
    def window_bounds(self) -> tuple[int, int]:
        """Indices of the first and last step that may be stochastic; the last of all never is."""
        window = self.config.sampling.window
        last = self.config.sampling.num_inference_steps - 2
        return window.first, last if window.last is None else window.last

    @property
    def images_per_epoch(self) -> int:
        """Number of images that all processes sample in an epoch."""
        return self.config.sampling.group_size * self.config.sampling.groups_per_epoch

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps of the run."""
        return self.config.train.epochs * self.config.train.updates_per_epoch

    def groups(self, epoch: int) -> list[Group]:
        """The groups of an epoch. Every row is used once before any is used again."""
        count = self.config.sampling.groups_per_epoch
        return [self._group(epoch, index, epoch * count + index) for index in range(count)]

    def update_batches(self) -> list[range]:
        """Indices of the groups that each optimizer step of an epoch trains on."""
        train, count = self.config.train, self.config.sampling.groups_per_epoch
        num_updates = train.updates_per_epoch // train.inner_epochs
        size = count // num_updates
        return [range(i * size, (i + 1) * size) for i in range(num_updates)] * train.inner_epochs

    def describe(self) -> dict[str, str]:
        """Derived numbers as text, by label."""
        sampling, train = self.config.sampling, self.config.train
        groups, group_size = sampling.groups_per_epoch, sampling.group_size
        calls = groups * len(self.micro_batches)
        first, last = self.window_bounds
        sizes = " + ".join(str(len(batch)) for batch in self.micro_batches)
        passes = train.epochs * groups / len(self.rows)
        return {
            "images per epoch": f"{self.images_per_epoch} ({groups} prompts x {group_size})",
            "micro-batches per group": f"{len(self.micro_batches)} ({sizes} images)",
            "trained steps": f"{self.window_size} of {sampling.num_inference_steps}, "
            f"within {first} to {last}",
            "rollout steps per epoch": f"{calls * sampling.num_inference_steps}",
            "replayed steps per epoch": f"{calls * self.window_size * train.inner_epochs}",
            "images per optimizer step": f"{len(self.update_batches()[0]) * group_size}",
            "optimizer steps": f"{self.optimizer_steps} "
            f"({train.epochs} epochs x {train.updates_per_epoch})",
            "passes over the prompts": f"{passes:.1f} ({len(self.rows)} prompts)",
        }

    def _group(self, epoch: int, index: int, position: int) -> Group:
        """Makes one group; `position` counts the groups of all epochs before it."""
        seed, sampling = self.config.seed, self.config.sampling
        cycle, offset = divmod(position, len(self.rows))
        row = self.rows[permutation(len(self.rows), seed, "prompts", cycle)[offset]]
        first, last = self.window_bounds
        start = integer(first, last - self.window_size + 1, seed, epoch, index, "window")
        samples = [0 if sampling.shared_noise else sample for sample in range(sampling.group_size)]
        return Group(
            epoch=epoch,
            index=index,
            row=row,
            window=range(start, start + self.window_size),
            seeds=tuple(seed_for(seed, epoch, index, sample, "latents") for sample in samples),
        )
