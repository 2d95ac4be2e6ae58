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

from flowgrpo.core.errors import ConfigError
from flowgrpo.distributed.watchdog import Watchdog, explain_loss

T = TypeVar("T")


COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Of one process for the others, whose work may be any amount more; the watch knows of deaths."""


@dataclass(kw_only=True)
class Processes:
    """This process among those of the run; one alone needs none of it."""

    rank: int = 0
    world_size: int = 1
    messages: Any = None
    """Process group of the JSON messages, on the CPU."""
    watchdog: Watchdog | None = field(default=None, repr=False)
    """Ends this process when another one is gone."""

    @property
    def is_main(self) -> bool:
        """The one that writes files and prints."""
        return self.rank == 0

    def shard(self, items: Sequence[T], *, padded: bool = False) -> list[T]:
        """This process's share of `items`: every `count`-th.

        Args:
            padded: all shares have the same length; the last item fills up the shorter ones.
        """
        if padded and items:
            items = [*items, *[items[-1]] * (-len(items) % self.world_size)]
        return list(items[self.rank :: self.world_size])

    def all_gather(self, value: Any) -> list[Any]:
        """What each process says, by rank. A value is JSON; floats arrive bit for bit."""
        if self.world_size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with explain_loss(self.watchdog):
            dist.all_gather(sizes, torch.tensor([len(mine)]), group=self.messages)
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(mine)] = mine
            texts = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(texts, padded, group=self.messages)
        pairs = zip(texts, sizes, strict=True)
        return [json.loads(text[: int(size)].numpy().tobytes()) for text, size in pairs]

    def broadcast(self, value: Any) -> Any:
        """What the first process says."""
        return self.all_gather(value if self.is_main else None)[0]

    def any(self, value: bool) -> bool:
        return any(self.all_gather(value))

    def barrier(self) -> None:
        """Until all are here."""
        self.all_gather(None)

    def unshard(self, shares: Sequence[Sequence[T]], count: int) -> list[T]:
        """The items in order, from the shares that `shard` made of `count` of them."""
        return [shares[i % self.world_size][i // self.world_size] for i in range(count)]

    def on_main(self, action: Callable[[], None]) -> None:
        """Runs `action` on the first process; its ConfigError is raised on all."""
        fault = None
        if self.is_main:
            try:
                action()
            except ConfigError as error:
                fault = str(error)
        fault = self.broadcast(fault)
        if fault is not None:
            raise ConfigError(fault)

    def assert_same(self, what: str, value: Any) -> None:
        """Raises ConfigError where `value` differs between processes."""
        said = self.all_gather(value)
        for rank, other in enumerate(said):
            if other != said[self.rank]:
                raise ConfigError(
                    f"{what} of process {rank} differs from that of process {self.rank}, but all "
                    "must work on the same; give every machine the same files and versions."
                )

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Makes each gradient the sum over processes, in one flat all-reduce.

        A tensor that has a gradient nowhere keeps none, so that the optimizer leaves it alone, as
        it would in one process.
        """
        if self.world_size == 1:
            return
        have = torch.tensor([float(p.grad is not None) for p in parameters])
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([have.to(parts[0]), *(part.flatten() for part in parts)])
        with explain_loss(self.watchdog):
            dist.all_reduce(flat)
        have, sums = flat[: len(parts)], flat[len(parts) :].split([p.numel() for p in parts])
        for parameter, counted, total in zip(parameters, have.tolist(), sums, strict=True):
            parameter.grad = total.view_as(parameter) if counted else None

    def start_watchdog(self, on_loss: Callable[[str, str], None]) -> None:
        """From now on this process ends when another one is gone, after a call of `on_loss` with
        the reason's name and a sentence."""
        if self.world_size > 1:
            self.watchdog = Watchdog(self.rank, self.world_size, self.broadcast, on_loss)

    def shut_down(self) -> None:
        """The run is over: nobody is missed any more."""
        if self.watchdog is not None:
            self.watchdog.disarm()
            self.barrier()
            self.watchdog.stop()
            self.watchdog = None


def init_processes() -> Processes:
    """The processes that torchrun, accelerate or a group of the caller's own has made; else one.

    Raises:
        ConfigError: there are more processes on this machine than GPUs.
    """
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return Processes()
        _choose_gpu()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return Processes()
    messages = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    return Processes(rank=rank, world_size=world_size, messages=messages)


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
