"""Updates: replays rollouts with gradients, and moves the weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from flowgrpo.algorithms.objectives import OBJECTIVES, StepBatch
from flowgrpo.algorithms.sde import log_prob
from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.errors import ReplayError, RunStopped
from flowgrpo.distributed.fsdp import full_tensor, placed_like
from flowgrpo.distributed.processes import Processes, checksum
from flowgrpo.policy.policy import Policy, Rollout
from flowgrpo.policy.tape import Step, Transition
from flowgrpo.policy.weights import load_weights, reference
from flowgrpo.training.metrics import MetricSums
from flowgrpo.training.optimizer import load_optimizer_moments, make_optimizer, optimizer_moments

ReferenceMeans: TypeAlias = Mapping[tuple[int, int], Tensor]
"""Means of the steps of a rollout under the reference, by (iteration, stream)."""


class Learner:
    """The policy's optimizer and its average.

    Gradients are exact sums over transitions (sample, step), divided by the update's number of
    transitions over all processes, whatever the micro-batch.
    """

    def __init__(self, policy: Policy, config: GRPOConfig, processes: Processes):
        train = config.train
        self.policy, self.config, self.processes = policy, config, processes
        objective = config.objective
        self.objective = partial(OBJECTIVES[objective.name], **objective.arguments)
        self.optimizer = make_optimizer(train, policy.parameters.values())
        self.average: dict[str, Tensor] | None = None
        """Exponential moving average of the trained weights; None without `train.ema`."""
        if train.ema:
            self.average = {n: p.detach().clone() for n, p in policy.parameters.items()}
        self.on_policy = True
        """Whether the weights are still those that sampled, so that every ratio is 1."""
        self._warned = False  # a replay that drifts is reported once per run
        self._loss_scale = 0.0  # of the current update; 0 until its first step

    def accumulate(
        self,
        batch: Sequence[tuple[Sequence[Rollout], Tensor]],
        num_transitions: int,
        sums: MetricSums,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        """Adds the gradients of groups.

        Args:
            batch: the rollouts of each group, and its advantages (K,).
            num_transitions: number of transitions in the update, over all processes: the mean's
                denominator.
            sums: collects the metrics.
            should_stop: checked before each micro-batch; if it returns True, the rest is left out.
        """
        for rollouts, advantages in batch:
            parts = advantages.split([len(rollout.seeds) for rollout in rollouts])
            for rollout, part in zip(rollouts, parts, strict=True):
                if should_stop is not None and should_stop():
                    return
                self._replay(rollout, part.float().to(self.policy.device), num_transitions, sums)

    def step(self, sums: MetricSums) -> float:
        """One optimizer step with what was accumulated.

        Returns:
            The gradient's norm before clipping.

        Raises:
            RunStopped: the loss or its gradient is not finite; the weights stay as they were.
        """
        parameters = list(self.policy.parameters.values())
        if self._loss_scale > 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= self._loss_scale
        self._loss_scale = 0.0
        if not self.policy.is_sharded:  # FSDP2 has summed sharded ones already
            self.processes.sum_gradients(parameters)
        max_norm = self.config.train.max_grad_norm
        norm = float(full_tensor(torch.nn.utils.clip_grad_norm_(parameters, max_norm)))
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise self._not_finite(norm, sums)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.on_policy = False
        if self.average is not None and self.config.train.ema:
            for name, parameter in self.policy.parameters.items():
                self.average[name].lerp_(parameter.detach(), 1 - self.config.train.ema)
        return norm

    def scale_lr(self, factor: float) -> None:
        """Sets the learning rate to `factor` times that of the config."""
        for group in self.optimizer.param_groups:
            group["lr"] = factor * self.config.train.lr

    def checksum(self) -> str:
        """Checksum of the trained weights.

        Raises:
            RuntimeError: the weights differ between processes.
        """
        own = checksum(list(self.policy.parameters.values()))
        sums = self.processes.all_gather(own)
        if self.policy.is_sharded:
            return f"{sum(sums) % 2**64:016x}"
        if len(set(sums)) > 1:
            raise RuntimeError(
                "weights differ between processes after an update; give every machine the same "
                "versions and the same model of device, and continue with --resume."
            )
        return f"{own:016x}"

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, average and moments by name, as full tensors on the CPU, copied one by one.

        Sharded tensors are gathered, so every process must call it; only the main one gets a
        result.
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

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `state_dict` gave, on any number of processes, sharded or not."""
        named = self.policy.parameters
        load_weights(self.policy, _under("weights/", tensors))
        load_optimizer_moments(self.optimizer, named, _under("optimizer/", tensors))
        if average := _under("average/", tensors):
            self.average = {n: placed_like(value, named[n]) for n, value in average.items()}

    def _replay(
        self, rollout: Rollout, advantages: Tensor, num_transitions: int, sums: MetricSums
    ) -> None:
        """Runs backward for one micro-batch; each step does so by itself, to free its graph."""
        reference_means = self._reference_means(rollout)

        def on_step(step: Step, current: Transition) -> None:
            batch = _step_batch(step, current, advantages, reference_means)
            if self.on_policy:
                self._check_replay(step, batch)
            loss, metrics = self.objective(batch)
            scale = self._scale_of(num_transitions, current.mean)
            (loss.sum() / num_transitions * scale).backward()
            sums.add(loss=loss, **metrics)

        self.policy.replay(rollout, on_step)

    def _reference_means(self, rollout: Rollout) -> ReferenceMeans:
        means: dict[tuple[int, int], Tensor] = {}
        if self.config.objective.needs_reference:
            with reference(self.policy):
                self.policy.replay(
                    rollout,
                    lambda step, current: means.update({step.key: current.mean}),
                    gradients=False,
                )
        return means

    def _check_replay(self, step: Step, batch: StepBatch) -> None:
        """Before any update of an epoch, every ratio must be 1.

        Raises:
            ReplayError: it is not, and `guards.replay` is `stop`.
        """
        ratio = torch.exp(batch.log_prob.detach() - batch.old_log_prob)
        deviation = float((ratio - 1).abs().max())
        allowed, action = self.config.objective.replay_tolerance, self.config.guards.replay
        if deviation <= allowed or action == "off":
            return
        message = (
            f"{type(self.policy.pipe).__name__} step {step.index} replays {deviation:.1e} away "
            f"from its rollout before any update (allowed {allowed:.1e}); an option in "
            "sampling.call may depend on the step count, or keep state."
        )
        if action == "stop" or math.isnan(deviation):
            raise ReplayError(message)
        if not self._warned:
            self.processes.warn(message)
        self._warned = True

    def _scale_of(self, num_transitions: int, mean: Tensor) -> float:
        """A power of two that keeps gradients of float16 activations in range; 1 for other dtypes.

        The loss is a mean over transitions and latent dimensions, each a tiny share of it. The
        scale follows from these counts alone, so there is no scaler state to save or to restore.
        """
        if not self._loss_scale:
            half = any(d.dtype == torch.float16 for d in self.policy.denoisers.values())
            exponent = int(math.log2(num_transitions * mean[0].numel()))
            self._loss_scale = 2.0**exponent if half else 1.0
        return self._loss_scale

    def _not_finite(self, norm: float, sums: MetricSums) -> RunStopped:
        own = float(sums.sums.get("loss", torch.zeros(())))
        loss = sum(self.processes.all_gather(own))
        name, value = ("gradient", norm) if math.isfinite(loss) else ("loss", loss)
        return RunStopped(
            f"{name}_not_finite",
            f"the {name} of an update is {value}, but must be finite; the weights are unchanged, "
            "so lower train.lr, or set model.dtype to float32.",
            on_all_processes=True,
        )


def _step_batch(
    step: Step, current: Transition, advantages: Tensor, reference_means: ReferenceMeans
) -> StepBatch:
    assert step.mean is not None
    return StepBatch(
        advantages=advantages,
        log_prob=log_prob(step.next_latents, current.mean, current.std),
        old_log_prob=log_prob(step.next_latents, step.mean, step.std),
        latents=step.latents,
        next_latents=step.next_latents,
        mean=current.mean,
        old_mean=step.mean,
        reference_mean=reference_means.get(step.key),
        std=current.std,
        velocity=current.velocity,
        sigma=step.position.sigma,
        sigma_next=step.position.sigma_next,
    )


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
