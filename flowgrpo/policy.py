"""The policy: a stock diffusers pipeline with a trainable LoRA on its denoiser.

`rollout` samples with the pipeline and tapes what it did; `replay` plays the tape with gradients.
The reference policy is the same pipeline with the adapter off.
"""

import functools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict
from torch import Tensor, nn

from flowgrpo.pipelines import find_denoisers, modules_of, quiet
from flowgrpo.schedule import check_scheduler
from flowgrpo.tape import NoiseFunction, StepFunction, Tape, play, record, swapped

ADAPTER = "default"
"""peft's own name; diffusers' savers look for it."""

ATTENTION_PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")
"""Last parts of the attention projections' names in every diffusers denoiser."""

PROMPT_MEMO_SIZE = 512


@dataclass(kw_only=True)
class Rollout:
    """B images of one prompt and the tape they came from."""

    prompt: str
    images: list[Any]
    """B pictures as the pipeline gives them (PIL)."""
    tape: Tape
    call: dict[str, Any]
    """The pipeline's arguments, without generators."""
    seeds: list[int]
    """Seeds of the initial noise, one an image."""


class Policy:
    """A pipeline, its denoisers and the adapter that is trained.

    Args:
        pipe: any diffusers pipeline with a flow-matching scheduler. Its weights are frozen.
        rank, alpha: of the LoRA; its scale is alpha / rank.
        targets: endings of the module names that get a LoRA; default: the attention projections.
        seed: of the LoRA's initial weights.

    Raises:
        ValueError: the pipeline has no denoiser, its scheduler is not understood, or no target
        matches.
    """

    def __init__(
        self,
        pipe: Any,
        *,
        rank: int = 32,
        alpha: int = 64,
        targets: Sequence[str] = ATTENTION_PROJECTIONS,
        seed: int = 0,
    ):
        check_scheduler(pipe.scheduler)
        self.pipe = pipe
        self.denoisers = find_denoisers(pipe)
        self.prompt_memo: OrderedDict[Any, Any] = OrderedDict()
        self.passes = {"denoiser_forwards": 0, "denoiser_backwards": 0}
        """Denoiser calls of rollouts and replays so far."""
        for module in modules_of(pipe).values():
            module.requires_grad_(False).eval()
        for module in self.denoisers.values():
            _add_lora(module, rank=rank, alpha=alpha, targets=targets, seed=seed)

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the frozen denoiser weights."""
        frozen = (p for d in self.denoisers.values() for p in d.parameters() if not p.requires_grad)
        return next(frozen).dtype

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained tensors by name, float32, in a fixed order."""
        return {
            f"{name}.{parameter_name}": parameter
            for name, module in self.denoisers.items()
            for parameter_name, parameter in module.named_parameters()
            if parameter.requires_grad
        }

    def generate(self, prompt: str, seeds: Sequence[int], call: dict[str, Any]) -> list[Any]:
        """Images of `prompt`, one per seed, by the stock pipeline and its own scheduler."""
        with self._prompts_memoised(), quiet(self.pipe):
            return self._call(prompt, seeds, call).images

    def rollout(
        self,
        prompt: str,
        seeds: Sequence[int],
        call: dict[str, Any],
        *,
        kind: str,
        noise_level: float,
        window: range,
        noise: NoiseFunction,
    ) -> Rollout:
        """Samples one image per seed of initial noise, stochastic in `window`, on tape."""
        tape = Tape(
            kind=kind, noise_level=noise_level, window=window if noise_level > 0 else range(0)
        )
        with (
            torch.no_grad(),
            self._prompts_memoised(),
            quiet(self.pipe),
            record(self.pipe, self.denoisers, tape, noise),
        ):
            images = self._call(prompt, seeds, call).images
        last = tape.window_steps[-1].next_latents if tape.window else None
        if last is not None and not last.isfinite().all():
            raise RuntimeError(
                f'latents of prompt "{prompt}" are not finite; lower train.lr or the noise level.'
            )
        self.passes["denoiser_forwards"] += tape.recorded_forwards
        return Rollout(prompt=prompt, images=images, tape=tape, call=call, seeds=list(seeds))

    def replay(self, rollout: Rollout, on_step: StepFunction, *, gradients: bool = True) -> None:
        """Plays the rollout's window steps with the current weights; `on_step` may run backward."""
        before = rollout.tape.replayed_forwards
        with (
            self._prompts_memoised(),
            quiet(self.pipe),
            play(self.pipe, self.denoisers, rollout.tape, on_step, gradients=gradients),
        ):
            self._call(rollout.prompt, rollout.seeds, rollout.call)
        forwards = rollout.tape.replayed_forwards - before
        self.passes["denoiser_forwards"] += forwards
        self.passes["denoiser_backwards"] += forwards if gradients else 0

    def save_lora(self, folder: Path) -> None:
        """Writes the adapter in the pipeline's own format, with its configuration as metadata."""
        arguments: dict[str, Any] = {}
        for name, module in self.denoisers.items():
            layers = get_peft_model_state_dict(module, adapter_name=ADAPTER)
            arguments[f"{name}_lora_layers"] = {k: v.contiguous() for k, v in layers.items()}
            arguments[f"{name}_lora_adapter_metadata"] = peft_config(module).to_dict()
        self.pipe.save_lora_weights(str(folder), **arguments)

    def _call(self, prompt: str, seeds: Sequence[int], call: dict[str, Any]) -> Any:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return self.pipe(
            prompt=prompt, num_images_per_prompt=len(seeds), generator=generators, **call
        )

    @contextmanager
    def _prompts_memoised(self) -> Iterator[None]:
        """`encode_prompt` runs once for each prompt and set of options."""
        encode = self.pipe.encode_prompt

        @functools.wraps(encode)
        def memoised(*args: Any, **kwargs: Any) -> Any:
            key = _memo_key((args, tuple(sorted(kwargs.items()))))
            if key is None:
                return encode(*args, **kwargs)
            if key not in self.prompt_memo:
                with torch.no_grad():
                    self.prompt_memo[key] = encode(*args, **kwargs)
            self.prompt_memo.move_to_end(key)
            while len(self.prompt_memo) > PROMPT_MEMO_SIZE:
                self.prompt_memo.popitem(last=False)
            return self.prompt_memo[key]

        with swapped(self.pipe, "encode_prompt", memoised):
            yield


