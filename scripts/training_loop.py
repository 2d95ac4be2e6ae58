"""The resumable training loop of every pretraining stage."""

import math
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

SAVE_SECONDS = 60
"""Seconds between two saves."""

quiet = not sys.stderr.isatty()
"""Whether to hide progress bars."""


def write(path, state):
    """Saves so that a kill leaves the old file or the new one, never a partial one."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def lr_factor(step, num_steps, warmup):
    """Factor of the learning rate: linear warm-up, times half a cosine from 1 down to 0.02."""
    return min(1, (step + 1) / warmup) * (0.51 + 0.49 * math.cos(math.pi * step / num_steps))


def train(name, model, loss_at, workdir, num_steps, lr):
    """Minimizes `loss_at(step)` and averages the weights; resumes from workdir/NAME.pt.

    Args:
        loss_at: step -> scalar loss. It draws its batch from generators seeded with the step, so a
            resumed run sees the batches of an uninterrupted one.
        lr: peak learning rate.
    """
    path = workdir / f"{name}.pt"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.995))
    parts = {"model": model, "averaged": averaged, "optimizer": optimizer}
    state: dict[str, Any] = {"step": 0, "losses": [], "seconds": 0.0}
    if path.exists():
        state = torch.load(path, weights_only=True)
    for key in parts.keys() & state.keys():
        parts[key].load_state_dict(state[key])
    first, losses = state["step"], state["losses"]
    started, saved = time.time() - state["seconds"], time.time()

    bar = tqdm(range(first, num_steps), name, num_steps, initial=first, disable=quiet)
    for step in bar:
        optimizer.param_groups[0]["lr"] = lr * lr_factor(step, num_steps, warmup=100)
        loss = loss_at(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        averaged.update_parameters(model)
        losses.append(loss.item())
        done = step + 1
        if done == num_steps or time.time() - saved > SAVE_SECONDS:
            counts = {"step": done, "losses": losses, "seconds": time.time() - started}
            write(path, counts | {key: part.state_dict() for key, part in parts.items()})
            saved = time.time()
            bar.set_postfix(loss=f"{np.mean(losses[-100:]):.4f}")


def load_averaged(model, path):
    """Returns the model with the averaged weights of a training stage."""
    averaged = torch.load(path, weights_only=True)["averaged"]
    prefix = "module."
    model.load_state_dict(
        {key.removeprefix(prefix): v for key, v in averaged.items() if key.startswith(prefix)}
    )
    return model.eval()
