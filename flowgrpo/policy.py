"""The policy: a stock diffusers pipeline with trainable weights on its denoiser, mostly a LoRA.

`rollout` samples with the pipeline and tapes what it did; `replay` plays the tape with gradients.
The reference policy is the same pipeline as it was before training.
"""

import functools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flowgrpo.calls import find_style, generate, one_sample_a_call
from flowgrpo.compilation import is_compiled
from flowgrpo.config import ConfigError, LoraSettings, TrainConfig
from flowgrpo.guards import Stopped
from flowgrpo.lora import (
    ADAPTER,
    add_lora,
    dtypes_as_loaded,
    load_lora,
    save_lora,
    train_in_float32,
)
from flowgrpo.media import Sample, is_video
from flowgrpo.pipelines import find_denoisers, find_models, modules_of
from flowgrpo.placement import CPU, devices_of, is_offloaded, moved, returned, stages_leave_after
from flowgrpo.prompts import Row
from flowgrpo.schedule import check_scheduler
from flowgrpo.sharding import as_stock, drop_gathered, is_sharded, placed_like, shard
from flowgrpo.tape import NoiseFunction, StepFunction, Tape, play, record, swapped

PROMPT_MEMO_BYTES = 2**30
"""Of remembered prompt embeddings; on the pipeline's device, or where that is offloaded, on the
CPU."""


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
        self.prompt_memo: OrderedDict[Any, Any] = OrderedDict()
        self.passes = {"denoiser_forwards": 0, "denoiser_backwards": 0}
        """Denoiser calls of rollouts and replays since the last count."""
        self.makes_videos: bool | None = None
        """Known from the first rollout on."""
        self.is_lora = train.lora is not None
        for module in modules_of(pipe).values():
            module.requires_grad_(False).eval()
        self._make_trainable(train, seed)
        for module in self.denoisers.values():
            _let_gradients_through(module)
        if train.gradient_checkpointing:
            _checkpoint_gradients(self.denoisers)
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

    def count_passes(self) -> dict[str, int]:
        """Denoiser calls since the last count."""
        passes, self.passes = self.passes, dict.fromkeys(self.passes, 0)
        return passes

    def generate(self, row: Row, seeds: Sequence[int], call: dict[str, Any]) -> list[Sample]:
        """Samples of `row`, one per seed, by the stock pipeline and its own scheduler."""
        with self.prompts_memoised(), stages_leave_after(self.pipe):
            return generate(self.pipe, row, seeds, call)

    def rollout(
        self,
        row: Row,
        seeds: Sequence[int],
        call: dict[str, Any],
        *,
        kind: str,
        noise_level: float,
        window: range,
        noise: NoiseFunction,
    ) -> Rollout:
        """One sample per seed of initial noise, stochastic in `window`, on tape."""
        tape = Tape(
            kind=kind, noise_level=noise_level, window=window if noise_level > 0 else range(0)
        )
        if find_style(self.pipe, row, call).single and len(seeds) > 1:
            raise one_sample_a_call(self.pipe, len(seeds))
        gradients = is_compiled(self.denoisers)
        with torch.no_grad(), record(self.pipe, self.taped, tape, noise, gradients=gradients):
            samples = self.generate(row, seeds, call)
        for step in tape.window_steps[-1:]:
            if not step.next_latents.isfinite().all():
                raise Stopped(
                    "latents_not_finite",
                    f'latents of prompt "{row.prompt}" are not finite; lower train.lr or the noise '
                    "level.",
                )
        self.makes_videos = is_video(samples[0])
        self.passes["denoiser_forwards"] += tape.recorded_forwards
        return Rollout(row=row, samples=samples, tape=tape, call=call, seeds=list(seeds))

    def replay(self, rollout: Rollout, on_step: StepFunction, *, gradients: bool = True) -> None:
        """Plays the rollout's window steps with the current weights; `on_step` may run backward."""
        tape = rollout.tape.to(self.device)  # a tape that waits elsewhere is let go of afterwards
        with play(self.pipe, self.taped, tape, on_step, gradients=gradients):
            self.generate(rollout.row, rollout.seeds, rollout.call)
        forwards = tape.replayed_forwards - rollout.tape.replayed_forwards
        rollout.tape.replayed_forwards = tape.replayed_forwards
        self.passes["denoiser_forwards"] += forwards
        self.passes["denoiser_backwards"] += forwards if gradients else 0

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
            with as_stock(module):
                if write:
                    module.save_pretrained(folder / name)

    @contextmanager
    def prompts_memoised(self) -> Iterator[None]:
        """`encode_prompt` runs once for each prompt and set of options."""
        encode = getattr(self.pipe, "encode_prompt", None)
        if encode is None:
            yield
            return

        @functools.wraps(encode)
        def memoised(*args: Any, **kwargs: Any) -> Any:
            key = _memo_key((args, tuple(sorted(kwargs.items()))))
            if key is None:
                return encode(*args, **kwargs)
            if key in self.prompt_memo:
                self.prompt_memo.move_to_end(key)
                return returned(*self.prompt_memo[key])
            with torch.no_grad():
                value = encode(*args, **kwargs)
            kept = moved(value, CPU) if is_offloaded(self.pipe) else value
            self.prompt_memo[key] = kept, devices_of(value)
            while sum(map(_bytes_of, self.prompt_memo.values())) > PROMPT_MEMO_BYTES:
                self.prompt_memo.popitem(last=False)
            return value

        with swapped(self.pipe, "encode_prompt", memoised):
            yield


