"""The reward of the video demo, on clips that are drawn, not generated."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.extend([str(ROOT / "scripts"), str(ROOT / "configs")])
import tiny_video as world  # noqa: E402
from motion import COLOURS, DIRECTIONS, motion  # noqa: E402

from rewards import options_of  # noqa: E402

PROMPT = "a red square moves left"
SCENE = ("red", "square", "left")
validate = options_of(motion).validate


def one(clip, prompt=PROMPT):
    return motion([clip], [prompt])[0]


def noisy(clip, rng, deviation):
    """A clip with added noise, like that of generated clips."""
    pixels = np.stack([np.asarray(frame) for frame in clip]) + rng.normal(
        0, deviation, (len(clip), world.SIZE, world.SIZE, 3)
    )
    return [Image.fromarray(frame) for frame in pixels.clip(0, 255).astype(np.uint8)]


@pytest.fixture(scope="module")
def clips():
    """One clip of every scene."""
    rng = random.Random(0)
    scenes = [scene for part in world.split_scenes() for scene in part]
    return {scene: world.random_clip(rng, scene) for scene in scenes}


def test_a_clip_of_its_prompt_scores_above_point_nine(clips):
    prompts = [world.prompt_of(scene) for scene in clips]
    assert min(motion(list(clips.values()), prompts)) > 0.9


def test_another_direction_scores_below_point_three(clips):
    for (colour, shape, direction), clip in clips.items():
        others = [word for word in DIRECTIONS if word != direction]
        prompts = [world.prompt_of((colour, shape, other)) for other in others]
        scores = motion([clip] * 3, prompts)
        assert min(scores) >= 0
        assert max(scores) < 0.3


def test_another_colour_scores_below_point_three(clips):
    for (colour, shape, direction), clip in clips.items():
        others = [word for word in COLOURS if word != colour]
        prompts = [world.prompt_of((other, shape, direction)) for other in others]
        assert max(motion([clip] * 5, prompts)) < 0.3


def test_noise_on_a_clip_hardly_changes_its_score(clips):
    rng = np.random.default_rng(0)
    for scene, clip in clips.items():
        assert one(noisy(clip, rng, 12), world.prompt_of(scene)) > 0.85


def test_a_clip_without_movement_scores_zero():
    still = [world.draw_clip(SCENE, (16, 16), 0)[0]] * world.NUM_FRAMES
    assert one(still) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("prompt", [world.prompt_of(s) for s in world.split_scenes()[1][::7]])
def test_noise_and_empty_clips_score_below_point_three(prompt):
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (world.NUM_FRAMES, world.SIZE, world.SIZE, 3), dtype=np.uint8)
    assert one([Image.fromarray(frame) for frame in noise], prompt) < 0.3
    for background in (world.PAPER, "white", "black", "red"):
        empty = [Image.new("RGB", (world.SIZE, world.SIZE), background)] * world.NUM_FRAMES
        assert one(empty, prompt) == 0
        assert one(noisy(empty, rng, 12), prompt) == 0


def test_a_frame_that_changes_colour_entirely_is_no_shape():
    frames = [Image.new("RGB", (world.SIZE, world.SIZE), world.PAPER)] * 5
    frames += [Image.new("RGB", (world.SIZE, world.SIZE), COLOURS["red"])] * 4
    assert one(frames) == 0


def test_a_speck_is_no_shape():
    frames = [Image.new("RGB", (world.SIZE, world.SIZE), world.PAPER) for _ in range(9)]
    for index, frame in enumerate(frames):
        frame.paste(COLOURS["red"], (24 - index, 16, 27 - index, 19))
    assert one(frames) == 0


def test_score_grows_with_travel_up_to_a_quarter_of_the_frame():
    scores = [one(world.draw_clip(SCENE, (21, 16), travel)) for travel in (0, 2, 4, 6, 8, 12)]
    assert scores[:5] == sorted(scores[:5])
    assert np.diff(scores[:5]).min() > 0.15
    assert scores[4] > 0.95
    assert scores[5] == pytest.approx(1, abs=1e-3)


def test_a_diagonal_scores_half():
    across = world.draw_clip(SCENE, (22, 16), 12)
    upwards = world.draw_clip(("red", "square", "up"), (16, 22), 12)
    shifts = [np.asarray(frame) for frame in across]
    rows = range(world.NUM_FRAMES)
    diagonal = [
        Image.fromarray(np.roll(shift, -round(12 * row / 8) + 6, axis=0))
        for row, shift in zip(rows, shifts, strict=True)
    ]
    assert one(diagonal) == pytest.approx(0.5, abs=0.08)
    assert one(upwards) < 0.01


def test_a_clip_that_is_empty_for_half_of_its_frames_loses_half():
    clip = world.draw_clip(SCENE, (22, 16), 12)
    empty = Image.new("RGB", (world.SIZE, world.SIZE), world.PAPER)
    half = [empty if index % 2 else frame for index, frame in enumerate(clip)]
    assert one(half) == pytest.approx(5 / 9, abs=0.02)


def test_a_shape_of_two_colours_scores_their_share():
    red = world.draw_clip(SCENE, (21, 16), 12)
    blue = world.draw_clip(("blue", "square", "left"), (21, 16), 12)
    mixed = []
    for first, second in zip(red, blue, strict=True):
        frame = first.copy()
        frame.paste(second.crop((0, 16, world.SIZE, world.SIZE)), (0, 16))
        mixed.append(frame)
    assert one(mixed) == pytest.approx(0.5, abs=0.1)
    assert one(mixed, "a blue square moves left") == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_clip_of_another_size_and_mode_scores_the_same(direction):
    scene = ("red", "square", direction)
    slow = world.draw_clip(scene, (16, 16), 5)
    large = [frame.resize((64, 96)).convert("RGBA") for frame in slow]
    scores = motion([slow, large], [world.prompt_of(scene)] * 2, seed=[1, 2])
    assert 0.5 < scores[0] < 0.8
    assert scores[1] == pytest.approx(scores[0], abs=0.03)
    assert all(type(score) is float for score in scores)


def test_its_colours_and_directions_are_those_of_the_world():
    assert COLOURS == world.COLOURS
    assert DIRECTIONS == world.DIRECTIONS


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("a square moves left", "one colour and names 0"),
        ("a red square", "one direction and names 0"),
        ("a red square and a blue ring move left", "one colour and names 2"),
        ("a reddish square moves left", "one colour and names 0"),
    ],
)
def test_a_prompt_without_one_colour_and_direction_is_refused(prompt, reason):
    with pytest.raises(ValueError, match=reason):
        validate(prompt, other=1)


def test_every_embedded_prompt_is_accepted():
    for split in ("train", "test"):
        path = ROOT / "assets" / "prompts" / f"motions_{split}.txt"
        for line in path.read_text().splitlines():
            validate(line)
    validate("A RED square moves LEFT.", column="x")
