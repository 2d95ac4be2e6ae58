"""The policy: a stock diffusers pipeline with trainable weights on its denoiser, usually a LoRA.

`rollout` samples with the pipeline and writes a tape; `replay` plays the tape with gradients. The
reference is the same pipeline as it was before training (`weights.reference`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo.core.errors import RunStopped
from flowgrpo.core.train_config import TrainConfig
from flowgrpo.data.row import Row
from flowgrpo.data.samples import Sample, is_video
from flowgrpo.distributed.fsdp import drop_gathered, is_sharded, shard
from flowgrpo.pipelines.batching import Batchings
from flowgrpo.pipelines.call import generate
from flowgrpo.pipelines.compile import is_compiled
from flowgrpo.pipelines.lora_files import save_lora
from flowgrpo.pipelines.offload import offloaded_afterwards
from flowgrpo.pipelines.parts import find_denoisers, find_models, modules_of
from flowgrpo.pipelines.scheduler_checks import check_scheduler
from flowgrpo.pipelines.seams import as_unsharded
from flowgrpo.policy.prompt_cache import PromptCache
from flowgrpo.policy.record import record
from flowgrpo.policy.replay import play
from flowgrpo.policy.tape import NoiseFunction, StepFunction, Tape
from flowgrpo.policy.trainable import make_trainable


@dataclass(kw_only=True)
class Rollout:
    """B samples of one row, and the tape of the call that made them."""

    row: Row
    """Row whose prompt and columns were used."""
    samples: list[Sample]
    """B images or videos."""
    tape: Tape
    """Recorded denoising loop of all B samples."""
    call: dict[str, Any]
    """Arguments of the pipeline's call, without the row's columns and generators."""
    seeds: list[int]
    """B seeds of the initial noise."""

    def to(self, device: torch.device | str) -> "Rollout":
        """Returns the same rollout with its tape on `device`; a replay accepts any device."""
        return replace(self, tape=self.tape.to(device))


class Policy:
    """A pipeline, its denoisers and the weights that are trained.

    Args:
        pipe: any diffusers pipeline with a standard denoising loop. Its weights are frozen.
        train: what to train, and how: `lora`, `modules`, `gradient_checkpointing`, `shard`.
        seed: seed of the LoRA's initial weights.
        device: type of device for shards; default: that of the pipeline.
        batchings: how the pipeline makes several samples, if that is known already.

    Raises:
        ValueError: the pipeline has no denoiser or no scheduler whose steps can be read, or no
            layer matches `train.lora.targets`.
        ConfigError: `train` does not fit the pipeline.
    """

    def __init__(
        self,
        pipe: Any,
        train: TrainConfig | None = None,
        seed: int = 0,
        device: str | None = None,
        batchings: Batchings | None = None,
    ):
        train = train or TrainConfig()
        if not hasattr(pipe, "scheduler"):
            raise ValueError(
                f"{type(pipe).__name__} has no scheduler, but noise is added in its steps; use a "
                "pipeline with a denoising loop."
            )
        check_scheduler(pipe.scheduler)
        self.pipe = pipe
        self.batchings = batchings or Batchings(pipe)
        self.prompt_cache = PromptCache(pipe)
        self.denoisers: dict[str, Any] = find_denoisers(pipe, train.modules)
        self.taped = find_models(pipe)
        """Models whose outputs in the loop are taped, by name; also ControlNets."""
        self.denoiser_calls = {"denoiser_forwards": 0, "denoiser_backwards": 0}
        """Number of denoiser calls in rollouts and replays since `pop_denoiser_calls`."""
        self.makes_videos: bool | None = None
        """Whether samples are videos; None before the first rollout."""
        self.is_lora = train.lora is not None
        """Whether a LoRA is trained, not all weights."""
        for module in modules_of(pipe).values():
            module.requires_grad_(False).eval()
        make_trainable(pipe, self.denoisers, train, seed)
        if train.shard:
            for module in self.denoisers.values():
                shard(module, pipe.device.type if device is None else device)
        self.start_weights: dict[str, Tensor] | None = None
        """Trained weights before training by name; None if switching the adapter off gives them."""
        if train.lora is None or train.lora.start:
            self.start_weights = {n: p.detach().clone() for n, p in self.parameters.items()}

    @property
    def device(self) -> torch.device:
        """Device of the trained weights."""
        return next(iter(self.parameters.values())).device

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained tensors by name, float32, in a fixed order."""
        # A sharded module's gathered parameters would hide the shards that are trained.
        for module in self.denoisers.values():
            drop_gathered(module)
        return {
            f"{name}.{parameter_name}": parameter
            for name, module in self.denoisers.items()
            for parameter_name, parameter in module.named_parameters()
            if parameter.requires_grad
        }

    @property
    def is_sharded(self) -> bool:
        """Whether denoisers are sharded; every process must then call them equally often."""
        return any(is_sharded(module) for module in self.denoisers.values())

    def pop_denoiser_calls(self) -> dict[str, int]:
        """Returns the number of denoiser calls since the last time, and restarts the count."""
        calls, self.denoiser_calls = self.denoiser_calls, dict.fromkeys(self.denoiser_calls, 0)
        return calls

    def generate(self, row: Row, seeds: Sequence[int], call: dict[str, Any]) -> list[Sample]:
        """Returns samples of `row`, one per seed, by the stock pipeline and its own scheduler."""
        with self.prompt_cache.active(), offloaded_afterwards(self.pipe):
            return generate(self.pipe, row, seeds, call, self.batchings.of(row, call))

    def rollout(
        self,
        row: Row,
        seeds: Sequence[int],
        call: dict[str, Any],
        tape: Tape,
        noise: NoiseFunction,
    ) -> Rollout:
        """Makes one sample per seed of initial noise, stochastic in the tape's window.

        Args:
            tape: an empty tape, on which the call is recorded.
            noise: draws the noise of the window's steps.

        Raises:
            ConfigError: the pipeline makes one sample per call, but there are several seeds.
            RunStopped: latents are not finite.
        """
        self.batchings.of_micro_batch(row, call, len(seeds))
        gradients = is_compiled(
            self.denoisers
        )  # a compiled denoiser rounds differently with gradients, as in its replay
        with torch.no_grad(), record(self.pipe, self.taped, tape, noise, gradients=gradients):
            samples = self.generate(row, seeds, call)
        for step in tape.window_steps[-1:]:
            if not step.next_latents.isfinite().all():
                raise RunStopped(
                    "latents_not_finite",
                    f'latents of prompt "{row.prompt}" are not finite; lower train.lr or the noise '
                    "level.",
                )
        self.makes_videos = is_video(samples[0])
        self.denoiser_calls["denoiser_forwards"] += tape.recorded_forwards
        return Rollout(row=row, samples=samples, tape=tape, call=call, seeds=list(seeds))

    def replay(self, rollout: Rollout, on_step: StepFunction, *, gradients: bool = True) -> None:
        """Replays the rollout's window steps with the current weights; `on_step` may run backward.

        Raises:
            ReplayError: the schedule, the latents or the denoiser calls differ from the rollout's.
        """
        tape = rollout.tape.to(self.device)  # a copy for this replay if it is on another device
        with play(self.pipe, self.taped, tape, on_step, gradients=gradients):
            self.generate(rollout.row, rollout.seeds, rollout.call)
        forwards = tape.replayed_forwards - rollout.tape.replayed_forwards
        rollout.tape.replayed_forwards = tape.replayed_forwards
        self.denoiser_calls["denoiser_forwards"] += forwards
        self.denoiser_calls["denoiser_backwards"] += forwards if gradients else 0

    def save(self, folder: Path, *, write: bool = True) -> None:
        """Writes the LoRA, or the complete denoisers, as plain diffusers loads them.

        Args:
            write: False on processes that only take part in gathering a sharded denoiser.
        """
        if self.is_lora:
            save_lora(self.denoisers, folder, write=write)
            return
        for name, module in self.denoisers.items():
            with as_unsharded(module):
                if write:
                    module.save_pretrained(folder / name)
