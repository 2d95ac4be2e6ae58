"""torch.compile of denoisers, block by block: blocks of one class share one compiled graph."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flowgrpo.core.errors import ConfigError

GRAPHS = 64
"""Of one class of blocks, at most: with and without gradients, adapter on and off, each dtype of
the adapter, batches of one sample and of more."""


def compile_blocks(denoisers: Mapping[str, nn.Module], backend: str = "inductor") -> None:
    """Compiles the repeated blocks of each denoiser, where they are first called.

    After a LoRA is added: its layers are compiled with their block.

    Args:
        backend: as torch.compile names them; `eager` checks the tracing alone.

    Raises:
        ConfigError: a denoiser names no such blocks.
    """
    chosen = [block for item in denoisers.items() for block in _repeated_blocks(*item)]
    limit: Any = torch._dynamo.config
    limit.recompile_limit = max(limit.recompile_limit, GRAPHS)
    # Beyond the limit blocks would silently run uncompiled, and round otherwise than before.
    limit.fail_on_recompile_limit_hit = True
    for block in chosen:
        # Else a first size is compiled for itself and again for any size once a second one comes,
        # and a rollout of the one graph would be replayed by the other.
        block.compile(backend=backend, dynamic=True)


def is_compiled(denoisers: Mapping[str, nn.Module]) -> bool:
    return any(_compiled_blocks(denoisers))


@contextmanager
def compiled(denoisers: Mapping[str, nn.Module], backend: str = "inductor") -> Iterator[None]:
    """Within the block the repeated blocks are compiled; after it they run as they are written."""
    compile_blocks(denoisers, backend)
    try:
        yield
    finally:
        for part in _compiled_blocks(denoisers):
            part._compiled_call_impl = None


def _compiled_blocks(denoisers: Mapping[str, nn.Module]) -> list[nn.Module]:
    return [
        part
        for denoiser in denoisers.values()
        for part in denoiser.modules()
        if part._compiled_call_impl is not None
    ]


def _repeated_blocks(name: str, denoiser: Any) -> list[nn.Module]:
    """Blocks that diffusers names for this, or else those that it keeps whole when it splits a
    model over devices."""
    lists = (getattr(denoiser, key, None) for key in ("_repeated_blocks", "_no_split_modules"))
    classes = {*next(filter(None, lists), ())}
    found = [part for part in denoiser.modules() if type(part).__name__ in classes]
    if not found:
        raise ConfigError(
            f"model.compile is true, but {name} ({type(denoiser).__name__}) names no repeated "
            "blocks; leave it out."
        )
    return found
