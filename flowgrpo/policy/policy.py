"""The policy: a stock diffusers pipeline with trainable weights on its denoiser, mostly a LoRA.

`rollout` samples with the pipeline and tapes what it did; `replay` plays the tape with gradients.
The reference policy is the same pipeline as it was before training.
"""

import functools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo.core.devices import CPU, moved, tensor_devices, to_devices
from flowgrpo.core.errors import ConfigError, RunStopped
from flowgrpo.core.train_config import LoraSettings, TrainConfig
from flowgrpo.data.prompts import Row
from flowgrpo.data.samples import Sample, is_video
from flowgrpo.distributed.fsdp import drop_gathered, is_sharded, shard
from flowgrpo.pipelines.batching import find_batching
from flowgrpo.pipelines.call import generate, one_sample_per_call_error
from flowgrpo.pipelines.compile import is_compiled
from flowgrpo.pipelines.lora import ADAPTER, add_lora, load_lora, save_lora, train_in_float32
from flowgrpo.pipelines.offload import is_offloaded, offloaded_afterwards
from flowgrpo.pipelines.parts import find_denoisers, find_models, modules_of
from flowgrpo.pipelines.scheduler import check_scheduler
from flowgrpo.pipelines.seams import as_unsharded, patched
from flowgrpo.policy.prompt_cache import PROMPT_CACHE_BYTES, cache_key, tensor_bytes
from flowgrpo.policy.record import record
from flowgrpo.policy.replay import play
from flowgrpo.policy.tape import NoiseFunction, StepFunction, Tape
from flowgrpo.policy.trainable import enable_gradient_checkpointing, enable_gradients_in_eval


@dataclass(kw_only=True)
class Rollout:
    """B samples of one row and the tape they came from."""

    row: Row
    samples: list[Sample]
    """B pictures or videos."""
    tape: Tape
    call: dict[str, Any]
    """The pipeline's arguments, without generators."""
    seeds: list[int]
    """Seeds of the initial noise, one a sample."""

    def to(self, device: torch.device | str) -> "Rollout":
        """The same rollout with its tape on `device`; a replay takes it from anywhere."""
        return replace(self, tape=self.tape.to(device))


