"""The algorithm: sample groups, score them, turn scores into advantages, replay and update.

Read `GRPOTrainer.train`. Differences from the textbook: the policy is a stock pipeline that is
played back instead of re-implemented (see `tape`), a log-prob is the mean over latent dimensions,
gradients are exact sums over (image, step) divided by the update's count, whatever the micro-batch.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from tqdm import tqdm

from flowgrpo import checkpoint, report
from flowgrpo.advantages import advantages, weighted_sum
from flowgrpo.calls import check_call, check_frames, surprises
from flowgrpo.check import check_replay
from flowgrpo.checkpoint import State
from flowgrpo.config import GRPOConfig
from flowgrpo.drawings import SHEET_ROWS
from flowgrpo.evaluate import evaluate, frame_rate
from flowgrpo.inputs import read_inputs, with_sources
from flowgrpo.kernels import Gaussian, kl_divergence, log_prob
from flowgrpo.objectives import clipped
from flowgrpo.pipelines import open_pipeline
from flowgrpo.plan import Group
from flowgrpo.policy import Policy, Rollout, as_used, load_weights, reference
from flowgrpo.prompts import PromptSource
from flowgrpo.randomness import normal, seed_for
from flowgrpo.scoring import Scorer, refuse_constant
from flowgrpo.tape import ReplayError, Step


@dataclass(kw_only=True)
class Sampled:
    """One group after sampling: rollouts in order, and rewards (K,) float64 by name."""

    group: Group
    rollouts: list[Rollout]
    rewards: dict[str, Tensor]


@dataclass(kw_only=True)
class Tally:
    """Sums over the (image, step) pairs of an epoch, as tensors: nothing waits for a device."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    count: int = 0

    def add(self, **values: Tensor) -> None:
        """Adds (B,) values of one step."""
        for name, value in values.items():
            total = value.detach().double().sum()
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        self.count += len(next(iter(values.values())))

    def means(self) -> dict[str, float]:
        return {name: float(total) / self.count for name, total in self.sums.items()}


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
        self.folder = report.RunFolder(Path(self.config.output_dir).expanduser())
        self.folder.refuse_other_run(resume, self.config, self.inputs.fingerprint)
        self.policy = self._open_policy(model)
        train = self.config.train
        self.optimiser = torch.optim.AdamW(
            list(self.policy.parameters.values()),
            lr=train.lr,
            betas=train.betas,
            weight_decay=train.weight_decay,
        )
        self.updated = False
        """Whether this process has changed the weights yet."""
        self.state = State()
        if train.ema:
            self.state.average = {n: p.detach().clone() for n, p in self.policy.parameters.items()}
        if resume:
            resumed = checkpoint.load_newest(
                self.folder.checkpoints, self.policy, self.optimiser, self.config
            )
            self.state = resumed or self.state

    def train(self) -> dict[str, Any]:
        """Runs what is left of `train.epochs`; returns the summary, as in summary.json."""
        config, state = self.config, self.state
        clock = report.Clock(state.seconds)
        proved = check_replay(self.policy, self.inputs.rows[0], config)
        for sentence in surprises(
            self.policy.pipe, config.model.path, proved.call, proved.samples[0]
        ):
            print(f"warning: {sentence}", file=sys.stderr)
        if not self.folder.is_evaluated(0):
            row, videos = self.inputs.rows[0], self.policy.makes_videos
            for reward in self.inputs.scored:
                refuse_constant(reward, row, config.sampling.call, videos=videos)
        self.folder.begin(config, self.inputs.fingerprint, state.epoch)
        if not self.folder.is_evaluated(0):
            self._evaluate(0)

        weights_of_rewards = {reward.name: reward.weight for reward in self.rewards}
        for epoch in tqdm(range(state.epoch, config.train.epochs), "epochs", disable=None):
            with clock("sampling"):
                samples = self._sample(self.plan.groups(epoch), clock)
            rewards = {r.name: [s.rewards[r.name] for s in samples] for r in self.rewards}
            group_advantages = advantages(rewards, weights_of_rewards, config.train.advantage)

            tally, norms = Tally(), []
            with clock("training"):
                for share in self.plan.shares():
                    self._accumulate([(samples[i], group_advantages[i]) for i in share], tally)
                    norms.append(self._step())

            state.epoch += 1
            state.images += self.plan.images_per_epoch
            if config.evaluation.every and state.epoch % config.evaluation.every == 0:
                with clock("evaluation"):
                    self._evaluate(state.epoch)
            totals = weighted_sum(rewards, weights_of_rewards)
            tied = sum(not values.any() for values in group_advantages) / len(group_advantages)
            self.folder.log(
                {
                    "epoch": state.epoch,
                    **report.reward_metrics(rewards, totals),
                    "tied_groups": tied,
                    **tally.means(),
                    "grad_norm": sum(norms) / len(norms),
                    "grad_norm_max": max(norms),
                    "seconds": clock.lap(),
                    "images": state.images,
                    **self.policy.passes,
                }
            )
            if state.epoch % config.checkpoint_every == 0 or state.epoch == config.train.epochs:
                with clock("saving"):
                    state.seconds = clock.total
                    sheet = samples_for_a_sheet(samples, totals)
                    self.folder.save_samples(
                        state.epoch, sheet, frame_rate(config, config.sampling.call)
                    )
                    checkpoint.save(
                        self.folder.checkpoints, self.policy, self.optimiser, state, config
                    )
        return self._finish(clock)

    def _open_policy(self, model: Any) -> Policy:
        config = self.config
        pipe = model if isinstance(model, DiffusionPipeline) else open_pipeline(config.model)
        check_call(pipe, "sampling.call", config.sampling.call)
        check_call(pipe, "evaluation.call", config.evaluation.call or {})
        check_frames(pipe, "sampling.call", config.sampling.call)
        check_frames(pipe, "evaluation.call", config.evaluation_call)
        return Policy(pipe, config.train, seed_for(config.seed, "lora"))

    def _sample(self, groups: Sequence[Group], clock: report.Clock | None = None) -> list[Sampled]:
        """Rolls out every group; scoring overlaps with sampling where a reward allows it."""
        clock = clock or report.Clock()
        pending = []
        with Scorer(self.rewards) as scorer:
            for group in groups:
                rollouts, futures = [], []
                for samples in self.plan.micro_batches:
                    rollouts.append(self._rollout(group, samples))
                    with clock("scoring"):
                        rows = [group.row] * len(samples)
                        futures.append(scorer.submit(rollouts[-1].samples, rows))
                pending.append((group, rollouts, futures))
            with clock("scoring"):
                sampled = [
                    Sampled(group=group, rollouts=rollouts, rewards=self._joined(futures))
                    for group, rollouts, futures in pending
                ]
        for rollout in (r for s in sampled[SHEET_ROWS:] for r in s.rollouts):
            rollout.samples.clear()  # scored, and not drawn; the frames of videos fill memory
        return sampled

    def _joined(self, futures: Sequence[dict[str, Future[Tensor]]]) -> dict[str, Tensor]:
        """Scores of a group's micro-batches in order, (K,) by reward."""
        names = [reward.name for reward in self.rewards]
        return {name: torch.cat([future[name].result() for future in futures]) for name in names}

    def _rollout(self, group: Group, samples: range) -> Rollout:
        sampling = self.config.sampling

        def noise(step: int, stream: int, shape: torch.Size) -> Tensor:
            keys = [group.noise_key(sample, step, stream) for sample in samples]
            return torch.stack([normal(shape[1:], self.config.seed, *key) for key in keys])

        return self.policy.rollout(
            group.row,
            [group.seeds[sample] for sample in samples],
            self.config.sampling_call,
            kind=sampling.kind,
            noise_level=sampling.noise_level,
            window=group.window,
            noise=noise,
        )

    def _accumulate(self, chosen: Sequence[tuple[Sampled, Tensor]], tally: Tally) -> None:
        """Adds the gradients of one update: the mean over all its images and trained steps.

        Tied groups count in the mean but are not replayed, unless the KL term wants them: their
        advantages are 0.
        """
        total = len(chosen) * self.config.sampling.group_size * self.plan.window_size
        for sampled, group_advantages in chosen:
            if not group_advantages.any() and not self.config.train.kl_weight:
                continue
            parts = group_advantages.split([len(batch) for batch in self.plan.micro_batches])
            for rollout, part in zip(sampled.rollouts, parts, strict=True):
                self._replay(rollout, part.float().to(self.policy.device), total, tally)

    def _replay(self, rollout: Rollout, advantages: Tensor, total: int, tally: Tally) -> None:
        """Backward of one micro-batch, step by step."""
        train = self.config.train
        reference_means: dict[tuple[int, int], Tensor] = {}
        if train.kl_weight:
            with reference(self.policy):
                self.policy.replay(
                    rollout,
                    lambda step, now: reference_means.update({step.key: now.mean}),
                    gradients=False,
                )

        def on_step(step: Step, now: Gaussian) -> None:
            assert step.mean is not None
            old_log_prob = log_prob(step.next_latents, step.mean, step.std)
            new_log_prob = log_prob(step.next_latents, now.mean, now.std)
            loss = clipped(new_log_prob, old_log_prob, advantages, train.clip_range)
            values, deviation = loss.values, (loss.ratio - 1).abs()
            if not self.updated:
                self._check_ratio(step, float(deviation.max()))
            logged = {
                "ratio_deviation": deviation,
                "clip_fraction_low": loss.clipped_low,
                "clip_fraction_high": loss.clipped_high,
            }
            if train.kl_weight:
                kl = kl_divergence(now.mean, reference_means[step.key], now.std)
                values = values + train.kl_weight * kl
                logged["kl"] = kl
            (values.sum() / total).backward()
            tally.add(**logged)

        self.policy.replay(rollout, on_step)

    def _check_ratio(self, step: Step, deviation: float) -> None:
        """Until this process updates them, the weights are those that sampled: every ratio is 1."""
        allowed = self.config.train.replay_tolerance
        if not deviation <= allowed:
            raise ReplayError(
                f"{type(self.policy.pipe).__name__} step {step.index} replays {deviation:.1e} away "
                f"from its rollout before any update (allowed {allowed:.1e}); an option in "
                "sampling.call may depend on more than its inputs."
            )

    def _step(self) -> float:
        """One optimiser step; returns the gradient's norm before clipping.

        Raises:
            RuntimeError: the gradient is not finite; the weights stay as they were.
        """
        parameters = list(self.policy.parameters.values())
        limit = self.config.train.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit, error_if_nonfinite=True)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.updated = True
        if self.state.average is not None and self.config.train.ema:
            for name, parameter in self.policy.parameters.items():
                self.state.average[name].lerp_(parameter.detach(), 1 - self.config.train.ema)
        return float(norm)

    def _evaluate(self, epoch: int) -> None:
        """Scores train and test prompts with the stock sampler; epoch 0 is the base model."""
        rows = {"train_prompts": self.inputs.rows, "test_prompts": self.inputs.test_rows}
        weights = self.policy.start if epoch == 0 else self.state.average
        is_base = epoch == 0 and weights is None
        with reference(self.policy) if is_base else as_used(self.policy, weights):
            evaluate(
                self.policy, self.inputs.scored, rows, self.config, self.folder.evaluation(epoch)
            )

    def _finish(self, clock: report.Clock) -> dict[str, Any]:
        """Evaluates and saves the result, and leaves it in the pipeline: the average, if any."""
        state = self.state
        if not self.folder.is_evaluated(state.epoch):
            with clock("evaluation"):
                self._evaluate(state.epoch)
        if state.average is not None:
            load_weights(self.policy, state.average)
        with as_used(self.policy):
            checkpoint.save_result(self.folder.lora, self.policy, self.config)
        totals = {"seconds": round(clock.total, 1), "images": state.images, **self.policy.passes}
        headline = self.inputs.scored[0].name
        return report.summarise(self.folder, headline, state.epoch, totals)


def samples_for_a_sheet(
    samples: Sequence[Sampled], totals: Sequence[Tensor]
) -> list[tuple[str, list[Any], list[float]]]:
    """(prompt, samples, total rewards) of the groups that are drawn."""
    return [
        (s.group.row.prompt, [sample for r in s.rollouts for sample in r.samples], total.tolist())
        for s, total in list(zip(samples, totals, strict=True))[:SHEET_ROWS]
    ]
