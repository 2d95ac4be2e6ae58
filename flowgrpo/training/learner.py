"""Updates: replay rollouts with gradients, and move the weights."""

import math
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flowgrpo.algorithms.objectives.grpo import clipped
from flowgrpo.algorithms.sde import Gaussian, kl_divergence, log_prob
from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.errors import ReplayError, RunStopped
from flowgrpo.distributed.fsdp import full_tensor
from flowgrpo.distributed.processes import Processes, checksum
from flowgrpo.policy.policy import Policy, Rollout
from flowgrpo.policy.tape import Step
from flowgrpo.policy.weights import reference
from flowgrpo.training.metrics import MetricSums
from flowgrpo.training.optimizer import make_optimizer, optimizer_moments
from flowgrpo.training.rollouts import RolloutGroup


class Learner:
    """The policy's optimizer and its average.

    Gradients are exact sums over (image, step) divided by the update's count over all processes,
    whatever the micro-batch.
    """

    def __init__(self, policy: Policy, config: GRPOConfig, processes: Processes):
        train = config.train
        self.policy, self.config, self.processes = policy, config, processes
        self.optimizer = make_optimizer(train, policy.parameters.values())
        self.average: dict[str, Tensor] | None = None
        """The exponential moving average of the trained weights."""
        if train.ema:
            self.average = {n: p.detach().clone() for n, p in policy.parameters.items()}
        self.on_policy = True
        """The weights are those that sampled: every ratio is 1."""
        self._warned = False
        self._scale = 0.0

    def scale_lr(self, factor: float) -> None:
        """Sets the learning rate to `factor` times that of the config."""
        for group in self.optimizer.param_groups:
            group["lr"] = factor * self.config.train.lr

    def accumulate(
        self,
        chosen: Sequence[tuple[RolloutGroup, Tensor]],
        pairs: int,
        tally: MetricSums,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        """Adds the gradients of groups with their advantages (K,).

        Args:
            pairs: (image, step) pairs of the whole update, by which their sum is divided.
            stopping: asked before each micro-batch; where it says so, gradients are missing.
        """
        for sampled, advantages in chosen:
            parts = advantages.split([len(rollout.seeds) for rollout in sampled.rollouts])
            for rollout, part in zip(sampled.rollouts, parts, strict=True):
                if should_stop is not None and should_stop():
                    return
                self._replay(rollout, part.float().to(self.policy.device), pairs, tally)

    def _replay(self, rollout: Rollout, advantages: Tensor, pairs: int, tally: MetricSums) -> None:
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
            if self.on_policy:
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
            (values.sum() / pairs * self._loss_scale(pairs, now.mean)).backward()
            tally.add(loss=values, **logged)

        self.policy.replay(rollout, on_step)

    def _check_ratio(self, step: Step, deviation: float) -> None:
        allowed, guards = self.config.train.replay_tolerance, self.config.guards
        if deviation <= allowed or guards.replay == "off":
            return
        message = (
            f"{type(self.policy.pipe).__name__} step {step.index} replays {deviation:.1e} away "
            f"from its rollout before any update (allowed {allowed:.1e}); an option in "
            "sampling.call may depend on more than its inputs."
        )
        if guards.replay == "stop" or math.isnan(deviation):
            raise ReplayError(message)
        if not self._warned and self.processes.is_main:
            print(f"warning: {message}", file=sys.stderr)
        self._warned = True

    def _loss_scale(self, pairs: int, mean: Tensor) -> float:
        """A power of two that keeps the gradients of float16 activations in range, constant within
        an update: the loss is a mean over pairs and latent dimensions, each a small share of it."""
        if not self._scale:
            half = any(d.dtype == torch.float16 for d in self.policy.denoisers.values())
            self._scale = 2.0 ** int(math.log2(pairs * mean[0].numel())) if half else 1.0
        return self._scale

    def step(self, tally: MetricSums) -> float:
        """One optimizer step; returns the gradient's norm before clipping.

        Raises:
            Stopped: the loss or its gradient is not finite; the weights stay as they were.
        """
        parameters = list(self.policy.parameters.values())
        if self._scale > 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= self._scale
        self._scale = 0.0
        if not self.policy.is_sharded:  # else they are summed already
            self.processes.sum_gradients(parameters)
        limit = self.config.train.max_grad_norm
        norm = float(full_tensor(torch.nn.utils.clip_grad_norm_(parameters, limit)))
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            own = float(tally.sums.get("loss", torch.zeros(())))
            loss = sum(self.processes.all_gather(own))
            name, value = ("gradient", norm) if math.isfinite(loss) else ("loss", loss)
            raise RunStopped(
                f"{name}_not_finite",
                f"the {name} of an update is {value}, which is not finite; the weights stay as "
                "they were: lower train.lr, or take model.dtype float32.",
                on_all_processes=True,
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.on_policy = False
        if self.average is not None and self.config.train.ema:
            for name, parameter in self.policy.parameters.items():
                self.average[name].lerp_(parameter.detach(), 1 - self.config.train.ema)
        return norm

    def checksum(self) -> str:
        """Of the trained weights.

        Raises:
            RuntimeError: they differ between processes.
        """
        own = checksum(list(self.policy.parameters.values()))
        sums = self.processes.all_gather(own)
        if self.policy.is_sharded:
            return f"{sum(sums) % 2**64:016x}"
        if len(set(sums)) > 1:
            raise RuntimeError(
                "weights differ between processes after an update; give every machine the same "
                "versions and the same kind of device, and go on with --resume."
            )
        return f"{own:016x}"

    def tensors(self) -> dict[str, Tensor]:
        """Weights, average and moments by name, as whole tensors on the CPU, copied one by one.

        Sharded ones are gathered, so all processes must ask; the first one gets them.
        """
        named = self.policy.parameters
        moments = optimizer_moments(self.optimizer, named)
        found = {f"weights/{name}": parameter.detach() for name, parameter in named.items()}
        found |= {f"average/{name}": value for name, value in (self.average or {}).items()}
        found |= {f"optimizer/{name}": value for name, value in moments.items()}
        copies = {}
        for name, value in found.items():
            gathered = full_tensor(value)
            if self.processes.is_main:
                copies[name] = gathered.to("cpu", copy=True).contiguous()
        return copies
