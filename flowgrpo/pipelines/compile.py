"""torch.compile of denoisers, block by block: blocks of one class share one compiled graph."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flowgrpo.core.errors import ConfigError

MAX_GRAPHS = 64
"""Largest number of graphs per class of blocks: with and without gradients, adapter on and off,
each dtype of the adapter, batches of one sample and of more."""


def compile_blocks(denoisers: Mapping[str, nn.Module], backend: str = "inductor") -> None:
    """Makes the repeated blocks of each denoiser compile at their first call.

    Call it after a LoRA is added, so that its layers are compiled with their block. It changes
    limits of `torch._dynamo.config` for the rest of the process; `compiled` restores them.

    Args:
        denoisers: the modules to compile, by name.
        backend: a backend of torch.compile; `eager` only traces.

    Raises:
        ConfigError: a denoiser names no repeated blocks.
    """
    blocks = [block for item in denoisers.items() for block in _repeated_blocks(*item)]
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MAX_GRAPHS)
    # Beyond the limit, blocks would silently run uncompiled and round differently than before.
    config.fail_on_recompile_limit_hit = True
    for block in blocks:
        # By default the first size gets a graph of its own, and a second size one for any size: a
        # rollout of the first graph would be replayed by the second, which rounds differently.
        block.compile(backend=backend, dynamic=True)


def is_compiled(denoisers: Mapping[str, nn.Module]) -> bool:
    """Whether `compile_blocks` was applied to any of the denoisers."""
    return any(_compiled_blocks(denoisers))


@contextmanager
def compiled(denoisers: Mapping[str, nn.Module], backend: str = "inductor") -> Iterator[None]:
    """Within the block the repeated blocks are compiled; afterwards they run uncompiled again, and
    the limits of `torch._dynamo.config` are what they were."""
    config: Any = torch._dynamo.config
    limits = ("recompile_limit", "fail_on_recompile_limit_hit")
    # `patch` restores at the end of the block what `compile_blocks` sets.
    with config.patch({name: getattr(config, name) for name in limits}):
        compile_blocks(denoisers, backend)
        try:
            yield
        finally:
            for block in _compiled_blocks(denoisers):
                block._compiled_call_impl = None


def _compiled_blocks(denoisers: Mapping[str, nn.Module]) -> list[nn.Module]:
    return [
        module
        for denoiser in denoisers.values()
        for module in denoiser.modules()
        if module._compiled_call_impl is not None
    ]


def _repeated_blocks(name: str, denoiser: Any) -> list[nn.Module]:
    """Returns the blocks that diffusers names for compilation; if it names none, those that it
    keeps on one device when it splits a model over several."""
    lists = (getattr(denoiser, key, None) for key in ("_repeated_blocks", "_no_split_modules"))
    classes = {*next(filter(None, lists), ())}
    blocks = [module for module in denoiser.modules() if type(module).__name__ in classes]
    if not blocks:
        raise ConfigError(
            f"model.compile is true, but {name} ({type(denoiser).__name__}) names no repeated "
            "blocks; leave it out."
        )
    return blocks
