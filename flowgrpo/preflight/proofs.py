"""The proofs of `check_pipeline`, in the order in which they run.

Each fills in its fields of the report and raises ValueError if the proof fails.
"""

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowgrpo.data.row import Row
from flowgrpo.data.samples import frames_of
from flowgrpo.pipelines.call import Batching, outputs
from flowgrpo.pipelines.lora import unload_lora
from flowgrpo.pipelines.lora_files import load_lora
from flowgrpo.policy.policy import Policy, Rollout
from flowgrpo.policy.record import record
from flowgrpo.policy.tape import Tape
from flowgrpo.policy.weights import inference_weights
from flowgrpo.preflight.check_report import CheckReport
from flowgrpo.preflight.gradient_check import gradient_error, gradient_share
from flowgrpo.preflight.replay_check import nan_max, replay_differences


@dataclass(kw_only=True, frozen=True)
class FixedCall:
    """One call of the pipeline that the proofs repeat, to compare its latents."""

    pipe: Any
    row: Row
    call: dict[str, Any]
    """The pipeline's arguments, with `output_type="latent"`."""
    seeds: tuple[int, ...]
    """Seeds of the initial noise, one per sample."""
    batching: Batching

    def latents(self, seeds: Sequence[int] | None = None) -> list[Tensor]:
        """Final latents (B, ...) with the pipeline's current weights; for audio, a second tensor.

        Args:
            seeds: default: all.
        """
        seeds = self.seeds if seeds is None else seeds
        with torch.no_grad():
            fields = outputs(self.pipe, self.row, seeds, self.call, self.batching)
        return [tensor for tensor in map(_as_tensor, fields) if tensor is not None]


def prove_repeatable(fixed: FixedCall, report: CheckReport) -> list[Tensor]:
    """The stock pipeline gives the same latents twice; returns them."""
    stock = fixed.latents()
    if (again := difference(fixed.latents(), stock)) != 0:
        raise ValueError(
            f"{report.pipeline} differs from itself by {again:.1e} when it is called twice with "
            "the same seeds; it draws random numbers of its own or keeps state between calls."
        )
    if len(fixed.seeds) > 1:
        alone = zip(*(fixed.latents([seed]) for seed in fixed.seeds), strict=True)
        report.micro_batch_difference = difference([torch.cat(field) for field in alone], stock)
    return stock


def prove_stock_sampling(
    policy: Policy, fixed: FixedCall, stock: list[Tensor], sde: str, report: CheckReport
) -> None:
    """A recorded rollout without noise gives the latents of the stock pipeline."""
    tape = Tape(sde=sde, noise_level=0.0, window=range(0))
    with (
        inference_weights(policy),
        record(policy.pipe, policy.taped, tape, _no_noise),
        policy.prompt_cache.active(),
    ):
        report.stock_difference = difference(fixed.latents(), stock)
    if report.stock_difference != 0:
        raise ValueError(
            f"{report.pipeline} without noise is {report.stock_difference:.1e} away from the "
            "untouched pipeline; a LoRA layer or the prompt cache changes its result."
        )


def prove_loop(policy: Policy, rollout: Rollout, report: CheckReport) -> None:
    """The denoiser is called in at least two steps of the loop."""
    report.calls_per_step = _calls_per_step(policy, rollout)
    calls = list(report.calls_per_step.values())
    if sum(any(counts) for counts in zip(*calls, strict=True)) < 2:
        raise ValueError(
            f"the denoiser of {report.pipeline} is called in fewer than two steps of the loop, but "
            "training needs one that is called again; use another pipeline."
        )


def prove_replay(policy: Policy, rollout: Rollout, report: CheckReport) -> None:
    """Every trained step replays its log-prob; leaves the gradients in the weights."""
    report.replay_difference = nan_max(replay_differences(policy, rollout).values())
    if not report.replay_difference <= report.replay_allowed:
        raise ValueError(
            f"{report.pipeline} replays {report.replay_difference:.1e} away from its rollout "
            f"(allowed {report.replay_allowed:.0e}); a denoiser keeps state of its own, or an "
            "option depends on more than its inputs."
        )


