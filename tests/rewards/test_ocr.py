"""Claims of the OCR reward, on words drawn with the font that matplotlib carries."""

from __future__ import annotations

import itertools
import logging
import math
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from rewards import reader
from rewards.ocr import (
    FLOOR,
    SCORES,
    TEMPERATURE,
    ctc_log_likelihood,
    edit_similarity,
    find_target,
    frames_needed,
    likelihood,
    normalise,
    ocr,
)

TEXT = st.text("abcAB '-é1", max_size=8)
BLACK, WHITE = (Image.new("RGB", (64, 32), colour) for colour in ("black", "white"))


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    from matplotlib import get_data_path

    return ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans-Bold.ttf", size)


def _draw(*lines: str, width: int = 64, height: int = 32, size: int = 22) -> Image.Image:
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for index, line in enumerate(lines):
        y = height * (2 * index + 1) / (2 * len(lines))
        draw.text((width / 2, y), line, fill="black", font=_font(size), anchor="mm")
    return image


def _noise() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 64, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _score(images, target, **settings) -> list[float]:
    return ocr(images, [""] * len(images), target=[target] * len(images), **settings)


# Targets


@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        ('a sign that says "Open"', "open"),
        ("a sign that says “Open”", "open"),
        ("a sign that says 'Open'", "open"),
        ("a sign that says ‘Open’", "open"),
        ("it's the dog's sign: 'Don't stop'", "don't stop"),
        ("the dog's \"don't stop\" sign", "don't stop"),
        ('the words "one" above "two"', "one two"),
        ("the 'red' sign says \"blue\"", "blue"),
        ('a  "  wide \n text "', "wide text"),
    ],
)
def test_quoted_text_is_the_target(prompt, target):
    assert find_target(prompt) == target


def test_a_target_column_comes_before_quotes():
    assert find_target('a sign that says "open"', "CLOSED") == "closed"
    assert find_target('a sign that says "open"', "") == "open"
    assert ocr([_draw("DOG")], ['"CAT"'], target=["dog"], score="exact", detect=False) == [1.0]


@pytest.mark.parametrize("prompt", ["a dog", "it's the dogs' bowl", '""', '"', "' '"])
def test_a_row_without_text_to_look_for_is_refused_at_load_time(prompt):
    with pytest.raises(ValueError, match=r"names no text to look for; add a column .target"):
        ocr.validate(prompt, category="text")
    ocr.validate(prompt, target="dog")


def test_a_target_that_is_not_text_is_refused():
    with pytest.raises(ValueError, match="target is 7, but must be text"):
        ocr.validate("a number", target=7)


def test_case_spacing_width_and_kind_of_quote_do_not_count_but_letters_do():
    assert normalise(" Don’t\n STOP — ＡＢ１ ") == "don't stop - ab1"
    assert normalise("cafe") != normalise("café")


# Edit similarity


def _levenshtein(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(
        _levenshtein(a[1:], b) + 1,
        _levenshtein(a, b[1:]) + 1,
        _levenshtein(a[1:], b[1:]) + (a[0] != b[0]),
    )


@settings(deadline=None, max_examples=60)
@given(st.text("abc", max_size=5), st.text("abc", max_size=5))
def test_edit_similarity_equals_the_recursive_definition(a, b):
    expected = 1 - _levenshtein(a, b) / max(len(a), len(b), 1)
    assert edit_similarity(a, b) == pytest.approx(expected, abs=1e-12)


@given(TEXT, TEXT)
def test_edit_similarity_is_symmetric_within_0_and_1_and_1_only_for_the_same_text(a, b):
    similarity = edit_similarity(a, b)
    assert 0 <= similarity <= 1
    assert similarity == edit_similarity(b, a)
    assert (similarity == 1) == (normalise(a) == normalise(b))


@given(st.text("abc", min_size=1, max_size=6), st.text("abc", min_size=1, max_size=6))
def test_extra_text_around_the_target_lowers_edit_similarity(target, extra):
    closed_form = len(target) / (len(target) + len(extra))
    assert edit_similarity(target + extra, target) == pytest.approx(closed_form)
    assert edit_similarity(extra + target, target) == pytest.approx(closed_form)


# Likelihood


def _collapse(path: tuple[int, ...]) -> list[int]:
    return [label for label, _ in itertools.groupby(path) if label]


@pytest.mark.parametrize("labels", [[1], [1, 2], [1, 1], [2, 1, 2]])
def test_ctc_equals_the_sum_over_every_path(labels):
    probs = np.random.default_rng(0).dirichlet(np.ones(4), 5)
    paths = itertools.product(range(4), repeat=5)
    total = math.fsum(
        math.prod(probs[t, label] for t, label in enumerate(path))
        for path in paths
        if _collapse(path) == labels
    )
    assert ctc_log_likelihood(np.log(probs), labels) == pytest.approx(math.log(total), abs=1e-12)


def test_likelihood_equals_brute_force_over_normalised_characters():
    characters = ["blank", "a", "A", "b", "Ｂ", "c", " "]
    probs = np.random.default_rng(1).dirichlet(np.ones(7), 4)
    merged = np.stack([probs[:, 0], probs[:, 1:3].sum(1), probs[:, 3:5].sum(1)], 1)
    floored = (1 - 3 * FLOOR) * merged + FLOOR
    total = math.fsum(
        math.prod(floored[t, label] for t, label in enumerate(path))
        for path in itertools.product(range(3), repeat=4)
        if _collapse(path) == [1, 2]
    )
    expected = math.exp(math.log(total) / (2 * TEMPERATURE))
    assert likelihood(probs, characters, "Ab") == pytest.approx(expected, abs=1e-12)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.text("abc", min_size=1, max_size=3))
