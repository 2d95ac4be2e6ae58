"""FSDP2: a denoiser sharded over all processes, in place, so that the pipeline keeps its module.

Every process must then call the denoiser equally often. Checkpoints hold full tensors, so they load
on any number of processes, sharded or not.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(module: nn.Module, device: str) -> None:
    """Shards the parameters over all processes: block by block, then those outside of any block.

    Gradients arrive summed over the processes.

    Args:
        device: type of the device of the shards, `cuda` or `cpu`.
    """
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for part in (*_blocks(module), module):
        fully_shard(part, mesh=mesh)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo can only sum


def is_sharded(module: nn.Module) -> bool:
    """Whether `shard` was applied to a module."""
    return isinstance(module, FSDPModule)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor. If it is sharded, this is a collective that all processes must join."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(value: Tensor, like: Tensor) -> Tensor:
    """The full tensor `value`, equal on all processes, with the device and sharding of `like`."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor):
        return value.to(like.device)
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def drop_gathered(module: nn.Module) -> None:
    """Frees the parameters that a forward pass gathered, so that only the shards remain."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _blocks(module: nn.Module) -> list[Any]:
    """The blocks in the module's own lists, which denoisers call one after the other."""
    lists = [part for part in module.children() if isinstance(part, nn.ModuleList)]
    return [block for blocks in lists for block in blocks if any(True for _ in block.parameters())]
