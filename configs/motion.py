"""Does the shape in a video have the colour, and move in the direction, that its prompt names?

A reward for short videos of one shape on a plain background, as in `a red square moves left`.
Nothing is learned: the background is the colour of the video's border, the shape is what differs
from it, and its centre is tracked from frame to frame.
"""

import numpy as np

from rewards import reward

COLOURS = {
    "red": (205, 35, 40),
    "green": (20, 130, 60),
    "blue": (30, 70, 200),
    "yellow": (245, 205, 40),
    "purple": (130, 45, 160),
    "black": (30, 30, 34),
}
"""RGB of each colour."""
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Unit vector (x, y) of each direction."""
MIN_CONTRAST = 60
"""RGB distance to the background at which a pixel starts to count; noise stays below it."""
MIN_AREA = 0.01
"""Smallest share of a frame that counts as a shape; anything smaller is specks."""
FULL_TRAVEL = 0.25
"""Travel that earns the full score, as a share of the frame's width or height."""


def validate(prompt, **row):
    """Raises ValueError for a prompt that does not name one colour and one direction."""
    find_target(prompt)


@reward(validate=validate, overlap=True, columns=())
def motion(videos, prompts, **columns):
    """Scores how well each video shows the colour and direction of its prompt.

    A score is the product of the share of the shape's pixels whose nearest named colour is that of
    the prompt, the share of frames that show a shape, and the movement score, see `heading`.

    Args:
        videos: B videos, each a list of T >= 2 PIL images of one size, in order.
        prompts: B prompts, each with one of COLOURS and one of DIRECTIONS.
        columns: data columns, not used.

    Returns:
        B scores in [0, 1]; 0 for one without a shape, without movement, or in another direction.
    """
    return [score(video, *find_target(text)) for video, text in zip(videos, prompts, strict=True)]


def find_target(prompt):
    """Returns (colour, direction) of a prompt.

    Raises:
        ValueError: the prompt does not name exactly one of COLOURS and one of DIRECTIONS.
    """
    words = prompt.lower().replace(",", " ").replace(".", " ").split()
    found = []
    for label, known in (("colour", COLOURS), ("direction", DIRECTIONS)):
        names = {word for word in words if word in known}
        if len(names) != 1:
            raise ValueError(
                f'prompt is "{prompt}", but must name one {label} and names {len(names)}; '
                f"use one of {', '.join(known)}."
            )
        found += names
    return tuple(found)


def score(video, colour, direction):
    """Returns the score of one video, in [0, 1]."""
    frames = np.stack([np.asarray(frame.convert("RGB"), dtype=float) for frame in video])
    background = find_background(frames)
    contrast = frames - background
    weights = foreground(contrast)
    shown = weights.any((1, 2))
    if shown.sum() < 2:
        return 0.0
    share = colour_share(contrast[weights > 0], weights[weights > 0], colour, background)
    return float(share * shown.mean() * heading(weights, shown, DIRECTIONS[direction]))


def find_background(frames):
    """Returns the median colour (3,) of the borders of frames (T, H, W, 3)."""
    rows, columns = frames[:, [0, -1]], frames[:, :, [0, -1]]
    return np.median(np.concatenate([rows.reshape(-1, 3), columns.reshape(-1, 3)]), axis=0)


def foreground(contrast):
    """Returns weights (T, H, W) in [0, 1] of the pixels that differ from the background.

    All weights of a frame whose mean weight is at most MIN_AREA are 0: it shows no shape.

    Args:
        contrast: (T, H, W, 3), pixels minus the background.
    """
    weights = np.clip(np.linalg.norm(contrast, axis=-1) / MIN_CONTRAST - 1, 0, 1)
    return weights * (weights.mean((1, 2), keepdims=True) > MIN_AREA)


def colour_share(contrast, weights, colour, background):
    """Returns the share of the shape's N pixels that are nearer to the colour than to any other.

    A pixel at the shape's edge is a mixture of colour and background, so its distance is measured
    to the line between the two.

    Args:
        contrast: (N, 3), pixels minus the background.
        weights: (N,), weights of the pixels.
        colour: one of COLOURS.
        background: (3,), RGB.
    """
    lines = np.array(list(COLOURS.values())) - background
    parts = np.clip(contrast @ lines.T / (lines**2).sum(1), 0, 1)
    distances = np.linalg.norm(contrast[:, None] - parts[..., None] * lines, axis=-1)
    nearest = distances.argmin(1) == list(COLOURS).index(colour)
    return weights[nearest].sum() / weights.sum()


def heading(weights, shown, direction):
    """Returns the movement score in [0, 1]: cos(angle to the direction)^2 x share of FULL_TRAVEL.

    The movement is the least-squares line through the centres of all frames that show a shape,
    from the first frame to the last, so noise in a single frame hardly changes it. The score is 0
    at an angle of 90 degrees or more.

    Args:
        weights: (T, H, W), weights of the shape's pixels.
        shown: (T,), whether each frame shows a shape; at least two do.
        direction: unit vector (x, y).
    """
    size = np.array([weights.shape[2], weights.shape[1]])
    masses = weights[shown].sum((1, 2))
    x = weights[shown].sum(1) @ np.arange(size[0]) / masses
    y = weights[shown].sum(2) @ np.arange(size[1]) / masses
    slope = np.polyfit(np.flatnonzero(shown), np.stack([x, y], axis=1), 1)[0]
    moved = slope * (len(weights) - 1) / size
    along = float(moved @ direction)
    if along <= 0:
        return 0.0
    return along**2 / float(moved @ moved) * min(1.0, along / FULL_TRAVEL)
