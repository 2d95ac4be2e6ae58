"""FSDP2: a denoiser spread over all processes, in place, so that the pipeline keeps its module.

Every process must then call the denoiser equally often; a checkpoint holds whole tensors, so that
it loads on any number of processes, sharded or not.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(module: nn.Module, device: str) -> None:
    """Spreads the parameters over all processes: block by block, then what is left.

    Gradients arrive summed over the processes.

    Args:
        device: type of where the shards go, `cuda` or `cpu`.
    """
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for part in (*_blocks(module), module):
        fully_shard(part, mesh=mesh)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor; of a sharded one on all processes, which must all ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(value: Tensor, like: Tensor) -> Tensor:
    """`value`, a whole tensor that all processes have, placed and sharded as `like` is."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor):
        return value.to(like.device)
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def drop_gathered(module: nn.Module) -> None:
    """Drops what a forward pass has gathered, so that the parameters are the shards again."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _blocks(module: nn.Module) -> list[Any]:
    """The members of the module's own lists, which denoisers call one after the other."""
    lists = [part for part in module.children() if isinstance(part, nn.ModuleList)]
    return [block for blocks in lists for block in blocks if any(True for _ in block.parameters())]