@contextmanager
def reference(policy: Policy) -> Iterator[None]:
    """Within the block the policy is what it was before training.

    With a fresh LoRA that is the base model: the adapter is off. Sets peft's switch on each layer
    itself, since the public `enable_adapters` also changes requires_grad.
    """
    if policy.start is not None:
        with trained_values(policy, policy.start):
            yield
        return
    layers = [
        m for d in policy.denoisers.values() for m in d.modules() if isinstance(m, BaseTunerLayer)
    ]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def as_used(policy: Policy, average: dict[str, Tensor] | None = None) -> Iterator[None]:
    """Within the block the weights are what a user will load: the average, if there is one, and an
    adapter in the dtype of its layers, to which diffusers casts what it loads."""
    values = average or {name: p.data for name, p in policy.parameters.items()}
    dtypes = {
        f"{name}.{key}": dtype
        for name, module in policy.denoisers.items()
        for key, dtype in dtypes_as_loaded(module).items()
    }
    loaded = {name: value.to(dtypes.get(name, value.dtype)) for name, value in values.items()}
    with trained_values(policy, loaded):
        yield


@contextmanager
def trained_values(policy: Policy, values: dict[str, Tensor]) -> Iterator[None]:
    """Within the block the trained weights have these values."""
    parameters = policy.parameters
    if policy.is_sharded:  # shards are views of a buffer that is gathered, so they are written into
        live = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        load_weights(policy, values)
        try:
            yield
        finally:
            load_weights(policy, live)
        return
    live = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = values[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = live[name]


def load_weights(policy: Policy, values: dict[str, Tensor]) -> None:
    """Copies `values`, whole or sharded, into the trained weights, every tensor by its name."""
    parameters = policy.parameters
    shapes = {name: value.shape for name, value in values.items()}
    expected = {name: parameter.shape for name, parameter in parameters.items()}
    if shapes != expected:
        odd = min(name for name, _ in shapes.items() ^ expected.items())
        raise ValueError(f"trained weights differ in {odd}; use the settings they were made with.")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(placed_like(values[name], parameter))


def _let_gradients_through(module: nn.Module) -> None:
    """Parts that run without gradients in evaluation mode are put in training mode, they alone.

    Some have a faster method for inference under `no_grad` (routed experts, say): correct values,
    and gradients that are silently wrong. That the values stay the same is what a check proves.
    """
    for part in module.modules():
        forward = getattr(type(part).forward, "__code__", None)
        branches = forward is not None and "training" in forward.co_names
        methods = [m for cls in type(part).__mro__ for n, m in vars(cls).items() if n != "forward"]
        if branches and any(map(_is_without_gradients, methods)):
            part.training = True


def _is_without_gradients(method: Any) -> bool:
    """Whether a function is decorated with `torch.no_grad` or `torch.inference_mode`."""
    home = getattr(method, "__globals__", {}).get("__name__")
    return home == "torch.utils._contextlib" and hasattr(method, "__wrapped__")


def _checkpoint_gradients(denoisers: dict[str, Any]) -> None:
    for name, denoiser in denoisers.items():
        if not getattr(denoiser, "_supports_gradient_checkpointing", False):
            raise ConfigError(
                f"train.gradient_checkpointing is true, but {name} ({type(denoiser).__name__}) has "
                "none; leave it out."
            )
        denoiser.enable_gradient_checkpointing()


def _bytes_of(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, Tensor))


def _memo_key(value: Any) -> Any:
    """`value` as a hashable key; None where it holds tensors or pictures."""
    if isinstance(value, (str, int, float, bool, torch.device, torch.dtype, type(None))):
        return (type(value), value)
    if isinstance(value, Mapping):
        value = sorted(value.items())
    if isinstance(value, (list, tuple)):
        parts = tuple(_memo_key(v) for v in value)
        return None if None in parts else parts
    return None
