"""The algorithm: sample groups, score them, turn scores into advantages, replay and update.

Read `GRPOTrainer._epoch`. It differs from the textbook in three ways: the policy is a stock
pipeline that is replayed instead of re-implemented (see `policy.tape`), a log-prob is the mean over
latent dimensions, and each process owns complete groups (see `distributed.processes`).
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline
from torch import Tensor
from tqdm import tqdm

from flowgrpo.algorithms.advantages import advantages, weighted_sum
from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.errors import RunStopped
from flowgrpo.data.plan import Group
from flowgrpo.data.prompts import PromptSource
from flowgrpo.distributed.processes import init_processes
from flowgrpo.evaluation.evaluate import Evaluator
from flowgrpo.evaluation.scores import load_scores
from flowgrpo.policy.weights import inference_weights, load_weights, reference
from flowgrpo.preflight.start import check_start
from flowgrpo.reporting.sheets import SHEET_ROWS
from flowgrpo.reporting.summary import summarize
from flowgrpo.runs import checkpoint
from flowgrpo.runs.state import TrainerState
from flowgrpo.training import exchange
from flowgrpo.training.learner import Learner
from flowgrpo.training.metrics import MetricSums, reward_metrics
from flowgrpo.training.rollouts import RolloutGroup, sample_groups
from flowgrpo.training.run import Run
from flowgrpo.training.setup import Arguments, open_policy, set_up


class GRPOTrainer:
    """Trains a pipeline's denoiser, or a LoRA on it, with GRPO.

    Args:
        model: a pipeline object, a folder, or a hub name; default: `args.model.path`.
        reward_funcs: a callable ``(images, prompts, **columns) -> list[float]``, a name as in a
            config, or a list of these; default: `args.rewards`.
        train_dataset: a list of prompts, a file, or a `datasets.Dataset` with a `prompt` column;
            default: `args.prompts.train`.
        eval_dataset: the same, held out; default: `args.prompts.test`.
        held_out_funcs: rewards for evaluation only; default: `args.held_out`.
        reward_weights: one weight per reward in their sum.
        args: all settings.
        resume: continue from the newest checkpoint of `args.output_dir`.

    Raises:
        ConfigError: a setting, prompt or reward that cannot work; before a model is loaded, if it
            can be known by then.
        ImportError: a package that a setting needs is not installed.
    """

    def __init__(
        self,
        model: DiffusionPipeline | str | Path | None = None,
        reward_funcs: Any = None,
        train_dataset: PromptSource | None = None,
        eval_dataset: PromptSource | None = None,
        held_out_funcs: Any = None,
        reward_weights: Sequence[float] | None = None,
        args: GRPOConfig | None = None,
        resume: bool = False,
    ):
        given = Arguments(
            model=model,
            reward_funcs=reward_funcs,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            held_out_funcs=held_out_funcs,
            reward_weights=reward_weights,
        )
        self.processes = init_processes()
        setup = set_up(args or GRPOConfig(), given, self.processes, resume=resume)
        self.config, self.inputs, self.folder = setup.config, setup.inputs, setup.folder
        self.rewards, self.plan = self.inputs.rewards, self.inputs.plan
        self.policy = open_policy(model, self.config, self.plan)
        self.learner = Learner(self.policy, self.config, self.processes)
        self.evaluator = Evaluator(
            policy=self.policy,
            rewards=self.inputs.scored,
            config=self.config,
            processes=self.processes,
        )
        self.run = Run(setup, self.learner, self.processes)
        if resume and not self.run.restore() and self.processes.is_main:
            print(
                f"{self.folder.checkpoints} holds no complete checkpoint; starting from scratch.",
                file=sys.stderr,
            )

    @property
    def state(self) -> TrainerState:
        """Progress of the run."""
        return self.run.state

    def train(self) -> dict[str, Any]:
        """Runs the remaining epochs of `train.epochs`; returns the summary, as in summary.json.

        SIGTERM and SIGINT save the end of the last epoch and exit; a second one exits at once.

        Raises:
            RunStopped: a guard found something wrong; summary.json has the reason.
            Interrupted: a signal arrived (a SystemExit with code 128 + its number).
        """
        num_epochs = self.config.train.epochs
        hidden = None if self.processes.is_main else True  # None: hidden if not in a terminal
        with self.run.session():
            self._begin()
            with tqdm(
                desc="epochs", total=num_epochs, initial=self.state.epoch, disable=hidden
            ) as bar:
                while self.state.epoch < num_epochs:
                    try:
                        self._epoch()
                    except RunStopped as stop:
                        if not self.run.roll_back(stop):
                            raise
                    bar.update(self.state.epoch - bar.n)
                    self.run.exit_if_interrupted()
                    with self.run.clock("evaluation"):
                        self._evaluate_if_due()
            return self._finish()

    def _epoch(self) -> None:
        """One epoch of GRPO: rollouts, rewards, advantages, updates; then its line of metrics."""
        plan, run = self.plan, self.run
        with run.clock("sampling"):
            own_groups, rewards, rollout_metrics = self._roll_out(plan.groups(self.state.epoch))
        run.exit_if_interrupted()

        reward_weights = {reward.name: reward.weight for reward in self.rewards}
        group_advantages = advantages(rewards, reward_weights, self.config.train.advantage)

        sums, grad_norms = MetricSums(), list[float]()
        self.learner.on_policy = True
        with run.clock("training"):
            for indices in plan.update_batches():
                replayed = self._groups_to_replay(indices, group_advantages)
                batch = [(own_groups[i].rollouts, group_advantages[i]) for i in replayed]
                num_transitions = len(indices) * plan.transitions_per_group
                # Up to the first optimizer step the weights are those of the last epoch's end, so
                # a signal can still be honoured without losing anything.
                should_stop = None if grad_norms else run.should_stop
                # Replays each group, and adds the gradients of the objective.
                self.learner.accumulate(batch, num_transitions, sums, should_stop)
                if not grad_norms:
                    run.exit_if_interrupted()
                grad_norms.append(self.learner.step(sums))

        self.state.epoch += 1
        self.state.images += plan.images_per_epoch
        totals = weighted_sum(rewards, reward_weights)
        tied_groups = sum(not a.any() for a in group_advantages) / len(group_advantages)
        run.log(
            {
                **reward_metrics(rewards, totals),
                "tied_groups": tied_groups,
                **rollout_metrics,
                **exchange.gather_training_metrics(sums, self.policy, self.state, self.processes),
                "grad_norm": sum(grad_norms) / len(grad_norms),
                "grad_norm_max": max(grad_norms),
                "weights_checksum": self.learner.checksum(),
            }
        )
        run.save_if_due([(own_groups[i], totals[i]) for i in sorted(own_groups)])

    def sample(self, groups: Sequence[Group]) -> list[RolloutGroup]:
        """Rolls out and scores groups with the current weights."""
        sampled = sample_groups(
            self.policy, self.plan, self.rewards, groups, self.run.clock, self.run.should_stop
        )
        for group in sampled[SHEET_ROWS:]:  # scored, and on no sheet
            group.drop_samples()
        return sampled

    def evaluate(self, epoch: int) -> bool:
        """Scores train and test prompts with the stock sampler; epoch 0 is the base model.

        Returns:
            Whether it was completed; a signal interrupts it.
        """
        rows = {"train_prompts": self.inputs.rows, "test_prompts": self.inputs.test_rows}
        weights = self.policy.start_weights if epoch == 0 else self.learner.average
        is_base = epoch == 0 and weights is None
        folder = self.folder.evaluation(epoch)
        with reference(self.policy) if is_base else inference_weights(self.policy, weights):
            is_complete = self.evaluator.evaluate(rows, folder, self.run.should_stop)
        if is_complete and self.processes.is_main:
            self.run.log_scores(load_scores(folder))
        return is_complete

    def _begin(self) -> None:
        """Comes before the first epoch: last checks, the run folder, the base's evaluation."""
        is_new = not self.run.is_evaluated(0)
        warnings = check_start(self.policy, self.inputs, self.config, check_rewards=is_new)
        for sentence in warnings:
            self.processes.warn(sentence)
        self.run.begin()
        if is_new:
            self.evaluate(0)
            self.run.exit_if_interrupted()
        if self.config.guards.rollbacks and not self.state.epoch:
            self.run.save()  # something to roll back to
        self._evaluate_if_due()

    def _roll_out(
        self, groups: Sequence[Group]
    ) -> tuple[dict[int, RolloutGroup], dict[str, list[Tensor]], dict[str, float]]:
        """Samples this process's groups, and exchanges rewards with the others.

        Returns:
            Own groups by index, the rewards of all groups in order, and metrics of the samples.

        Raises:
            RunStopped: on all processes, if samples or rewards of any are not finite.
        """
        problem, own = None, list[RolloutGroup]()
        try:
            own = self.sample(self.processes.shard(groups))
        except RunStopped as stop:
            problem = stop
            if self.policy.is_sharded:
                self.processes.any(True)  # the others wait in Run.should_stop, a collective
        messages = exchange.exchange_rollouts(
            own, problem, len(groups), self.state.epoch, self.processes
        )
        if not messages:
            return {}, {}, {}  # interrupted by a signal
        rewards = exchange.rewards_of(messages, [reward.name for reward in self.rewards])
        metrics = exchange.rollout_metrics(messages, self.plan.images_per_epoch)
        return {group.group.index: group for group in own}, rewards, metrics

    def _groups_to_replay(self, indices: range, group_advantages: Sequence[Tensor]) -> list[int]:
        """Indices of the groups that this process replays.

        Tied groups have advantages of 0, so they are left out unless the objective has a term for
        the reference: their loss has no gradient. They still count in its mean.
        """
        has_reference = self.config.objective.needs_reference
        has_gradient = [has_reference or bool(a.any()) for a in group_advantages]
        return exchange.groups_to_replay(
            indices, has_gradient, self.processes, is_sharded=self.policy.is_sharded
        )

    def _evaluate_if_due(self) -> None:
        every, epoch = self.config.evaluation.every, self.state.epoch
        if every and epoch and epoch % every == 0 and not self.run.is_evaluated(epoch):
            self.evaluate(epoch)
            self.run.exit_if_interrupted()
            self.run.rotate()

    def _finish(self) -> dict[str, Any]:
        """Evaluates and saves the result, and leaves it in the pipeline: the average, if any."""
        state, is_main = self.state, self.processes.is_main
        if not self.run.is_evaluated(state.epoch):
            with self.run.clock("evaluation"):
                self.evaluate(state.epoch)
            self.run.exit_if_interrupted()
        self.run.rotate()
        if self.learner.average is not None:
            load_weights(self.policy, self.learner.average)
        with inference_weights(self.policy):
            checkpoint.save_result(self.folder.lora, self.policy, self.config, write=is_main)
        summary = None
        if is_main:
            seconds = round(self.run.clock.total, 1)
            totals = {"seconds": seconds, "images": state.images, **state.denoiser_calls}
            summary = summarize(self.folder, self.inputs.scored[0].name, state.epoch, totals)
            picture = self.folder.path / "compare.png"
            self.run.trackers.log_image("compare", picture, state.epoch)
        return self.processes.broadcast(summary)
