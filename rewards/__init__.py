"""Reward functions and the decorator that declares their options; README.md describes both.

A reward is a plain callable `reward(images, prompts, **columns) -> list[float]`. Images are a list
of PIL images or one float tensor (B, 3, H, W) in [0, 1]. Data columns arrive as keyword lists with
one entry per image, settings as keyword arguments with plain values. A built-in reward is a module
that defines a function of the module's own name.
"""

from rewards.contract import RewardOptions, options_of, reward

__all__ = ["RewardOptions", "options_of", "reward"]
