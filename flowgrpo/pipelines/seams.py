"""All patches of live objects, as context managers that undo them."""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from flowgrpo.distributed.fsdp import full_tensor, is_sharded


@contextmanager
def loop_patched(
    scheduler: Any, denoisers: dict[str, nn.Module], step: Callable, forward: Callable
) -> Iterator[None]:
    """`step` and `forward` stand in for the stock methods, on these instances only."""
    # A bound method, not a closure: deepcopy of the scheduler rebinds it to the copy. `wraps` keeps
    # the signature, which pipelines inspect.
    wrapped = functools.wraps(type(scheduler).step)(step)
    with ExitStack() as stack:
        stack.enter_context(patched(scheduler, "step", types.MethodType(wrapped, scheduler)))
        for name, module in denoisers.items():
            # Above the hooks of a sharded module: a taped output must gather nothing.
            seam = "_call_impl" if is_sharded(module) else "forward"
            stock = getattr(module, seam)
            taped = functools.wraps(stock)(partial(forward, name, stock))
            stack.enter_context(patched(module, seam, taped))
        yield


@contextmanager
def patched(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    """Within the block `owner.attribute` is `value`; afterwards the instance is as it was."""
    absent = object()
    before = vars(owner).get(attribute, absent)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        if before is absent:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, before)


@contextmanager
def float32_decoding(pipe: Any) -> Iterator[None]:
    """Within the block a half-precision VAE whose configuration says `force_upcast` decodes in
    float32; some would overflow. Encoding stays the pipeline's own."""
    vae = getattr(pipe, "vae", None)
    if vae is None or not vae.config.get("force_upcast") or vae.dtype == torch.float32:
        yield
        return
    dtype, stock = vae.dtype, vae.decode

    @functools.wraps(stock)
    def decode(latents: Any, *args: Any, **kwargs: Any) -> Any:
        vae.to(torch.float32)
        try:
            return stock(latents.float(), *args, **kwargs)
        finally:
            vae.to(dtype)

    with patched(vae, "decode", decode):
        yield


@contextmanager
def without_progress_bar(pipe: Any) -> Iterator[None]:
    """No progress bar of the pipeline's own."""
    with patched(pipe, "_progress_bar_config", {"disable": True}):
        yield


@contextmanager
def as_unsharded(module: Any) -> Iterator[None]:
    """Within the block a sharded module has its own class again, and gives whole tensors: so it is
    saved as if it had never been sharded. All processes must enter."""
    if not is_sharded(module):
        yield
        return
    tensors = {name: full_tensor(value).cpu() for name, value in module.state_dict().items()}
    sharded = type(module)
    module.__class__ = sharded.__bases__[1]
    module.state_dict = lambda *args, **kwargs: tensors
    try:
        yield
    finally:
        del module.state_dict
        module.__class__ = sharded
