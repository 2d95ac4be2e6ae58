"""Reward functions: plain callables `reward(images, prompts, **columns) -> list[float]`.

Images are a list of PIL images or one float tensor (B, 3, H, W) in [0, 1]; both score the same.
Dataset columns arrive as keyword lists with one entry an image, settings as keyword arguments with
plain values. Each built-in reward is a module that holds a function of the module's name.

A function may carry three attributes that a trainer reads: `validate(prompt, **row)` raises
ValueError for a data row it cannot score; `overlap` is True if it may run in a background thread
while the next images are sampled; `models(**settings)` gives the torch modules that a call with
these settings uses, so that they can wait elsewhere while it does not score.
"""
