"""The algorithm: sample groups, score them, turn scores into advantages, replay and update.

Read `GRPOTrainer._epoch`. Differences from the textbook: the policy is a stock pipeline that is
played back instead of re-implemented (see `tape`), a log-prob is the mean over latent dimensions,
and each process owns whole groups (see `processes`).
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from tqdm import tqdm

from flowgrpo.algorithms.advantages import advantages, weighted_sum
from flowgrpo.core.clock import Clock
from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.config_file import plain
from flowgrpo.core.errors import RunStopped
from flowgrpo.core.seeds import seed_for
from flowgrpo.data.plan import Group
from flowgrpo.data.prompts import PromptSource
from flowgrpo.distributed import processes
from flowgrpo.evaluation.evaluate import evaluate
from flowgrpo.evaluation.scores import load_scores
from flowgrpo.pipelines.call_checks import call_warnings, check_call, check_frames
from flowgrpo.pipelines.compile import compile_blocks
from flowgrpo.pipelines.loading import device_of, open_pipeline
from flowgrpo.policy.policy import Policy
from flowgrpo.policy.weights import inference_weights, load_weights, reference
from flowgrpo.preflight.inputs import read_inputs, with_sources
from flowgrpo.preflight.replay_check import check_replay
from flowgrpo.preflight.sharding import check_sharded_experts, check_sharding
from flowgrpo.reporting.summary import summarise
from flowgrpo.runs import checkpoint
from flowgrpo.runs import folder as report
from flowgrpo.runs.provenance import unrecorded_arguments
from flowgrpo.runs.state import TrainerState
from flowgrpo.scoring.audit import require_varying_scores
from flowgrpo.training.learner import Learner
from flowgrpo.training.metrics import MetricSums, reward_metrics
from flowgrpo.training.optimizer import optimizer_class
from flowgrpo.training.rollouts import RolloutGroup, sample_groups
from flowgrpo.training.run import Run


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
        reward_weights: of the rewards in their sum, one each.
        args: all settings.
        resume: go on from the newest checkpoint of `args.output_dir`.

    Raises:
        ConfigError: a setting, prompt or reward that cannot work; before any model is loaded.
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
        args = args or GRPOConfig()
        self.processes = processes.init_processes()
        self.config = with_sources(args, model, train_dataset, eval_dataset)
        self.inputs = read_inputs(
            self.config,
            reward_funcs=reward_funcs,
            reward_weights=reward_weights,
            held_out_funcs=held_out_funcs,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
        )
        self.rewards, self.plan = self.inputs.rewards, self.inputs.plan
        self.processes.assert_same("the input", self.inputs.fingerprint)
        self.processes.assert_same("the config", plain(self.config))
        self.processes.assert_same("--resume", resume)
        for warning in check_sharding(self.config, self.inputs, self.processes.world_size):
            if self.processes.is_main:
                print(f"warning: {warning}", file=sys.stderr)
        self.folder = report.RunFolder(Path(self.config.output_dir).expanduser())
        self.processes.on_main(
            lambda: self.folder.check_output_folder(resume, self.config, self.inputs.fingerprint)
        )
        objects = unrecorded_arguments(
            self.config,
            model=model,
            reward_funcs=reward_funcs,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            held_out_funcs=held_out_funcs,
            reward_weights=reward_weights,
        )
        optimizer_class(self.config.train)  # refused before a model is loaded
        device_of(self.config.model)
        self.policy = self._open_policy(model)
        self.learner = Learner(self.policy, self.config, self.processes)
        self.run = Run(self.config, self.inputs, self.folder, self.learner, self.processes, objects)
        if resume and not self.run.restore() and self.processes.is_main:
            print(
                f"{self.folder.checkpoints} holds no whole checkpoint; starting anew.",
                file=sys.stderr,
            )

    @property
    def state(self) -> TrainerState:
        """What the run has done so far."""
        return self.run.state

    def train(self) -> dict[str, Any]:
        """Runs what is left of `train.epochs`; returns the summary, as in summary.json.

        SIGTERM and SIGINT save the last epoch's end and leave; a second one leaves at once.

        Raises:
            Stopped: a guard found something wrong; summary.json says what.
            Interrupted: a signal asked to stop (a SystemExit with 128 + its number).
        """
        with self.run.session():
            clock = self.run.clock
            self._begin()
            bar = tqdm(
                total=self.config.train.epochs,
                initial=self.state.epoch,
                desc="epochs",
                disable=None if self.processes.is_main else True,
            )
            with bar:
                while self.state.epoch < self.config.train.epochs:
                    try:
                        self._epoch(clock)
                    except RunStopped as stop:
                        if not self.run.roll_back(stop):
                            raise
                    bar.update(self.state.epoch - bar.n)
                    self.run.exit_if_interrupted()
                    with clock("evaluation"):
                        self._evaluate_if_due()
            return self._finish(clock)

    def _begin(self) -> None:
        """What comes before the first epoch: proofs, the run folder, the base's evaluation."""
        config, row = self.config, self.inputs.rows[0]
        proved = check_replay(self.policy, row, config)
        if self.processes.is_main:
            path = config.model.path
            for sentence in call_warnings(self.policy.pipe, path, proved.call, proved.samples[0]):
                print(f"warning: {sentence}", file=sys.stderr)
        is_new = not self.run.is_evaluated(0)
        if is_new:
            for reward in self.inputs.scored:
                require_varying_scores(
                    reward, row, config.sampling.call, videos=self.policy.makes_videos
                )
        self.run.begin()
        if is_new:
            self.evaluate(0)
            self.run.exit_if_interrupted()
        if config.guards.rollbacks and not self.state.epoch:
            self.run.save()  # something to roll back to
        self._evaluate_if_due()

    def _epoch(self, clock: Clock) -> None:
        """One epoch: samples, advantages, updates; then its line and its checkpoint."""
        state, plan, train = self.state, self.plan, self.config.train
        weights = {reward.name: reward.weight for reward in self.rewards}
        with clock("sampling"):
            own, rewards, seen = self._sampled(plan.groups(state.epoch), clock)
        self.run.exit_if_interrupted()
        group_advantages = advantages(rewards, weights, train.advantage)

        tally, norms = MetricSums(), list[float]()
        self.learner.on_policy = True
        with clock("training"):
            for share in plan.update_batches():
                replayed = self._to_replay(share, group_advantages)
                chosen = [(own[i], group_advantages[i]) for i in replayed]
                pairs = len(share) * self.config.sampling.group_size * plan.window_size
                # Until the first step the weights are those of the last epoch's end.
                self.learner.accumulate(
                    chosen, pairs, tally, None if norms else self.run.should_stop
                )
                if not norms:
                    self.run.exit_if_interrupted()
                norms.append(self.learner.step(tally))

        state.epoch += 1
        state.images += plan.images_per_epoch
        totals = weighted_sum(rewards, weights)
        self.run.log(
            {
                "epoch": state.epoch,
                **reward_metrics(rewards, totals),
                "tied_groups": sum(not a.any() for a in group_advantages) / len(group_advantages),
                **seen,
                **self._counted(tally),
                "grad_norm": sum(norms) / len(norms),
                "grad_norm_max": max(norms),
                "weights_checksum": self.learner.checksum(),
                **({"rollbacks": state.rollbacks} if state.rollbacks else {}),
                "seconds": clock.lap(),
                "images": state.images,
                **state.denoiser_calls,
            }
        )
        if state.epoch % self.config.checkpoint_every == 0 or state.epoch == train.epochs:
            with clock("saving"):
                self.run.save([(own[i], totals[i]) for i in sorted(own)])

    def sample(self, groups: Sequence[Group], clock: Clock | None = None) -> list[RolloutGroup]:
        """Rolls out and scores groups with the weights of now."""
        return sample_groups(
            self.policy, self.plan, self.rewards, groups, clock, self.run.should_stop
        )

    def evaluate(self, epoch: int) -> bool:
        """Scores train and test prompts with the stock sampler; epoch 0 is the base model.

        Returns:
            Whether it was finished; a signal breaks it off.
        """
        rows = {"train_prompts": self.inputs.rows, "test_prompts": self.inputs.test_rows}
        weights = self.policy.start if epoch == 0 else self.learner.average
        is_base = epoch == 0 and weights is None
        with reference(self.policy) if is_base else inference_weights(self.policy, weights):
            whole = evaluate(
                self.policy,
                self.inputs.scored,
                rows,
                self.config,
                self.folder.evaluation(epoch),
                self.processes,
                self.run.should_stop,
            )
        if whole and self.processes.is_main:
            self.run.log_scores(load_scores(self.folder.evaluation(epoch)))
        return whole

    def _open_policy(self, model: Any) -> Policy:
        config = self.config
        spread = config.train.shard
        given = isinstance(model, DiffusionPipeline)
        pipe = model if given else open_pipeline(config.model, spread=spread)
        check_call(pipe, "sampling.call", config.sampling.call)
        check_call(pipe, "evaluation.call", config.evaluation.call or {})
        check_frames(pipe, "sampling.call", config.sampling.call)
        check_frames(pipe, "evaluation.call", config.evaluation_call)
        place = None if given else device_of(config.model).type
        policy = Policy(pipe, config.train, seed_for(config.seed, "lora"), place)
        check_sharded_experts(policy, self.plan)
        if config.model.compile:
            compile_blocks(policy.denoisers)
        return policy

    def _sampled(
        self, groups: Sequence[Group], clock: Clock
    ) -> tuple[dict[int, RolloutGroup], dict[str, list[Tensor]], dict[str, float]]:
        """Samples this process's groups, and shares the rewards.

        Returns:
            Own groups by index, the rewards of all groups in order, and what was seen of samples.

        Raises:
            Stopped: some process has samples or rewards that are not finite.
        """
        problem, own = None, []
        try:
            own = self.sample(self.processes.shard(groups), clock)
        except RunStopped as stop:
            problem = [stop.reason, str(stop)]
            if self.policy.is_sharded:
                self.processes.any(True)  # the others ask whether to stop; they leave off, too
        said = self.processes.all_gather(
            {"problem": problem, "groups": [s.to_message() for s in own]}
        )
        for one in said:
            if one["problem"]:
                raise RunStopped(
                    *one["problem"], on_all_processes=True, blamed_epoch=self.state.epoch
                )
        shares = [one["groups"] for one in said]
        if sum(map(len, shares)) < len(groups):
            return {}, {}, {}  # broken off by a signal
        told = self.processes.unshard(shares, len(groups))
        rewards = {
            r.name: [torch.tensor(group["rewards"][r.name], dtype=torch.float64) for group in told]
            for r in self.rewards
        }
        flat = sum(group["flat"] for group in told) / self.plan.images_per_epoch
        velocity_rms = sum(group["velocity_rms"] for group in told) / len(told)
        seen = {**({"flat_images": flat} if flat else {}), "velocity_rms": velocity_rms}
        return {s.group.index: s for s in own}, rewards, seen

    def _to_replay(self, share: range, group_advantages: Sequence[Tensor]) -> list[int]:
        """This process's groups of an update that are replayed.

        Tied groups count in the mean but are not replayed, unless the KL term wants them: their
        advantages are 0. A sharded denoiser runs on all processes or on none.
        """
        rank, count = self.processes.rank, self.processes.world_size

        def teaches(index: int) -> bool:
            return bool(group_advantages[index].any()) or self.config.train.kl_weight > 0

        if self.policy.is_sharded:
            turns = [share[start : start + count] for start in range(0, len(share), count)]
            return [turn[rank] for turn in turns if any(map(teaches, turn))]
        return [index for index in share if index % count == rank and teaches(index)]

    def _counted(self, tally: MetricSums) -> dict[str, float]:
        """Means over the pairs of all processes; adds their denoiser calls to the state."""
        sums, count = tally.totals()
        said = self.processes.all_gather(
            {"sums": sums, "count": count, "passes": self.policy.pop_denoiser_calls()}
        )
        for name in self.state.denoiser_calls:
            self.state.denoiser_calls[name] += sum(one["passes"][name] for one in said)
        total = sum(one["count"] for one in said)
        names = dict.fromkeys(name for one in said for name in one["sums"])
        return {name: sum(one["sums"].get(name, 0.0) for one in said) / total for name in names}

    def _evaluate_if_due(self) -> None:
        every, epoch = self.config.evaluation.every, self.state.epoch
        if every and epoch and epoch % every == 0 and not self.run.is_evaluated(epoch):
            self.evaluate(epoch)
            self.run.exit_if_interrupted()
            self.run.rotate()

    def _finish(self, clock: Clock) -> dict[str, Any]:
        """Evaluates and saves the result, and leaves it in the pipeline: the average, if any."""
        state, first = self.state, self.processes.is_main
        if not self.run.is_evaluated(state.epoch):
            with clock("evaluation"):
                self.evaluate(state.epoch)
            self.run.exit_if_interrupted()
        self.run.rotate()
        if self.learner.average is not None:
            load_weights(self.policy, self.learner.average)
        with inference_weights(self.policy):
            checkpoint.save_result(self.folder.lora, self.policy, self.config, write=first)
        summary = None
        if first:
            totals = {
                "seconds": round(clock.total, 1),
                "images": state.images,
                **state.denoiser_calls,
            }
            headline = self.inputs.scored[0].name
            summary = summarise(self.folder, headline, state.epoch, totals)
            picture = self.folder.path / "compare.png"
            self.run.trackers.log_picture("compare", picture, state.epoch)
        return self.processes.broadcast(summary)
