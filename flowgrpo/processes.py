"""Several processes as one run: who makes what, and the few things they tell each other.

Each process makes whole groups, so a group's statistics need no one else. Rewards are then known to
all, which makes advantages the same numbers on any number of processes; gradients are summed once
an update. Messages are JSON in tensors, never pickles. Launch with `torchrun` or `accelerate`.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowgrpo.config import ConfigError
from flowgrpo.watch import Watch, lost

T = TypeVar("T")

PATIENCE = timedelta(days=7)
"""Of one process for the others, whose work may be any amount more; the watch knows of deaths."""


@dataclass(kw_only=True)
class Processes:
    """This process among those of the run; one alone needs none of it."""

    rank: int = 0
    count: int = 1
    messages: Any = None
    """Process group of the JSON messages, on the CPU."""
    watch: Watch | None = field(default=None, repr=False)
    """Ends this process when another one is gone."""

    @property
    def first(self) -> bool:
        """The one that writes files and prints."""
        return self.rank == 0

    def own(self, items: Sequence[T], *, padded: bool = False) -> list[T]:
        """This process's share of `items`: every `count`-th.

        Args:
            padded: all shares have the same length; the last item fills up the shorter ones.
        """
        if padded and items:
            items = [*items, *[items[-1]] * (-len(items) % self.count)]
        return list(items[self.rank :: self.count])

    def gather(self, value: Any) -> list[Any]:
        """What each process says, by rank. A value is JSON; floats arrive bit for bit."""
        if self.count == 1:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        with lost(self.watch):
            dist.all_gather(sizes, torch.tensor([len(mine)]), group=self.messages)
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(mine)] = mine
            texts = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(texts, padded, group=self.messages)
        pairs = zip(texts, sizes, strict=True)
        return [json.loads(text[: int(size)].numpy().tobytes()) for text, size in pairs]

    def agree(self, value: Any) -> Any:
        """What the first process says."""
        return self.gather(value if self.first else None)[0]

    def any(self, value: bool) -> bool:
        return any(self.gather(value))

    def wait(self) -> None:
        """Until all are here."""
        self.gather(None)

    def joined(self, shares: Sequence[Sequence[T]], count: int) -> list[T]:
        """The items in order, from the shares that `own` made of `count` of them."""
        return [shares[i % self.count][i // self.count] for i in range(count)]

    def first_does(self, action: Callable[[], None]) -> None:
        """Runs `action` on the first process; its ConfigError is raised on all."""
        fault = None
        if self.first:
            try:
                action()
            except ConfigError as error:
                fault = str(error)
        fault = self.agree(fault)
        if fault is not None:
            raise ConfigError(fault)

    def same(self, what: str, value: Any) -> None:
        """Raises ConfigError where `value` differs between processes."""
        said = self.gather(value)
        for rank, other in enumerate(said):
            if other != said[self.rank]:
                raise ConfigError(
                    f"{what} of process {rank} differs from that of process {self.rank}, but all "
                    "must work on the same; give every machine the same files and versions."
                )

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Makes each gradient the sum over processes, in one flat all-reduce.

        A tensor that has a gradient nowhere keeps none, so that the optimiser leaves it alone, as
        it would in one process.
        """
        if self.count == 1:
            return
        have = torch.tensor([float(p.grad is not None) for p in parameters])
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([have.to(parts[0]), *(part.flatten() for part in parts)])
        with lost(self.watch):
            dist.all_reduce(flat)
        have, sums = flat[: len(parts)], flat[len(parts) :].split([p.numel() for p in parts])
        for parameter, counted, total in zip(parameters, have.tolist(), sums, strict=True):
            parameter.grad = total.view_as(parameter) if counted else None

    def look_out(self, on_loss: Callable[[str, str], None]) -> None:
        """From now on this process ends when another one is gone, after a call of `on_loss` with
        the reason's name and a sentence."""
        if self.count > 1:
            self.watch = Watch(self.rank, self.count, self.agree, on_loss)

    def leave(self) -> None:
        """The run is over: nobody is missed any more."""
        if self.watch is not None:
            self.watch.ending()
            self.wait()
            self.watch.stop()
            self.watch = None


def join() -> Processes:
    """The processes that torchrun, accelerate or a group of the caller's own has made; else one.

    Raises:
        ConfigError: there are more processes on this machine than GPUs.
    """
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return Processes()
        _choose_gpu()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE)
    rank, count = dist.get_rank(), dist.get_world_size()
    if count == 1:
        return Processes()
    messages = dist.new_group(backend="gloo", timeout=PATIENCE)
    return Processes(rank=rank, count=count, messages=messages)


def _choose_gpu() -> None:
    if not torch.cuda.is_available():
        return
    place, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= gpus:
        raise ConfigError(
            f"LOCAL_RANK is {place}, but this machine has {gpus} GPUs; launch one process a GPU."
        )
    torch.cuda.set_device(place)


def checksum(tensors: Sequence[Tensor]) -> int:
    """Of the bits of float32 tensors, without a copy to the CPU; those of shards add up to that of
    the whole, modulo 2^64."""
    total = 0
    for number, tensor in enumerate(tensors, start=1):
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        bits = own.detach().contiguous().view(torch.int32)
        total += number * int(bits.sum(dtype=torch.int64))
    return total % 2**64
