"""Does the shape in a clip have the colour, and move the way, that the prompt asks for?

A reward for short clips of one shape on plain ground, `a red square moves left`. Nothing is
learned: the ground is the colour of the clip's border, the shape is what differs from it, and its
centre is followed from frame to frame.
"""

import numpy as np

COLOURS = {
    "red": (205, 35, 40),
    "green": (20, 130, 60),
    "blue": (30, 70, 200),
    "yellow": (245, 205, 40),
    "purple": (130, 45, 160),
    "black": (30, 30, 34),
}
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
MIN_CONTRAST = 60
"""RGB distance to the ground at which a pixel begins to count; a blurred clip's noise is below."""
MIN_AREA = 0.01
"""Share of a frame below which what is left is specks and no shape."""
FULL_TRAVEL = 0.25
"""Share of the frame's width or height that earns the full score."""


def motion(videos, prompts, **columns):
    """Score how well each clip shows the asked colour and direction.

    A score is the product of three shares: of the shape's pixels whose nearest named colour is the
    asked one; of the frames that show a shape; and of the asked movement, see `heading`.

    Args:
        videos: B clips, each a list of T >= 2 PIL images of one size in order.
        prompts: B prompts, each with one of COLOURS and one of DIRECTIONS.
        columns: other dataset columns, not read.

    Returns:
        B scores in [0, 1]; 0 for a clip that shows nothing, stands still or goes another way.
    """
    return [score(clip, *find_target(text)) for clip, text in zip(videos, prompts, strict=True)]


def validate(prompt, **row):
    """Raise ValueError for a prompt that names no colour or no direction."""
    find_target(prompt)


motion.validate = validate
motion.overlap = True
motion.columns = ()


def find_target(prompt):
    """(colour, direction): the only ones of COLOURS and of DIRECTIONS among the prompt's words."""
    words = prompt.lower().replace(",", " ").replace(".", " ").split()
    found = []
    for kind, known in (("colour", COLOURS), ("direction", DIRECTIONS)):
        names = {word for word in words if word in known}
        if len(names) != 1:
            raise ValueError(
                f'prompt is "{prompt}", but must name one {kind} and names {len(names)}; '
                f"use one of {', '.join(known)}."
            )
        found += names
    return tuple(found)


def score(clip, colour, direction):
    """The score of one clip, in [0, 1]."""
    frames = np.stack([np.asarray(frame.convert("RGB"), dtype=float) for frame in clip])
    ground = find_ground(frames)
    weights = foreground(frames - ground)
    shown = weights.any((1, 2))
    if shown.sum() < 2:
        return 0.0
    share = colour_share((frames - ground)[weights > 0], weights[weights > 0], colour, ground)
    return float(share * shown.mean() * heading(weights, shown, DIRECTIONS[direction]))


def find_ground(frames):
    """The median colour (3,) of the borders of frames (T, H, W, 3)."""
    rows, columns = frames[:, [0, -1]], frames[:, :, [0, -1]]
    return np.median(np.concatenate([rows.reshape(-1, 3), columns.reshape(-1, 3)]), axis=0)


def foreground(contrast):
    """Weights (T, H, W) in [0, 1] of the pixels that differ from the ground.

    A frame with too little of them has none: it shows no shape.

    Args:
        contrast: (T, H, W, 3), pixels less the ground.
    """
    weights = np.clip(np.linalg.norm(contrast, axis=-1) / MIN_CONTRAST - 1, 0, 1)
    return weights * (weights.mean((1, 2), keepdims=True) > MIN_AREA)


def colour_share(contrast, weights, colour, ground):
    """Share of the shape's N pixels that are nearer to the colour than to any other.

    A pixel at the shape's edge mixes colour and ground, so what counts is its distance to the line
    between the two.

    Args:
        contrast: (N, 3), pixels less the ground.
        weights: (N,).
        ground: (3,).
    """
    lines = np.array(list(COLOURS.values())) - ground
    parts = np.clip(contrast @ lines.T / (lines**2).sum(1), 0, 1)
    distances = np.linalg.norm(contrast[:, None] - parts[..., None] * lines, axis=-1)
    nearest = distances.argmin(1) == list(COLOURS).index(colour)
    return weights[nearest].sum() / weights.sum()


def heading(weights, shown, direction):
    """How well the shape's centre goes the asked way: cos(angle)^2 x share of the full travel.

    The movement is the least-squares line through the centres of all frames that show a shape,
    from the first frame to the last, so noise in a single frame hardly changes it. 0 for a
    movement that goes back or across.

    Args:
        weights: (T, H, W).
        shown: (T,), at least two True.
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
