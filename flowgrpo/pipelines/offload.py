"""Where weights wait: encoders, decoders and the models of rewards on the CPU, unless they work.

Denoisers stay on the device. Diffusers' own `enable_model_cpu_offload` would move them too, to the
CPU and back at the end of each call, so the moves are made here, by hooks on the modules.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from flowgrpo.core.devices import moved, rest, wake


class Stages:
    """Modules that are on the device only while they work, and wait on the CPU from now on.

    A stage comes when it or a part of it is called, and stays until one of the `workers` is called
    or `leave` is: encoders of one prompt are there together, and move once for both prompts of a
    guided call.

    Args:
        stages: whatever runs before or after the loop.
        workers: the modules of the loop, which need the room; they stay where they are.
        device: where all of them work.
    """

    def __init__(
        self, stages: Iterable[nn.Module], workers: Iterable[nn.Module], device: torch.device
    ):
        self.device = device
        self._awake: list[nn.Module] = []
        for stage in stages:
            rest(stage)
            # Its parts too: some pipelines call these, and `decode` is no module's forward.
            for part in stage.modules():
                part.register_forward_pre_hook(self._waking(stage), with_kwargs=True)
        for worker in workers:
            worker.register_forward_pre_hook(lambda *_: self.leave())

    def leave(self) -> None:
        """Sends the stages that are on the device back to the CPU."""
        while self._awake:
            rest(self._awake.pop())

    def _waking(self, stage: nn.Module) -> Any:
        def hook(part: nn.Module, args: Any, kwargs: Any) -> Any:
            if any(stage is awake for awake in self._awake):
                return None
            wake(stage, self.device)
            self._awake.append(stage)
            # Some pipelines put a stage's inputs where they find it. Its parts get their own
            # containers, which they may write to.
            return moved((args, kwargs), self.device) if part is stage else None

        return hook


_stages: WeakKeyDictionary[Any, Stages] = WeakKeyDictionary()


def offload(
    pipe: Any, stages: Iterable[nn.Module], workers: Iterable[nn.Module], device: torch.device
) -> None:
    """Lets the stages of a pipeline wait on the CPU; see `Stages`. Once for each pipeline."""
    if pipe not in _stages:
        _stages[pipe] = Stages(stages, workers, device)


def is_offloaded(pipe: Any) -> bool:
    return pipe in _stages


@contextmanager
def offloaded_afterwards(pipe: Any) -> Iterator[None]:
    """After the block no stage of an offloaded pipeline is on the device."""
    try:
        yield
    finally:
        if pipe in _stages:
            _stages[pipe].leave()
