"""Offloads a pipeline's encoders and decoders to the CPU while they do not run.

Denoisers stay on the device. diffusers' own `enable_model_cpu_offload` would move them as well, to
the CPU at the end of each call and back, so this module has hooks of its own.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from flowgrpo.core.devices import move_tensors, to_cpu, to_device


class Stages:
    """Modules that are moved to the CPU now, and are on the device only while they run.

    A stage is moved to the device when it or a submodule of it is called, and stays until a module
    of the loop or `leave` is called. So all text encoders are on the device together, and move
    once for both prompts of a guided call.

    Args:
        stages: modules that run before or after the loop.
        loop_modules: modules of the loop, which need the memory; they stay where they are.
        device: device that all of them run on.
    """

    def __init__(
        self, stages: Iterable[nn.Module], loop_modules: Iterable[nn.Module], device: torch.device
    ):
        self.device = device
        self._awake: list[nn.Module] = []
        for stage in stages:
            to_cpu(stage)
            # Submodules too: some pipelines call them directly, and a VAE's `decode` is not its
            # forward, so only its submodules' hooks run.
            for module in stage.modules():
                module.register_forward_pre_hook(self._waking_hook(stage), with_kwargs=True)
        for module in loop_modules:
            module.register_forward_pre_hook(lambda *_: self.leave())

    def leave(self) -> None:
        """Sends the stages that are on the device back to the CPU."""
        while self._awake:
            to_cpu(self._awake.pop())

    def _waking_hook(self, stage: nn.Module) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if stage in self._awake:
                return None
            to_device(stage, self.device)
            self._awake.append(stage)
            # Some pipelines put a stage's inputs on the device where they find the stage, the CPU.
            # Submodules keep their own input containers, because some write to them.
            return move_tensors((args, kwargs), self.device) if module is stage else None

        return hook


_stages: WeakKeyDictionary[Any, Stages] = WeakKeyDictionary()
"""Stages of each offloaded pipeline."""


def offload(
    pipe: Any, stages: Iterable[nn.Module], loop_modules: Iterable[nn.Module], device: torch.device
) -> None:
    """Offloads the stages of a pipeline, as `Stages` describes; once per pipeline."""
    if pipe not in _stages:
        _stages[pipe] = Stages(stages, loop_modules, device)


def is_offloaded(pipe: Any) -> bool:
    """Whether `offload` was called for the pipeline."""
    return pipe in _stages


@contextmanager
def offloaded_afterwards(pipe: Any) -> Iterator[None]:
    """After the block, all stages of an offloaded pipeline are on the CPU."""
    try:
        yield
    finally:
        if pipe in _stages:
            _stages[pipe].leave()
