"""Every random draw is a pure function of what it is for.

A draw is named by a key such as ``(seed, epoch, group, sample, "noise", step)``; nothing reads or
moves a global generator. Exact resume, the same samples on any number of processes, and one grid
cell made again alone all follow from this.
"""

import hashlib

import torch


def seed_for(*key: int | str) -> int:
    """A 63-bit seed that depends on every part of `key` and on its order."""
    digest = hashlib.sha256("\0".join(f"{type(k).__name__}:{k}" for k in key).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator_for(*key: int | str) -> torch.Generator:
    """A fresh CPU generator for `key`; CPU, so that every device draws the same numbers."""
    return torch.Generator().manual_seed(seed_for(*key))


def normal(shape: torch.Size | tuple[int, ...], *key: int | str) -> torch.Tensor:
    """Standard normal numbers of `shape`, float32, on the CPU."""
    return torch.randn(shape, generator=generator_for(*key), dtype=torch.float32)


def permutation(n: int, *key: int | str) -> list[int]:
    """The numbers 0 to n - 1 in a random order."""
    return torch.randperm(n, generator=generator_for(*key)).tolist()


def integer(low: int, high: int, *key: int | str) -> int:
    """A uniform integer with low <= value <= high."""
    return low + int(torch.randint(high - low + 1, (1,), generator=generator_for(*key)))


def initial_noise_seed(run_seed: int, prompt: str, seed: int) -> int:
    """The same noise for the same prompt and seed, in evaluations and grids alike."""
    return seed_for(run_seed, "evaluation", prompt, seed)
