"""Several processes as one run: shards of the work, and the collectives between them.

Each process samples entire groups, so a group's statistics need no other process. Rewards are
gathered, which makes advantages the same on any number of processes; gradients are summed once per
update. Messages are JSON in tensors, never pickles. Launch with `torchrun` or `accelerate`.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowgrpo.core.errors import ConfigError
from flowgrpo.distributed.watchdog import Watchdog, explain_lost_process

T = TypeVar("T")


COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Long, because processes may do unequal work; the watchdog detects dead ones."""


@dataclass(kw_only=True)
class Processes:
    """This process among those of the run. With a single process all collectives are trivial."""

    rank: int = 0
    """Index of this process."""
    world_size: int = 1
    """Number of processes."""
    control_group: Any = None
    """gloo process group of the JSON messages, which are on the CPU."""
    watchdog: Watchdog | None = field(default=None, repr=False)
    """Ends this process when another one is gone; None before `start_watchdog`."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def warn(self, message: str) -> None:
        """Prints a warning, on rank 0 alone."""
        if self.is_main:
            print(f"warning: {message}", file=sys.stderr)

    def shard(self, items: Sequence[T], *, padded: bool = False) -> list[T]:
        """Returns this process's shard of `items`: those at rank, rank + world_size, ...

        Args:
            padded: whether to repeat the last item so that all shards have the same length.
        """
        if padded and items:
            items = [*items, *[items[-1]] * (-len(items) % self.world_size)]
        return list(items[self.rank :: self.world_size])

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the JSON values of all processes, by rank. Floats arrive bit for bit."""
        if self.world_size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with explain_lost_process(self.watchdog):
            dist.all_gather(sizes, torch.tensor([len(mine)]), group=self.control_group)
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(mine)] = mine
            texts = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(texts, padded, group=self.control_group)
        pairs = zip(texts, sizes, strict=True)
        return [json.loads(text[: int(size)].numpy().tobytes()) for text, size in pairs]

    def broadcast(self, value: Any) -> Any:
        """Returns the JSON value of rank 0."""
        return self.all_gather(value if self.is_main else None)[0]

    def any(self, value: bool) -> bool:
        """Whether `value` is true on any process."""
        return any(self.all_gather(value))

    def barrier(self) -> None:
        """Waits until all processes are here."""
        self.all_gather(None)

    def unshard(self, shards: Sequence[Sequence[T]], count: int) -> list[T]:
        """Returns `count` items in their order before `shard`, from the shards of all ranks."""
        return [shards[i % self.world_size][i // self.world_size] for i in range(count)]

    def on_main(self, action: Callable[[], None]) -> None:
        """Runs `action` on rank 0; a ConfigError of it is raised on all processes."""
        message = None
        if self.is_main:
            try:
                action()
            except ConfigError as error:
                message = str(error)
        message = self.broadcast(message)
        if message is not None:
            raise ConfigError(message)

    def assert_same(self, name: str, value: Any) -> None:
        """Raises ConfigError if the JSON `value` differs between processes."""
        values = self.all_gather(value)
        for rank, other in enumerate(values):
            if other != values[self.rank]:
                raise ConfigError(
                    f"{name} of process {rank} differs from that of process {self.rank}, but all "
                    "must have the same; give every machine the same files and versions."
                )

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sums each gradient over the processes, in one flat all-reduce.

        A tensor without a gradient on any process gets none, so that the optimizer skips it, as it
        would with one process.
        """
        if self.world_size == 1:
            return
        have = torch.tensor([float(p.grad is not None) for p in parameters])
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([have.to(parts[0]), *(part.flatten() for part in parts)])
        with explain_lost_process(self.watchdog):
            dist.all_reduce(flat)
        have, sums = flat[: len(parts)], flat[len(parts) :].split([p.numel() for p in parts])
        for parameter, counted, total in zip(parameters, have.tolist(), sums, strict=True):
            parameter.grad = total.view_as(parameter) if counted else None

    def start_watchdog(self, on_process_lost: Callable[[str, str], None]) -> None:
        """Ends this process when another one is gone, from now on.

        Args:
            on_process_lost: called with the reason's short name and a message before this
                process ends.
        """
        if self.world_size > 1:
            self.watchdog = Watchdog(self.rank, self.world_size, self.broadcast, on_process_lost)

    def shut_down(self) -> None:
        """Stops the watchdog once all processes have reached the end of the run."""
        if self.watchdog is not None:
            self.watchdog.disarm()
            self.barrier()
            self.watchdog.stop()
            self.watchdog = None


def init_processes() -> Processes:
    """Joins the processes of torchrun or accelerate, or the caller's process group; else one alone.

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
    control_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    return Processes(rank=rank, world_size=world_size, control_group=control_group)


def _choose_gpu() -> None:
    if not torch.cuda.is_available():
        return
    index, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= gpus:
        raise ConfigError(
            f"LOCAL_RANK is {index}, but this machine has {gpus} GPUs; launch one process per GPU."
        )
    torch.cuda.set_device(index)


def checksum(tensors: Sequence[Tensor]) -> int:
    """Returns a checksum, in [0, 2^64), of the bits of float32 tensors, computed on their device.

    The checksums of all ranks' shards add up to that of the full tensors, modulo 2^64.
    """
    total = 0
    for number, tensor in enumerate(tensors, start=1):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        bits = local.detach().contiguous().view(torch.int32)
        total += number * int(bits.sum(dtype=torch.int64))
    return total % 2**64