def test_likelihood_is_at_most_1_and_never_0(seed, target):
    concentrated = np.full(4, 0.01)
    probs = np.random.default_rng(seed).dirichlet(concentrated, 6)
    worst = math.exp(6 * math.log(FLOOR) / (len(target) * TEMPERATURE))
    assert worst <= likelihood(probs, ["blank", "a", "b", "c"], target) <= 1


def test_a_certain_reading_scores_1_and_a_certain_misreading_costs_the_floor():
    certain = np.eye(4)[[1, 0, 2, 0, 3]]
    characters = ["blank", "a", "b", "c"]
    assert likelihood(certain, characters, "abc") == pytest.approx(1, abs=1e-4)
    expected = math.exp(math.log(FLOOR) / (3 * TEMPERATURE))
    assert likelihood(certain, characters, "aac") == pytest.approx(expected, rel=0.02)


def test_a_target_of_unknown_characters_is_refused():
    with pytest.raises(ValueError, match="does not know ж; use characters"):
        likelihood(np.full((3, 2), 0.5), ["blank", "a"], "aж")


def test_frames_needed_is_the_shortest_path_of_ctc():
    for text in ("abc", "aab", "aaa"):
        labels = [" abc".index(c) for c in text]
        shortest = np.log(np.full((frames_needed(text), 4), 0.25))
        assert math.isfinite(ctc_log_likelihood(shortest, labels))
        assert math.isinf(ctc_log_likelihood(shortest[1:], labels))


def test_greedy_decoding_merges_repeats_and_drops_blanks():
    frames = np.eye(3)[[0, 1, 1, 0, 1, 2, 2, 0]]
    assert reader.decode(frames, ["blank", "a", "b"]) == "aab"


# Pictures of words


def test_the_recogniser_gives_a_distribution_for_each_frame_of_8_pixels():
    (frames,) = reader.recognise([_draw("DOG")], 1)
    assert frames.shape == (12, len(reader.characters(1)))
    np.testing.assert_allclose(frames.sum(-1), 1, atol=1e-5)


def test_a_line_is_read_as_rapidocr_reads_it():
    image = Image.new("RGB", (320, 48), (200, 30, 90))
    ImageDraw.Draw(image).text(
        (160, 24), "Orange 42", fill=(60, 90, 200), font=_font(30), anchor="mm"
    )
    (frames,) = reader.recognise([image], 1)
    expected = reader._engine(False, True, 1)(np.asarray(image)[..., ::-1].copy())
    assert reader.decode(frames, reader.characters(1)) == expected.txts[0]
    best = frames.argmax(-1)
    confidence = frames.max(-1)[(best != 0) & (best != np.append(0, best[:-1]))].mean()
    assert confidence == pytest.approx(expected.scores[0], abs=2e-5)


