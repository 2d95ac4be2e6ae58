"""A run's life around its epochs: its folder, checkpoints, trackers, signals, and how it ends."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from flowgrpo.core.clock import Clock
from flowgrpo.core.config import frame_rate
from flowgrpo.core.config_changes import changes, check_resumable
from flowgrpo.core.config_file import config_as_json
from flowgrpo.core.errors import FlowgrpoError, Interrupted, ProcessLost, RunStopped
from flowgrpo.core.files import epoch_folders, epoch_of
from flowgrpo.distributed.processes import Processes
from flowgrpo.policy.weights import inference_weights
from flowgrpo.reporting.sheets import draw_rollouts
from flowgrpo.runs import checkpoint
from flowgrpo.runs.provenance import differences, record_start
from flowgrpo.runs.state import TrainerState
from flowgrpo.runs.trackers import Trackers
from flowgrpo.training.guards import findings
from flowgrpo.training.interrupts import InterruptRequest
from flowgrpo.training.learner import Learner
from flowgrpo.training.rollouts import RolloutGroup
from flowgrpo.training.setup import Setup


class Run:
    """State, folder and signals of one run. The main process writes."""

    def __init__(self, setup: Setup, learner: Learner, processes: Processes):
        self.setup, self.learner, self.processes = setup, learner, processes
        self.config, self.inputs, self.folder = setup.config, setup.inputs, setup.folder
        self.state = TrainerState()
        self.history: list[dict[str, Any]] = []
        """Lines of metrics.jsonl so far."""
        self.clock = Clock()
        self.request = InterruptRequest()
        self.trackers = Trackers(self.config, self.folder.path, main=False)
        self._saved = 0
        """Epoch of the newest checkpoint."""

    @contextmanager
    def session(self) -> Iterator[None]:
        """Context of a run: handles signals, and records why it ended early, in summary.json
        and for the other processes."""
        self.clock = Clock(self.state.seconds)
        self.processes.on_main(self.folder.lock)
        self.processes.start_watchdog(self._record_stop)
        try:
            with self.request.handling_signals(), self.folder.writing():
                yield
            self.processes.shut_down()
        except BaseException as error:
            watchdog = self.processes.watchdog
            if watchdog is not None:
                watchdog.disarm()  # this process ends by itself, whatever happens to the others
            expected = error if isinstance(error, FlowgrpoError) else None
            reason = expected.reason if expected else type(error).__name__
            self._record_stop(reason, str(error) or reason)
            if watchdog is not None and not (expected and expected.on_all_processes):
                watchdog.report_failure(reason, str(error))
            raise
        finally:
            self.trackers.close()
            self.folder.unlock()

    def begin(self) -> None:
        """Writes config and record of this start; drops what a resumed run will do again."""
        epoch = self.state.epoch
        if self.processes.is_main:
            for sentence in differences(self.folder.path) if epoch else []:
                self.processes.warn(sentence)
            self.folder.begin(self.config, self.inputs.fingerprint, epoch)
            record_start(
                self.folder.path,
                self.config,
                self.inputs.scored,
                epoch=epoch,
                processes=self.processes.world_size,
                objects=self.setup.unrecorded,
            )
            self.trackers = Trackers(self.config, self.folder.path, epoch=epoch)
        self.history = self.processes.broadcast(self.folder.metrics())
        is_complete = [line["epoch"] for line in self.history] == list(range(1, epoch + 1))
        if not is_complete:
            self.processes.warn(
                f"metrics.jsonl lacks some of epochs 1 to {epoch}; guards and curves use what is "
                "there."
            )

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Writes the metrics of the epoch that has just ended, with the run's counters.

        Raises:
            RunStopped: a guard that stops the run found something wrong in them.
        """
        state = self.state
        line = {
            "epoch": state.epoch,
            **metrics,
            **({"rollbacks": state.rollbacks} if state.rollbacks else {}),
            "seconds": self.clock.lap(),
            "images": state.images,
            **state.denoiser_calls,
        }
        self.history.append(line)
        if self.processes.is_main:
            self.folder.log(line)
            self.trackers.log(line, state.epoch)
        for finding in findings(self.history, self.config.guards):
            if finding.action == "stop":
                # Epoch N samples with the weights of checkpoint N - 1, so those are blamed.
                raise RunStopped(
                    finding.reason,
                    finding.message,
                    on_all_processes=True,
                    blamed_epoch=state.epoch - 1,
                )
            self.processes.warn(finding.message)

    def log_scores(self, scores: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Sends the mean scores of an evaluation, by prompt set and reward, to the trackers."""
        means = {
            name: {reward: float(values.mean()) for reward, values in some.items()}
            for name, some in scores.items()
        }
        self.trackers.log({"evaluation": means}, self.state.epoch)

    def save_if_due(self, drawn: Sequence[tuple[RolloutGroup, Tensor]]) -> None:
        """Saves every `checkpoint_every` epochs, and after the last one."""
        epoch, config = self.state.epoch, self.config
        if epoch % config.checkpoint_every == 0 or epoch == config.train.epochs:
            with self.clock("saving"):
                self.save(drawn)

    def save(self, drawn: Sequence[tuple[RolloutGroup, Tensor]] = ()) -> None:
        """Saves a checkpoint and, if `drawn` is given, a contact sheet of those groups with their
        total rewards (K,)."""
        config, policy, write = self.config, self.learner.policy, self.processes.is_main
        if drawn and write:
            self._draw(drawn)
        self.state.seconds = self.clock.total
        tensors = self.learner.state_dict()
        folder = self.folder.checkpoints
        with inference_weights(policy, self.learner.average):
            checkpoint.save(folder, policy, tensors, self.state, config, write=write)
        self._saved = self.state.epoch
        self.rotate()

    def rotate(self) -> None:
        """Removes checkpoints that are neither among the newest nor the best."""
        if self.processes.is_main:
            folder = self.folder.checkpoints
            saved = [epoch_of(path) for path in epoch_folders(folder)]
            scores = self.folder.headlines(self.inputs.scored[0].name, saved)
            best = checkpoint.best_epoch(scores, saved)
            checkpoint.rotate(folder, self.config.checkpoint_keep, best)

    def is_evaluated(self, epoch: int) -> bool:
        """Whether the epoch has a complete evaluation."""
        return self.processes.broadcast(self.folder.is_evaluated(epoch))

    def should_stop(self) -> bool:
        """Whether to interrupt the current phase; sharded processes decide together."""
        is_set = self.request.is_set
        return self.processes.any(is_set) if self.learner.policy.is_sharded else is_set

    def exit_if_interrupted(self) -> None:
        """If a signal reached any process: saves what is not saved yet, and exits.

        Raises:
            Interrupted: on all processes.
        """
        signal = max(self.processes.all_gather(self.request.signal))
        if not signal:
            return
        epoch = self.state.epoch
        if self._saved != epoch:
            self.save()
        self.processes.shut_down()
        done = f"epoch {epoch} is saved" if epoch else "no epoch is finished yet"
        raise Interrupted(signal, f"stopped by signal {signal}; {done}, continue with --resume.")

    def restore(self, before: int | None = None) -> bool:
        """Restores the newest complete checkpoint.

        Args:
            before: only one of an earlier epoch than this; that epoch's and later ones are
                quarantined.

        Returns:
            Whether there is one.

        Raises:
            ConfigError: it was made with settings that may not change.
        """
        folder, is_main = self.folder.checkpoints, self.processes.is_main
        found = checkpoint.newest(folder, before) if is_main else None
        found = self.processes.broadcast(found and [found[0].name, found[1]])
        if found is None:
            return False
        name, manifest = found
        then, now = manifest["config"], config_as_json(self.config)
        check_resumable(then, now)
        for key, how in changes(then, now).items():
            if is_main:
                print(f"{key} {how}, which a resumed run may change.", file=sys.stderr)
        tensors, self.state = checkpoint.load(folder / name, manifest)
        self.learner.load_state_dict(tensors)
        self.learner.scale_lr(self.config.guards.rollback_lr**self.state.rollbacks)
        self._saved = self.state.epoch
        return True

    def roll_back(self, stop: RunStopped) -> bool:
        """Restores the newest checkpoint from before the blamed epoch, with a lower learning rate.

        Returns:
            Whether there is one, and `guards.rollbacks` allows one more.
        """
        guards, done = self.config.guards, self.state.rollbacks
        if done >= guards.rollbacks or not self.restore(stop.blamed_epoch):
            return False
        self.learner.policy.pop_denoiser_calls()  # of the epoch that will be repeated
        self.state.rollbacks = done + 1
        factor = guards.rollback_lr ** (done + 1)
        self.learner.scale_lr(factor)
        self.history = [line for line in self.history if line["epoch"] <= self.state.epoch]
        self.clock.lap()
        if self.processes.is_main:
            self.folder.begin(self.config, self.inputs.fingerprint, self.state.epoch)
        self.processes.warn(
            f"{str(stop).rstrip('.')}; went back to epoch {self.state.epoch} with {factor:g} times "
            "the learning rate."
        )
        self.save()  # so that a resumed run counts this rollback
        return True

    def _draw(self, drawn: Sequence[tuple[RolloutGroup, Tensor]]) -> None:
        """Draws a contact sheet of the epoch's samples with their rewards."""
        path = self.folder.samples(self.state.epoch)
        groups = [(g.group.row.prompt, g.samples, total.tolist()) for g, total in drawn]
        draw_rollouts(path, groups, frame_rate(self.config, self.config.sampling.call))
        self.trackers.log_image("samples", path, self.state.epoch)

    def _record_stop(self, reason: str, message: str) -> None:
        """Writes why the run ended early."""
        # If it is the main process that is gone, the next one writes.
        writer = 1 if reason == ProcessLost.reason and message.startswith("process 0 ") else 0
        if self.processes.rank == writer:
            found = epoch_folders(self.folder.checkpoints)
            newest = found[-1].name if found else None
            self.folder.record_stop(reason, message, self.state.epoch, newest)
