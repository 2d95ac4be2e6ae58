"""Random draws as pure functions of a key, such as ``(seed, epoch, group, sample, "step", step)``.

No global generator is read or advanced. Exact resume, equal samples on any number of processes, and
a grid cell that can be made again on its own all follow from this.
"""

import hashlib

import torch


def seed_for(*key: int | str) -> int:
    """Returns a seed in [0, 2^63) that depends on every part of `key` and on their order."""
    digest = hashlib.sha256("\0".join(f"{type(k).__name__}:{k}" for k in key).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator_for(*key: int | str) -> torch.Generator:
    """Returns a new generator for `key`, on the CPU so that every device gets the same numbers."""
    return torch.Generator().manual_seed(seed_for(*key))


def normal(shape: torch.Size | tuple[int, ...], *key: int | str) -> torch.Tensor:
    """Returns standard normal numbers of `shape`, float32, on the CPU."""
    return torch.randn(shape, generator=generator_for(*key), dtype=torch.float32)


def permutation(n: int, *key: int | str) -> list[int]:
    """Returns the numbers 0 to n - 1 in random order."""
    return torch.randperm(n, generator=generator_for(*key)).tolist()


def integer(low: int, high: int, *key: int | str) -> int:
    """Returns a uniform integer in [low, high], both included."""
    return low + int(torch.randint(high - low + 1, (1,), generator=generator_for(*key)))


def initial_noise_seed(run_seed: int, prompt: str, seed: int) -> int:
    """Seed of the initial noise of one image in evaluations and grids, by its prompt and seed."""
    return seed_for(run_seed, "evaluation", prompt, seed)