class Policy:
    """A pipeline, its denoisers and the weights that are trained.

    Args:
        pipe: any diffusers pipeline with a standard denoising loop. Its weights are frozen.
        train: what is trained, and how: `lora`, `modules`, `gradient_checkpointing`.
        seed: of the LoRA's initial weights.
        device: type of where shards go; default: where the pipeline is.

    Raises:
        ValueError: the pipeline has no denoiser, its scheduler is not understood, or no target
        matches.
    """

    def __init__(
        self,
        pipe: Any,
        train: TrainConfig | None = None,
        seed: int = 0,
        device: str | None = None,
    ):
        train = train or TrainConfig()
        if not hasattr(pipe, "scheduler"):
            raise ValueError(
                f"{type(pipe).__name__} has no scheduler, but its steps are where noise goes; use "
                "a pipeline with a denoising loop."
            )
        check_scheduler(pipe.scheduler)
        self.pipe = pipe
        self.denoisers: dict[str, Any] = find_denoisers(pipe, train.modules)
        self.taped = find_models(pipe)
        """Every model whose outputs in the loop are kept: those that condition, too."""
        self.prompt_cache: OrderedDict[Any, Any] = OrderedDict()
        self.denoiser_calls = {"denoiser_forwards": 0, "denoiser_backwards": 0}
        """Denoiser calls of rollouts and replays since the last count."""
        self.makes_videos: bool | None = None
        """Known from the first rollout on."""
        self.is_lora = train.lora is not None
        for module in modules_of(pipe).values():
            module.requires_grad_(False).eval()
        self._make_trainable(train, seed)
        for module in self.denoisers.values():
            enable_gradients_in_eval(module)
        if train.gradient_checkpointing:
            enable_gradient_checkpointing(self.denoisers)
        if train.shard:
            for module in self.denoisers.values():
                shard(module, pipe.device.type if device is None else device)
        self.start: dict[str, Tensor] | None = None
        """The trained weights as they were before training, where the reference is not the adapter
        switched off."""
        if train.lora is None or train.lora.start:
            self.start = {n: p.detach().clone() for n, p in self.parameters.items()}

    def _make_trainable(self, train: TrainConfig, seed: int) -> None:
        if train.lora is None:
            weights = (p for d in self.denoisers.values() for p in d.parameters())
            if odd := {p.dtype for p in weights} - {torch.float32}:
                raise ConfigError(
                    f"train.lora is null with weights in {odd.pop()}, but all weights are trained "
                    "in float32; set model.dtype to float32, or train a LoRA."
                )
            for module in self.denoisers.values():
                module.requires_grad_(True)
            return
        if train.lora.start is not None:
            self._start_from(Path(train.lora.start).expanduser(), train.lora)
            return
        for module in self.denoisers.values():
            add_lora(
                module,
                rank=train.lora.rank,
                alpha=train.lora.alpha,
                targets=train.lora.targets,
                seed=seed,
            )

    def _start_from(self, folder: Path, lora: LoraSettings) -> None:
        loaded = load_lora(self.pipe, folder)
        for module in find_denoisers(self.pipe).values():
            module.requires_grad_(False)
        if others := set(loaded) - {*self.denoisers}:
            raise ConfigError(
                f"train.lora.start is {folder}, with weights for {', '.join(sorted(others))}, but "
                f"only {', '.join(self.denoisers)} is trained; take them out of the file."
            )
        for name, module in self.denoisers.items():
            config = getattr(module, "peft_config", {}).get(ADAPTER)
            if config is None:
                raise ConfigError(
                    f"train.lora.start is {folder}, but holds nothing for {name}; it has "
                    f"{', '.join(loaded) or 'no LoRA'}."
                )
            if (config.r, config.lora_alpha) != (lora.rank, lora.alpha):
                raise ConfigError(
                    f"train.lora has rank {lora.rank} and alpha {lora.alpha}, but {folder} has "
                    f"rank {config.r} and alpha {config.lora_alpha}; set these."
                )
            train_in_float32(module)

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained tensors by name, float32, in a fixed order."""
        for module in self.denoisers.values():
            drop_gathered(module)
        return {
            f"{name}.{parameter_name}": parameter
            for name, module in self.denoisers.items()
            for parameter_name, parameter in module.named_parameters()
            if parameter.requires_grad
        }

    def pop_denoiser_calls(self) -> dict[str, int]:
        """Denoiser calls since the last count."""
        passes, self.denoiser_calls = self.denoiser_calls, dict.fromkeys(self.denoiser_calls, 0)
        return passes

    def generate(self, row: Row, seeds: Sequence[int], call: dict[str, Any]) -> list[Sample]:
        """Samples of `row`, one per seed, by the stock pipeline and its own scheduler."""
        with self.prompt_embeds_cached(), offloaded_afterwards(self.pipe):
            return generate(self.pipe, row, seeds, call)

    def rollout(
        self,
        row: Row,
        seeds: Sequence[int],
        call: dict[str, Any],
        *,
        sde: str,
        noise_level: float,
        window: range,
        noise: NoiseFunction,
    ) -> Rollout:
        """One sample per seed of initial noise, stochastic in `window`, on tape."""
        tape = Tape(
            sde=sde, noise_level=noise_level, window=window if noise_level > 0 else range(0)
        )
        if find_batching(self.pipe, row, call).single and len(seeds) > 1:
            raise one_sample_per_call_error(self.pipe, len(seeds))
        gradients = is_compiled(self.denoisers)
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
        """Plays the rollout's window steps with the current weights; `on_step` may run backward."""
        tape = rollout.tape.to(self.device)  # a tape that waits elsewhere is let go of afterwards
        with play(self.pipe, self.taped, tape, on_step, gradients=gradients):
            self.generate(rollout.row, rollout.seeds, rollout.call)
        forwards = tape.replayed_forwards - rollout.tape.replayed_forwards
        rollout.tape.replayed_forwards = tape.replayed_forwards
        self.denoiser_calls["denoiser_forwards"] += forwards
        self.denoiser_calls["denoiser_backwards"] += forwards if gradients else 0

    @property
    def is_sharded(self) -> bool:
        """Every process must then make the same calls of the denoisers."""
        return any(is_sharded(module) for module in self.denoisers.values())

    def save(self, folder: Path, *, write: bool = True) -> None:
        """Writes what was trained as plain diffusers loads it: the LoRA, or whole denoisers.

        Args:
            write: False on processes that only help to collect a sharded denoiser.
        """
        if self.is_lora:
            save_lora(self.denoisers, folder, write=write)
            return
        for name, module in self.denoisers.items():
            with as_unsharded(module):
                if write:
                    module.save_pretrained(folder / name)

    @contextmanager
    def prompt_embeds_cached(self) -> Iterator[None]:
        """`encode_prompt` runs once for each prompt and set of options."""
        encode = getattr(self.pipe, "encode_prompt", None)
        if encode is None:
            yield
            return

        @functools.wraps(encode)
        def memoised(*args: Any, **kwargs: Any) -> Any:
            key = cache_key((args, tuple(sorted(kwargs.items()))))
            if key is None:
                return encode(*args, **kwargs)
            if key in self.prompt_cache:
                self.prompt_cache.move_to_end(key)
                return to_devices(*self.prompt_cache[key])
            with torch.no_grad():
                value = encode(*args, **kwargs)
            kept = moved(value, CPU) if is_offloaded(self.pipe) else value
            self.prompt_cache[key] = kept, tensor_devices(value)
            while sum(map(tensor_bytes, self.prompt_cache.values())) > PROMPT_CACHE_BYTES:
                self.prompt_cache.popitem(last=False)
            return value

        with patched(self.pipe, "encode_prompt", memoised):
            yield