def prove_gradients(policy: Policy, rollout: Rollout, report: CheckReport) -> None:
    """The replay's gradients reach the trained tensors; in float32, also compares their slope."""
    report.gradient_share = gradient_share(policy)
    if report.gradient_share == 0:
        raise ValueError(
            f"no trained tensor of {report.pipeline} got a gradient; the loop must let gradients "
            "through from the denoiser to the scheduler."
        )
    dtypes = {p.dtype for d in policy.denoisers.values() for p in d.parameters()}
    if dtypes == {torch.float32}:
        report.gradient_error = gradient_error(policy, rollout)


def prove_frozen(policy: Policy, before: dict[str, str], report: CheckReport) -> None:
    """An optimizer step leaves every frozen tensor as it was.

    Args:
        before: `frozen_hashes` before training.
    """
    torch.optim.SGD(policy.parameters.values(), lr=1e-3).step()
    report.frozen_unchanged = frozen_hashes(policy) == before
    if not report.frozen_unchanged:
        raise ValueError(
            f"an optimizer step changed frozen weights of {report.pipeline}, but only its trained "
            "tensors may change."
        )


def prove_round_trip(
    policy: Policy,
    fixed: FixedCall,
    base: list[Tensor],
    stock: list[Tensor],
    report: CheckReport,
) -> None:
    """The LoRA, saved and loaded into the stock pipeline, gives the latents it gave before.

    Args:
        base: latents of the pipeline without any adapter.
        stock: the same with the LoRA that training starts from, if there is one.
    """
    with inference_weights(policy), tempfile.TemporaryDirectory() as folder:
        with policy.prompt_cache.active():
            trained = fixed.latents()
        policy.save(Path(folder))
        unload_lora(policy.pipe, list(policy.denoisers))
        if (rest := difference(fixed.latents(), base)) != 0:
            raise ValueError(
                f"{report.pipeline} is {rest:.1e} away from the untouched pipeline once its LoRA "
                "is unloaded, but must be equal to it."
            )
        load_lora(policy.pipe, Path(folder))
        report.lora_round_trip = difference(fixed.latents(), trained)
    if report.lora_round_trip != 0:
        raise ValueError(
            f"the saved LoRA of {report.pipeline} gives latents {report.lora_round_trip:.1e} "
            "away from the trainer's; its loader changes or drops weights."
        )
    if difference(trained, stock) == 0:
        raise ValueError(
            f"the LoRA of {report.pipeline} does not change its latents; set train.lora.targets to "
            "other layers."
        )


def frozen_hashes(policy: Policy) -> dict[str, str]:
    """SHA-256 of every frozen tensor of the denoisers, by name."""
    return {
        f"{name}.{key}": _sha256(p.detach())
        for name, module in policy.denoisers.items()
        for key, p in module.named_parameters()
        if not p.requires_grad
    }


def difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Largest absolute difference of two lists of latents; infinite if their shapes differ."""
    return max(
        float((x.float() - y.float()).abs().max()) if x.shape == y.shape else float("inf")
        for x, y in zip(a, b, strict=True)
    )


def _calls_per_step(policy: Policy, rollout: Rollout) -> dict[str, list[int]]:
    iterations = range(max(index for index, _ in rollout.tape.steps) + 1)
    calls = {
        name: [len(rollout.tape.outputs.get((name, k), [])) for k in iterations]
        for name in policy.denoisers
    }
    return {name: counts for name, counts in calls.items() if any(counts)}


def _sha256(tensor: Tensor) -> str:
    # As bytes: numpy has no bfloat16.
    values = tensor.cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def _no_noise(step: int, stream: int, shape: torch.Size) -> Tensor:
    raise AssertionError("a rollout without a window draws no noise")


def _as_tensor(field: Any) -> Tensor | None:
    """Latents (B, ...), or pixels if the pipeline returns no latents; None for anything else."""
    if isinstance(field, Tensor):
        return field
    if isinstance(field[0], Tensor):
        return torch.stack(list(field))
    if isinstance(field[0], (Image.Image, list)):
        pixels = [np.stack([np.asarray(frame) for frame in frames_of(s)]) for s in field]
        return torch.from_numpy(np.stack(pixels))
    return None
