"""The algorithm: sample groups, score them, turn scores into advantages, replay and update.

Read `GRPOTrainer.train`. Differences from the textbook: the policy is a stock pipeline that is
played back instead of re-implemented (see `tape`), a log-prob is the mean over latent dimensions,
gradients are exact sums over (image, step) divided by the update's count, whatever the micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from tqdm import tqdm

from flowgrpo import checkpoint, report
from flowgrpo.advantages import advantages, is_tied, weighted_sum
from flowgrpo.config import ConfigError, GRPOConfig
from flowgrpo.evaluate import evaluate
from flowgrpo.kernels import Gaussian, kl_divergence, log_prob
from flowgrpo.objectives import clipped
from flowgrpo.plan import Group, Plan
from flowgrpo.policy import (
    ATTENTION_PROJECTIONS,
    Policy,
    Rollout,
    load_pipeline,
    reference,
    weights,
)
from flowgrpo.prompts import PromptSource, load_prompts
from flowgrpo.randomness import normal, seed_for
from flowgrpo.scoring import Scorer, as_rewards, load_rewards, refuse_constant, validate_rows
from flowgrpo.tape import ReplayError, Step


@dataclass(kw_only=True)
class Sampled:
    """One group after sampling: rollouts in order, and rewards (K,) float64 by name."""

    group: Group
    rollouts: list[Rollout]
    rewards: dict[str, Tensor]


@dataclass(kw_only=True)
class State:
    """What a run has done so far; with the weights and the optimiser, all that a resume needs."""

    epoch: int = 0
    """Epochs that are finished."""
    images: int = 0
    seconds: float = 0.0
    denoiser_forwards: int = 0
    denoiser_backwards: int = 0
    average: dict[str, Tensor] | None = None
    """The exponential moving average of the adapter."""


@dataclass(kw_only=True)
class Tally:
    """Sums over the (image, step) pairs of an epoch, as tensors: nothing waits for a device."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    count: int = 0

    def add(self, **values: Tensor) -> None:
        """Adds (B,) values of one step."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach().double().sum()
        self.count += len(next(iter(values.values())))

    def means(self) -> dict[str, float]:
        return {name: float(total) / self.count for name, total in self.sums.items()}


class GRPOTrainer:
    """Trains a LoRA on a pipeline's denoiser with GRPO.

    Args:
        model: a pipeline object, a folder, or a hub name; default: `args.model.path`.
        reward_funcs: a callable ``(images, prompts, **columns) -> list[float]``, a name as in a
            config, or a list of these; default: `args.rewards`.
        train_dataset: a list of prompts, a file, or a `datasets.Dataset` with a `prompt` column;
            default: `args.prompts.train`.
        eval_dataset: the same, held out; default: `args.prompts.test`.
        held_out_funcs: rewards for evaluation only; default: `args.held_out`.
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
        args: GRPOConfig | None = None,
        resume: bool = False,
    ):
        args = args or GRPOConfig()
        self.config = config = with_sources(args, model, train_dataset, eval_dataset)
        self.rewards = as_rewards(reward_funcs) if reward_funcs else load_rewards(config.rewards)
        self.held_out = (
            as_rewards(held_out_funcs) if held_out_funcs else load_rewards(config.held_out)
        )
        if not self.rewards:
            raise ConfigError("rewards is empty, but training needs one; add `reward: ocr`, say.")
        if config.sampling.kind == "ode" or config.sampling.noise_level == 0:
            raise ConfigError(
                f"sampling.kind is {config.sampling.kind} with noise_level "
                f"{config.sampling.noise_level}, but training needs random steps; "
                "use flow_sde with 0.7, say."
            )
        self.rows = load_prompts(_given(train_dataset, config.prompts.train, "prompts.train"))
        source = config.prompts.test if eval_dataset is None else eval_dataset
        self.test_rows = [] if source is None else load_prompts(source)
        validate_rows([*self.rewards, *self.held_out], [*self.rows, *self.test_rows])
        self.plan = Plan(config=config, rows=self.rows)
        self.folder = report.RunFolder(Path(config.output_dir))
        self.folder.refuse_other_run(resume)

        if isinstance(model, DiffusionPipeline):
            pipe, self.device = model, model.device
        else:
            path = _given(None, config.model.path, "model.path")
            self.device = _device(config.model.device)
            pipe = load_pipeline(path, getattr(torch, config.model.dtype), self.device)
        lora = config.train.lora
        self.policy = Policy(
            pipe,
            rank=lora.rank,
            alpha=lora.alpha,
            targets=lora.targets or ATTENTION_PROJECTIONS,
            seed=seed_for(config.seed, "lora"),
        )
        self.optimiser = torch.optim.AdamW(
            list(self.policy.parameters.values()),
            lr=config.train.lr,
            betas=config.train.betas,
            weight_decay=config.train.weight_decay,
        )
        self.state = State()
        if config.train.ema:
            self.state.average = self._weights()
        if resume:
            checkpoint.load_newest(self.folder.checkpoints, self)

    def train(self) -> dict[str, Any]:
        """Runs what is left of `train.epochs`; returns the summary, as in summary.json."""
        config, state = self.config, self.state
        self.folder.begin(config, state.epoch)
        if state.epoch == 0:
            for reward in self.rewards:
                refuse_constant(reward, self.rows[0])
            self._evaluate()
        for epoch in tqdm(range(state.epoch, config.train.epochs), "epochs", disable=None):
            clock = report.Clock()
            with clock("sampling"):
                samples = self._sample(self.plan.groups(epoch))
            rewards = {r.name: [s.rewards[r.name] for s in samples] for r in self.rewards}
            reward_weights = {r.name: r.weight for r in self.rewards}
            group_advantages = advantages(rewards, reward_weights, config.train.advantage)
            totals = weighted_sum(rewards, reward_weights)

            tally, norms = Tally(), []
            with clock("training"):
                for number, share in enumerate(self.plan.shares()):
                    chosen = [(samples[i], group_advantages[i]) for i in share]
                    self._accumulate(chosen, tally)
                    if epoch == 0 and number == 0:
                        self._check_replay(tally)
                    norms.append(self._step())

            state.epoch += 1
            state.images += self.plan.images_per_epoch
            if config.evaluation.every and state.epoch % config.evaluation.every == 0:
                with clock("evaluation"):
                    self._evaluate()
            state.seconds += clock.total
            self.folder.log(
                {
                    "epoch": state.epoch,
                    "rewards": {
                        name: report.spread(torch.stack(groups)) for name, groups in rewards.items()
                    },
                    "total": report.spread(torch.stack(totals)),
                    "tied_groups": sum(is_tied(total) for total in totals) / len(totals),
                    "mean_group_std": float(torch.stack(totals).std(dim=1, correction=0).mean()),
                    **tally.means(),
                    "grad_norm": sum(norms) / len(norms),
                    "grad_norm_max": max(norms),
                    "seconds": clock.phases,
                    "images": state.images,
                    **self._passes(),
                }
            )
            if state.epoch % config.checkpoint_every == 0 or state.epoch == config.train.epochs:
                self._save_samples(samples, totals)
                checkpoint.save(self.folder.checkpoints, self)
        return self._finish()

    def _sample(self, groups: Sequence[Group]) -> list[Sampled]:
        """Rolls out every group; scoring overlaps with sampling where a reward allows it."""
        scorer = Scorer(self.rewards)
        pending = []
        for group in groups:
            rollouts, futures = [], []
            for samples in self.plan.micro_batches:
                rollouts.append(self._rollout(group, samples))
                futures.append(scorer.submit(rollouts[-1].images, [group.row] * len(samples)))
            pending.append((group, rollouts, futures))
        sampled = [
            Sampled(
                group=group,
                rollouts=rollouts,
                rewards={
                    r.name: torch.cat([future[r.name].result() for future in futures])
                    for r in self.rewards
                },
            )
            for group, rollouts, futures in pending
        ]
        scorer.close()
        return sampled

    def _rollout(self, group: Group, samples: range) -> Rollout:
        sampling = self.config.sampling

        def noise(step: int, stream: int, shape: torch.Size) -> Tensor:
            keys = [group.noise_key(sample, step, stream) for sample in samples]
            return torch.stack([normal(shape[1:], self.config.seed, *key) for key in keys])

        return self.policy.rollout(
            group.row.prompt,
            [group.seeds[sample] for sample in samples],
            {**sampling.call, "num_inference_steps": sampling.num_inference_steps},
            kind=sampling.kind,
            noise_level=sampling.noise_level,
            window=group.window,
            noise=noise,
        )

    def _accumulate(self, chosen: Sequence[tuple[Sampled, Tensor]], tally: Tally) -> None:
        """Adds the gradients of one update: the mean over all its images and trained steps.

        Tied groups count in the mean but are not replayed: their advantages are 0.
        """
        total = len(chosen) * self.config.sampling.group_size * self.plan.window_size
        for sampled, group_advantages in chosen:
            if not group_advantages.any():
                continue
            parts = group_advantages.split([len(batch) for batch in self.plan.micro_batches])
            for rollout, part in zip(sampled.rollouts, parts, strict=True):
                self._replay(rollout, part.float().to(self.device), total, tally)

    def _replay(self, rollout: Rollout, advantages: Tensor, total: int, tally: Tally) -> None:
        """Backward of one micro-batch, step by step."""
        train = self.config.train
        reference_means: dict[int, Tensor] = {}
        if train.kl_weight:
            with reference(self.policy):
                self.policy.replay(
                    rollout,
                    lambda step, gaussian: reference_means.update({step.index: gaussian.mean}),
                    gradients=False,
                )

        def on_step(step: Step, new: Gaussian) -> None:
            assert step.mean is not None
            old_log_prob = log_prob(step.next_latents, step.mean, step.std)
            new_log_prob = log_prob(step.next_latents, new.mean, new.std)
            loss = clipped(new_log_prob, old_log_prob, advantages, train.clip_range)
            values = loss.values
            logged = {
                "ratio_deviation": (loss.ratio - 1).abs(),
                "clip_fraction_low": loss.clipped_low,
                "clip_fraction_high": loss.clipped_high,
            }
            if train.kl_weight:
                kl = kl_divergence(new.mean, reference_means[step.index], new.std)
                values = values + train.kl_weight * kl
                logged["kl"] = kl
            (values.sum() / total).backward()
            tally.add(**logged)

        self.policy.replay(rollout, on_step)

    def _step(self) -> float:
        """One optimiser step; returns the gradient's norm before clipping."""
        parameters = list(self.policy.parameters.values())
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.config.train.max_grad_norm))
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        if self.state.average is not None and self.config.train.ema:
            for name, parameter in self.policy.parameters.items():
                self.state.average[name].lerp_(parameter.detach(), 1 - self.config.train.ema)
        return norm

    def _check_replay(self, tally: Tally) -> None:
        """Before the first update the weights are those that sampled, so every ratio is 1."""
        deviation = tally.means().get("ratio_deviation", 0.0)
        allowed = min(self.config.train.clip_range) / 10
        if deviation > allowed:
            raise ReplayError(
                f"{type(self.policy.pipe).__name__} replays {deviation:.1e} away from its "
                f"rollout before any update (allowed {allowed:.1e}); an option in "
                "sampling.call may depend on more than its inputs."
            )

    def _evaluate(self) -> None:
        """Scores train and test prompts with the stock sampler; epoch 0 is the base model."""
        base = self.state.epoch == 0
        rows = {"train_prompts": self.rows, "test_prompts": self.test_rows}
        with reference(self.policy) if base else weights(self.policy, self.state.average):
            evaluate(
                self.policy,
                [*self.held_out, *self.rewards],
                rows,
                self.config,
                self.folder.evaluation(self.state.epoch),
            )

    def _finish(self) -> dict[str, Any]:
        if not self.folder.is_evaluated(self.state.epoch):
            self._evaluate()
        with weights(self.policy, self.state.average):
            checkpoint.save_result(self.folder.lora, self.policy, self.config)
        headline = [*self.held_out, *self.rewards][0].name
        return report.summarise(
            self.folder,
            headline,
            self.state.epoch,
            {
                "seconds": round(self.state.seconds, 1),
                "images": self.state.images,
                **self._passes(),
            },
        )

    def _save_samples(self, samples: Sequence[Sampled], totals: Sequence[Tensor]) -> None:
        self.folder.save_samples(
            self.state.epoch,
            [
                (s.group.row.prompt, [i for r in s.rollouts for i in r.images], total.tolist())
                for s, total in zip(samples, totals, strict=True)
            ],
        )

    def _passes(self) -> dict[str, int]:
        return {
            "denoiser_forwards": self.policy.denoiser_forwards,
            "denoiser_backwards": self.policy.denoiser_backwards,
        }

    def _weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.policy.parameters.items()}


def with_sources(
    config: GRPOConfig, model: Any, train_dataset: Any, eval_dataset: Any
) -> GRPOConfig:
    """The config with the paths that were given as arguments, so that the run folder names them."""
    data = config.model_dump()
    for section, key, value in (
        ("model", "path", model),
        ("prompts", "train", train_dataset),
        ("prompts", "test", eval_dataset),
    ):
        if isinstance(value, (str, Path)):
            data[section][key] = str(value)
    return GRPOConfig.model_validate(data)


def _given(argument: Any, setting: Any, name: str) -> Any:
    value = setting if argument is None else argument
    if value is None:
        raise ConfigError(f"{name} is missing; set it in the config, or pass it to GRPOTrainer.")
    return value


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
