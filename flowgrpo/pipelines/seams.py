"""Every patch of a pipeline's methods in flowgrpo, as context managers that undo it.

The stock pipeline is the policy, so none of its code is copied or subclassed. Whatever must differ
during one call is patched here, on the *instance*: the scheduler's `step`, the denoisers'
`forward`, `encode_prompt`, the VAE's `decode`, the progress bar. No other file
sets attributes by name. Ordinary switches stay where they are used: peft's adapter switch
(`policy.weights`), training mode (`policy.trainable`), compiled blocks (`compile`).
"""

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from flowgrpo.distributed.fsdp import full_tensor, is_sharded


@contextmanager
def patched(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    """Within the block `owner.attribute` is `value`; afterwards the instance is as it was."""
    absent = object()
    before = vars(owner).get(attribute, absent)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        # An attribute that only the class had must vanish from the instance, not be copied to it.
        if before is absent:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, before)


@contextmanager
def patched_loop(
    scheduler: Any, models: Mapping[str, nn.Module], step: Callable, forward: Callable
) -> Iterator[None]:
    """Within the block `step` and `forward` replace the stock methods of a denoising loop.

    Args:
        models: every model that the loop calls, by name.
        step: called as `step(scheduler, model_output, timestep, sample, ...)`.
        forward: called as `forward(name, stock, *args, **kwargs)`, with the stock forward.
    """
    with patched_step(scheduler, step), patched_forwards(models, forward):
        yield


@contextmanager
def patched_step(scheduler: Any, step: Callable) -> Iterator[None]:
    """Within the block `step(scheduler, ...)` replaces the scheduler's `step`."""

    # A bound method rather than a closure: a pipeline that deep-copies its scheduler (LTX-2, for
    # its audio) gets a copy whose step is bound to the copy. `wraps` keeps the signature, which
    # pipelines inspect.
    @functools.wraps(type(scheduler).step)
    def bound(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        return step(scheduler, *args, **kwargs)

    with patched(scheduler, "step", types.MethodType(bound, scheduler)):
        yield


@contextmanager
def patched_forwards(models: Mapping[Any, nn.Module], forward: Callable) -> Iterator[None]:
    """Within the block `forward(key, stock, ...)` replaces the forward of each model."""
    with ExitStack() as stack:
        for key, module in models.items():
            # A sharded module gathers its weights in hooks around `forward`. `_call_impl` is called
            # outside of them, so a step whose output comes from the tape gathers nothing.
            seam = "_call_impl" if is_sharded(module) else "forward"
            stock = getattr(module, seam)
            wrapped = functools.wraps(stock)(partial(forward, key, stock))
            stack.enter_context(patched(module, seam, wrapped))
        yield


@contextmanager
def patched_encode_prompt(pipe: Any, encode: Callable) -> Iterator[None]:
    """Within the block `encode(stock, *args, **kwargs)` replaces `pipe.encode_prompt`, if there is
    such a method."""
    stock = getattr(pipe, "encode_prompt", None)
    if stock is None:
        yield
        return
    with patched(pipe, "encode_prompt", functools.wraps(stock)(partial(encode, stock))):
        yield


@contextmanager
def patched_for_call(pipe: Any) -> Iterator[None]:
    """Within the block a call of the pipeline shows no progress bar, and a half-precision VAE with
    `force_upcast` in its config decodes in float32."""
    with patched(pipe, "_progress_bar_config", {"disable": True}), _float32_decoding(pipe):
        yield


@contextmanager
def _float32_decoding(pipe: Any) -> Iterator[None]:
    """Such a VAE overflows in half precision. Encoding is left to the pipeline, as in stock use."""
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
def as_unsharded(module: Any) -> Iterator[None]:
    """Within the block a sharded module looks as if it had never been sharded, so that its own
    `save_pretrained` writes stock weights. Every process must enter it."""
    if not is_sharded(module):
        yield
        return
    tensors = {name: full_tensor(value).cpu() for name, value in module.state_dict().items()}
    sharded = type(module)
    # fully_shard makes a class on the fly with the bases (FSDPModule, the original class); savers
    # write the class's name, so the original must be back.
    module.__class__ = sharded.__bases__[1]
    try:
        with patched(module, "state_dict", lambda *args, **kwargs: tensors):
            yield
    finally:
        module.__class__ = sharded


@contextmanager
def restored_flags(modules: Iterable[nn.Module], flags: Iterable[str]) -> Iterator[None]:
    """After the block, these attributes of the modules have the values that they had before it."""
    names = tuple(flags)
    before = [(m, name, getattr(m, name)) for m in modules for name in names if hasattr(m, name)]
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
