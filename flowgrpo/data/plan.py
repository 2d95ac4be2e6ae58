"""Who samples what: everything that follows from a config, as pure functions of the epoch.

Groups, windows and seeds of an epoch do not depend on how the run got there, so a resumed run goes
on exactly as if it had never stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.seeds import integer, permutation, seed_for
from flowgrpo.data.prompts import Row


@dataclass(kw_only=True, frozen=True)
class Group:
    """One occurrence of a prompt in an epoch; the same line twice makes two groups."""

    epoch: int
    index: int
    """Within the epoch."""
    row: Row
    window: range
    """Steps that are stochastic and trained."""
    seeds: tuple[int, ...]
    """Of the initial noise, one an image; all the same with shared noise."""

    def noise_key(self, sample: int, step: int, stream: int) -> tuple[int | str, ...]:
        """Names the noise of one step; unlike `seeds`, never shared in the group."""
        return (self.epoch, self.index, sample, "step", step, stream)


@dataclass(kw_only=True, frozen=True)
class Plan:
    """The derived numbers of a run. `describe` prints them before anything heavy is loaded."""

    config: GRPOConfig
    rows: Sequence[Row]

    @property
    def micro_batches(self) -> list[range]:
        """Samples of a group that go through the denoiser together."""
        size, group = self.micro_batch_size, self.config.sampling.group_size
        return [range(start, min(start + size, group)) for start in range(0, group, size)]

    @property
    def micro_batch_size(self) -> int:
        sampling = self.config.sampling
        return min(sampling.micro_batch_size or sampling.group_size, sampling.group_size)

    @property
    def window_size(self) -> int:
        first, last = self.window_bounds
        return self.config.sampling.window.size or last - first + 1

    @property
    def transitions_per_group(self) -> int:
        """Trained steps of all samples of a group."""
        return self.config.sampling.group_size * self.window_size

    @property
    def window_bounds(self) -> tuple[int, int]:
        """First and last step that may be stochastic; the schedule's last step never is."""
        window = self.config.sampling.window
        last = self.config.sampling.num_inference_steps - 2
        return window.first, last if window.last is None else window.last

    @property
    def images_per_epoch(self) -> int:
        return self.config.sampling.group_size * self.config.sampling.groups_per_epoch

    @property
    def optimizer_steps(self) -> int:
        return self.config.train.epochs * self.config.train.updates_per_epoch

    def groups(self, epoch: int) -> list[Group]:
        """The epoch's groups. Rows are taken in shuffled passes over the whole prompt file."""
        count = self.config.sampling.groups_per_epoch
        return [self._group(epoch, index, epoch * count + index) for index in range(count)]

    def update_batches(self) -> list[range]:
        """Which groups each optimizer step of an epoch trains on."""
        train, count = self.config.train, self.config.sampling.groups_per_epoch
        per_pass = train.updates_per_epoch // train.inner_epochs
        size = count // per_pass
        return [range(i * size, (i + 1) * size) for i in range(per_pass)] * train.inner_epochs

    def describe(self) -> dict[str, str]:
        """Derived numbers by label, for people."""
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
        seed, sampling = self.config.seed, self.config.sampling
        cycle, place = divmod(position, len(self.rows))
        row = self.rows[permutation(len(self.rows), seed, "prompts", cycle)[place]]
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
