"""The world of the embedded video model: a coloured shape that moves straight across paper.

A scene is a (colour, shape, direction), its prompt `a red square moves left`. Where the shape
starts and how far it travels is not said, so a prompt has many clips. The held-out scenes never
reach pretraining: `split_scenes` gives the others.
"""

import random
from functools import cache
from itertools import product

from PIL import Image, ImageDraw
from tiny_world import COLOURS, PAPER

SIZE = 32  # pixels a side
NUM_FRAMES = 9
RADIUS = 7
TRAVEL = (9.0, 13.0)  # pixels from the first frame to the last, least and most
FINE = 4  # shapes are placed to a quarter of a pixel, so that they move evenly

SHAPES = ("circle", "square", "triangle", "cross", "ring")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
WORDS = ["a", "moves", *COLOURS, *SHAPES, *DIRECTIONS]


def prompt_of(scene):
    """`a red square moves left`."""
    return "a {} {} moves {}".format(*scene)


@cache
def split_scenes(seed=0):
    """(train, test) scenes; two of the five shapes are held out for each colour and direction."""
    rng = random.Random(seed)
    test = {
        (colour, shape, direction)
        for colour, direction in product(COLOURS, DIRECTIONS)
        for shape in rng.sample(SHAPES, 2)
    }
    train = [scene for scene in product(COLOURS, SHAPES, DIRECTIONS) if scene not in test]
    return train, sorted(test)


def misdescribe(rng, scene, colour_share, direction_share):
    """A prompt whose colour and direction are drawn at random with these chances; never a test
    scene's."""
    colour, shape, direction = scene
    if rng.random() < colour_share:
        colour = rng.choice(list(COLOURS))
    if rng.random() < direction_share:
        direction = rng.choice(list(DIRECTIONS))
    wrong = (colour, shape, direction)
    refused = wrong not in split_scenes()[0]
    return misdescribe(rng, scene, colour_share, direction_share) if refused else prompt_of(wrong)


@cache
def stencil(shape):
    """The shape as a mask of 2 RADIUS x FINE fine pixels a side."""
    side = 2 * RADIUS * FINE
    mask = Image.new("L", (side, side), 0)
    draw, last = ImageDraw.Draw(mask), side - 1
    if shape in ("circle", "ring"):
        draw.ellipse([0, 0, last, last], fill=255)
    if shape == "ring":
        hole = 0.27 * side
        draw.ellipse([hole, hole, last - hole, last - hole], fill=0)
    elif shape == "square":
        draw.rectangle([FINE, FINE, last - FINE, last - FINE], fill=255)
    elif shape == "triangle":
        draw.polygon([(last / 2, 0), (last, last), (0, last)], fill=255)
    elif shape == "cross":
        low, high = round(side / 3), round(2 * side / 3) - 1
        draw.rectangle([low, 0, high, last], fill=255)
        draw.rectangle([0, low, last, high], fill=255)
    return mask


def draw_clip(scene, start, travel):
    """NUM_FRAMES pictures, SIZE x SIZE.

    Args:
        start: the shape's centre (x, y) in the first frame, in pixels.
        travel: pixels to its centre in the last frame, at even speed.
    """
    colour, shape, direction = scene
    step = [travel * part / (NUM_FRAMES - 1) for part in DIRECTIONS[direction]]
    frames = []
    for index in range(NUM_FRAMES):
        image = Image.new("RGB", (SIZE * FINE, SIZE * FINE), PAPER)
        corner = [round(FINE * (s + index * d - RADIUS)) for s, d in zip(start, step, strict=True)]
        image.paste(COLOURS[colour], tuple(corner), stencil(shape))
        frames.append(image.reduce(FINE))
    return frames


def random_clip(rng, scene):
    """A clip of the scene that stays within the picture."""
    travel = rng.uniform(*TRAVEL)
    low, high = RADIUS + 1, SIZE - RADIUS - 1
    start = []
    for part in DIRECTIONS[scene[2]]:
        room = [low + travel * (part < 0), high - travel * (part > 0)]
        start.append(rng.uniform(*room))
    return draw_clip(scene, start, travel)