@contextmanager
def reference(policy: Policy) -> Iterator[None]:
    """Within the block the adapter is off: the policy is the base model.

    Sets peft's switch on each layer itself: the public `enable_adapters` also changes
    requires_grad.
    """
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
    """Within the block the adapter is what a user will load: the average, if there is one, in the
    dtype of the base weights, to which diffusers casts what it loads."""
    parameters = policy.parameters
    live = {name: parameter.data for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.data = (average or live)[name].to(policy.dtype)
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = live[name]


def load_weights(policy: Policy, values: dict[str, Tensor]) -> None:
    """Copies `values` into the adapter, every tensor by its name."""
    parameters = policy.parameters
    shapes = {name: value.shape for name, value in values.items()}
    expected = {name: parameter.shape for name, parameter in parameters.items()}
    if shapes != expected:
        odd = min(name for name, _ in shapes.items() ^ expected.items())
        raise ValueError(
            f"adapter weights differ in {odd}; use the LoRA settings they were made with."
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])


def peft_config(module: Any) -> LoraConfig:
    """The adapter's configuration, as peft keeps it on the module."""
    return module.peft_config[ADAPTER]


def _add_lora(module: Any, *, rank: int, alpha: int, targets: Sequence[str], seed: int) -> None:
    if getattr(module, "peft_config", None):
        raise ValueError(
            f"{type(module).__name__} already has the adapters {sorted(module.peft_config)}, but "
            "training adds its own; unload them first (pipe.unload_lora_weights())."
        )
    linears = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    chosen = [name for name in linears if any(f".{name}".endswith(f".{t}") for t in targets)]
    if not chosen:
        endings = sorted({name.rsplit(".", 1)[-1] for name in linears if not name[-1].isdigit()})
        raise ValueError(
            f"train.lora.targets is {list(targets)}, but no linear layer of "
            f"{type(module).__name__} ends so; "
            f"candidates: {', '.join(endings)}."
        )
    # Initial weights are a pure function of the seed, and the caller's generator stays untouched.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module.add_adapter(
            LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen, lora_dropout=0.0), ADAPTER
        )
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    module.eval()


def _memo_key(value: Any) -> Any:
    """`value` as a hashable key; None where it holds tensors or pictures."""
    if isinstance(value, (str, int, float, bool, torch.device, torch.dtype, type(None))):
        return (type(value), value)
    if isinstance(value, (list, tuple)):
        parts = tuple(_memo_key(v) for v in value)
        return None if None in parts else parts
    return None
