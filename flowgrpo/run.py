"""A run's life around its epochs: its folder, checkpoints, trackers, signals, and how it ends."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from flowgrpo import checkpoint
from flowgrpo.checkpoint import State
from flowgrpo.config import GRPOConfig
from flowgrpo.config_file import changes, plain, refuse_changes
from flowgrpo.evaluate import frame_rate
from flowgrpo.guards import Stopped, findings
from flowgrpo.inputs import Inputs
from flowgrpo.interrupts import Interrupted, Request
from flowgrpo.learner import Learner
from flowgrpo.processes import Processes
from flowgrpo.provenance import differences, record_start
from flowgrpo.report import Clock, RunFolder, epoch_folders, epoch_of
from flowgrpo.sampling import Sampled, samples_for_a_sheet
from flowgrpo.trackers import Trackers
from flowgrpo.watch import LOST


class Run:
    """What has been done, where it is kept, and whether to go on. The first process writes.

    Args:
        objects: arguments from Python that no config holds (`provenance.objects_among`).
    """

    def __init__(
        self,
        config: GRPOConfig,
        inputs: Inputs,
        folder: RunFolder,
        learner: Learner,
        processes: Processes,
        objects: Sequence[str],
    ):
        self.config, self.inputs, self.folder = config, inputs, folder
        self.learner, self.processes, self.objects = learner, processes, objects
        self.state = State()
        self.history: list[dict[str, Any]] = []
        """Lines of metrics.jsonl so far."""
        self.clock = Clock()
        self.request = Request()
        self.trackers = Trackers(config, folder.path, main=False)
        self._saved = 0
        """Epoch of the newest checkpoint."""

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Around all that a run does: signals are heard, and whatever ends it early is noted in
        summary.json and told to the other processes."""
        self.clock = Clock(self.state.seconds)
        self.processes.first_does(self.folder.lock)
        self.processes.look_out(self._note)
        try:
            with self.request.listening(), self.folder.writing():
                yield
            self.processes.leave()
        except BaseException as error:
            watch = self.processes.watch
            if watch is not None:
                watch.ending()  # this process ends by itself, whatever the others say
            reason = getattr(error, "reason", type(error).__name__)
            self._note(reason, str(error) or reason)
            if watch is not None and not getattr(error, "together", False):
                watch.tell(reason, str(error))
            raise
        finally:
            self.trackers.close()
            self.folder.unlock()

    def begin(self) -> None:
        """Writes what the run is, or drops what a resumed one does again."""
        epoch = self.state.epoch
        if self.processes.first:
            for sentence in differences(self.folder.path) if epoch else []:
                print(f"warning: {sentence}", file=sys.stderr)
            self.folder.begin(self.config, self.inputs.fingerprint, epoch)
            record_start(
                self.folder.path,
                self.config,
                self.inputs.scored,
                epoch=epoch,
                processes=self.processes.count,
                objects=self.objects,
            )
            self.trackers = Trackers(self.config, self.folder.path, epoch=epoch)
        self.history = self.processes.agree(self.folder.metrics())
        whole = [line["epoch"] for line in self.history] == list(range(1, epoch + 1))
        if not whole and self.processes.first:
            print(
                f"warning: metrics.jsonl does not hold epochs 1 to {epoch}; guards and curves know "
                "only what is there.",
                file=sys.stderr,
            )

    def log(self, line: dict[str, Any]) -> None:
        """Keeps the line of an epoch.

        Raises:
            Stopped: a guard finds something wrong in it.
        """
        self.history.append(line)
        if self.processes.first:
            self.folder.log(line)
            self.trackers.log(line, line["epoch"])
        for finding in findings(self.history, self.config.guards):
            if finding.action == "stop":
                # What a line measures comes from the weights that sampled, or moved from there.
                before = line["epoch"] - 1
                raise Stopped(finding.reason, finding.message, together=True, blamed=before)
            if self.processes.first:
                print(f"warning: {finding.message}", file=sys.stderr)

    def log_scores(self, scores: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Tells trackers of an evaluation's scores by set and reward."""
        means = {
            name: {reward: float(values.mean()) for reward, values in some.items()}
            for name, some in scores.items()
        }
        self.trackers.log({"evaluation": means}, self.state.epoch)

    def save(self, drawn: Sequence[tuple[Sampled, Tensor]] = ()) -> None:
        """A checkpoint of now, with a sheet of the samples that `drawn` has with their totals."""
        config, epoch = self.config, self.state.epoch
        if drawn and self.processes.first:
            rate = frame_rate(config, config.sampling.call)
            path = self.folder.save_samples(epoch, samples_for_a_sheet(drawn), rate)
            self.trackers.log_picture("samples", path, epoch)
        self.state.seconds = self.clock.total
        checkpoint.save(self.folder.checkpoints, self.learner, self.state, config, self.processes)
        self._saved = epoch
        self.rotate()

    def rotate(self) -> None:
        """Removes checkpoints that are neither among the newest nor the best."""
        if self.processes.first:
            folder = self.folder.checkpoints
            saved = [epoch_of(path) for path in epoch_folders(folder)]
            scores = self.folder.headlines(self.inputs.scored[0].name, saved)
            best = checkpoint.best_epoch(scores, saved)
            checkpoint.rotate(folder, self.config.checkpoint_keep, best)

    def is_evaluated(self, epoch: int) -> bool:
        return self.processes.agree(self.folder.is_evaluated(epoch))

    def stopping(self) -> bool:
        """Whether to break off; a sharded run does so on all processes at once."""
        made = self.request.made
        return self.processes.any(made) if self.learner.policy.is_sharded else made

    def leave_if_asked(self) -> None:
        """Where a signal has reached any process: saves what is not saved yet, and leaves.

        Raises:
            Interrupted: on all processes.
        """
        signal = max(self.processes.gather(self.request.signal))
        if not signal:
            return
        epoch = self.state.epoch
        if self._saved != epoch:
            self.save()
        self.processes.leave()
        done = f"epoch {epoch} is saved" if epoch else "no epoch was finished yet"
        raise Interrupted(signal, f"stopped by signal {signal}; {done}, go on with --resume.")

    def go_back(self, before: int | None = None) -> bool:
        """To the newest whole checkpoint; False where there is none.

        Args:
            before: only to one of an earlier epoch; the later ones are put aside.

        Raises:
            ConfigError: it was made with settings that may not change.
        """
        folder, first = self.folder.checkpoints, self.processes.first
        found = checkpoint.newest(folder, before) if first else None
        found = self.processes.agree(found and [found[0].name, found[1]])
        if found is None:
            return False
        name, manifest = found
        then, now = manifest["config"], plain(self.config)
        refuse_changes(then, now)
        for key, how in changes(then, now).items():
            if self.processes.first:
                print(f"{key} {how}, which a resumed run may change.", file=sys.stderr)
        self.state = checkpoint.load(self.folder.checkpoints / name, manifest, self.learner)
        self.learner.slow_down(self.config.guards.rollback_lr**self.state.rollbacks)
        self._saved = self.state.epoch
        return True

    def roll_back(self, stop: Stopped) -> bool:
        """Goes on from the newest checkpoint that is not to blame, with a lower learning rate, if
        guards.rollbacks allows one more."""
        guards, done = self.config.guards, self.state.rollbacks
        if done >= guards.rollbacks or not self.go_back(stop.blamed):
            return False
        self.learner.policy.count_passes()  # those of the epoch that is done again
        self.state.rollbacks = done + 1
        factor = guards.rollback_lr ** (done + 1)
        self.learner.slow_down(factor)
        self.history = [line for line in self.history if line["epoch"] <= self.state.epoch]
        self.clock.lap()
        if self.processes.first:
            self.folder.begin(self.config, self.inputs.fingerprint, self.state.epoch)
            print(
                f"warning: {stop} Went back to epoch {self.state.epoch} with "
                f"{factor:g} times the learning rate.",
                file=sys.stderr,
            )
        self.save()  # a resume shall remember it
        return True

    def _note(self, reason: str, message: str) -> None:
        """Writes why the run ended early; where the first process is what is gone, another does."""
        writer = 1 if reason == LOST and message.startswith("process 0 ") else 0
        if self.processes.rank == writer:
            found = epoch_folders(self.folder.checkpoints)
            newest = found[-1].name if found else None
            self.folder.note_stop(reason, message, self.state.epoch, newest)