@pytest.mark.parametrize("detect", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_the_right_word_scores_1_in_either_case(score, detect):
    images = [
        _draw("DOG", width=192, height=96, size=60),
        _draw("dog", width=192, height=96, size=60),
    ]
    assert _score(images, "Dog", score=score, detect=detect) == pytest.approx([1, 1], abs=0.01)


def test_likelihood_orders_right_nearly_right_and_wrong_words_without_ties():
    images = [_draw(w) for w in ("CAT", "CAR", "COD", "SUN")]
    scores = _score(images, "cat", score="likelihood", detect=False)
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > 0.99
    assert 0.3 < scores[1] < 0.6
    assert scores[3] < 0.2
    blurred = [Image.blend(_draw("CAR"), BLACK, i / 20) for i in range(16)]
    assert len(set(_score(blurred, "cat", score="likelihood", detect=False))) == 16


def test_empty_and_noisy_pictures_score_low_and_apart():
    images = [BLACK, WHITE, _noise()]
    scores = _score(images, "cat", score="likelihood", detect=False)
    assert max(scores) < 0.25
    assert len(set(scores)) == 3
    assert _score(images, "cat", detect=False)[:2] == [0, 0]
    assert _score(images, "cat", score="exact") == [0, 0, 0]


@pytest.mark.parametrize("score", SCORES)
def test_extra_text_in_the_picture_lowers_every_score(score):
    right, extra = _score([_draw("CAT"), _draw("CATS")], "cat", score=score, detect=False)
    assert extra < right - 0.2


@pytest.mark.parametrize("score", SCORES)
def test_lines_are_read_from_top_to_bottom(score):
    images = [_draw("HELLO", "WORLD", width=320, height=200, size=50)]
    (right,) = _score(images, "hello world", score=score)
    (patched,) = _score(images, "world hello", score=score)
    assert right > 0.99
    assert patched < 0.6


def test_a_picture_too_narrow_for_its_target_is_padded_and_scored():
    (score,) = _score(
        [_draw("A", width=32)], "antidisestablishment", score="likelihood", detect=False
    )
    assert 0 < score < 0.3


@pytest.mark.parametrize("detect", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_a_shuffled_batch_scores_as_one_by_one(score, detect):
    words = ["CAT", "DOG", "SUN", "HOUSE", "CAR"]
    shown = ["CAT", "DIG", "SUN", "HORSE", "BUS"]
    images = [_draw(w, width=64 + 24 * (i % 2)) for i, w in enumerate(shown)]
    prompts = [f'the word "{w}"' for w in words]
    order = [3, 0, 4, 2, 1]
    alone = [
        ocr([i], [p], score=score, detect=detect)[0] for i, p in zip(images, prompts, strict=True)
    ]
    together = ocr(
        [images[i] for i in order], [prompts[i] for i in order], score=score, detect=detect
    )
    assert together == pytest.approx([alone[i] for i in order], abs=1e-5)
    assert len(set(alone)) > 1


@pytest.mark.parametrize("score", SCORES)
def test_tensors_and_pil_images_score_the_same(score):
    images = [_draw("CAT"), _draw("DOG"), _noise()]
    arrays = np.stack([np.asarray(image) for image in images])
    tensor = torch.from_numpy(arrays).permute(0, 3, 1, 2) / 255
    pil = _score(images, "cat", score=score, detect=False)
    assert _score(tensor, "cat", score=score, detect=False) == pil
    nearly = (tensor - 0.4 / 255).clamp(min=0)
    assert _score(nearly, "cat", score=score, detect=False) == pil
    assert _score([i.convert("RGBA") for i in images], "cat", score=score, detect=False) == pil


# What a user can get wrong


def test_an_unknown_score_or_a_misspelt_setting_is_refused():
    with pytest.raises(ValueError, match="score is likelyhood, but must be one of edit_similarity"):
        _score([BLACK], "cat", score="likelyhood")
    with pytest.raises(ValueError, match="detcet is False, but is neither a setting"):
        _score([BLACK], "cat", detcet=False)


def test_wrong_counts_are_refused():
    with pytest.raises(ValueError, match="prompts is a list of 1, but 2 images were given"):
        ocr([BLACK, WHITE], ['"a"'])
    with pytest.raises(ValueError, match="target is a list of 1, but 2 images were given"):
        ocr([BLACK, WHITE], ["", ""], target=["a"])
    assert ocr([], []) == []


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(1, 3, 8, 8) - 1, r"in \[-1, -1\], but must be in \[0, 1\]"),
        (torch.full((1, 3, 8, 8), math.nan), "not finite"),
        (torch.zeros(3, 8, 8), r"images is Tensor \(3, 8, 8\)"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "must be PIL images or one float"),
        ([torch.zeros(3, 8, 8)], "images holds Tensor"),
    ],
)
def test_images_of_another_kind_or_range_are_refused(images, message):
    with pytest.raises(ValueError, match=message):
        ocr(images, ['"a"'])


def test_a_missing_package_gives_its_install_line(monkeypatch):
    reader._engine.cache_clear()
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(ImportError, match="pip install rapidocr onnxruntime"):
        _score([BLACK], "cat")


def test_importing_the_reward_imports_nothing_heavy():
    code = "import sys, rewards.ocr; print({'torch', 'rapidocr', 'cv2'} & set(sys.modules))"
    root = Path(reader.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert run.stdout.strip() == "set()"


def test_reading_is_silent(capfd, caplog):
    reader._engine.cache_clear()
    with caplog.at_level(logging.INFO):
        _score([BLACK, _draw("CAT")], "cat")
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
