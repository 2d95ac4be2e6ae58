"""The OCR reward: its targets, and its scores of drawn words."""

import logging
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn_text import BLACK, WHITE, draw, noise
from PIL import Image

import rewards
from rewards import options_of
from rewards.ocr import SCORES, find_target, normalise, ocr
from rewards.support import text_reader

validate = options_of(ocr).validate


def _score(images, target, **settings) -> list[float]:
    return ocr(images, [""] * len(images), target=[target] * len(images), **settings)


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
    assert ocr([draw("DOG")], ['"CAT"'], target=["dog"], score="exact", detect=False) == [1.0]


@pytest.mark.parametrize("prompt", ["a dog", "it's the dogs' bowl", '""', '"', "' '"])
def test_a_row_without_text_to_look_for_is_refused_at_load_time(prompt):
    with pytest.raises(ValueError, match=r"names no text to look for; add a column .target"):
        validate(prompt, category="text")
    validate(prompt, target="dog")


def test_a_target_that_is_not_text_is_refused():
    with pytest.raises(ValueError, match="target is 7, but must be text"):
        validate("a number", target=7)


def test_case_spacing_width_and_style_of_quotes_do_not_count_but_letters_do():
    assert normalise(" Don’t\n STOP — ＡＢ１ ") == "don't stop - ab1"
    assert normalise("cafe") != normalise("café")


@pytest.mark.parametrize("detect", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_the_right_word_scores_1_in_either_case(score, detect):
    images = [
        draw("DOG", width=192, height=96, size=60),
        draw("dog", width=192, height=96, size=60),
    ]
    assert _score(images, "Dog", score=score, detect=detect) == pytest.approx([1, 1], abs=0.01)


def test_likelihood_orders_right_nearly_right_and_wrong_words_without_ties():
    images = [draw(w) for w in ("CAT", "CAR", "COD", "SUN")]
    scores = _score(images, "cat", score="likelihood", detect=False)
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > 0.99
    assert 0.3 < scores[1] < 0.6
    assert scores[3] < 0.2
    blurred = [Image.blend(draw("CAR"), BLACK, i / 20) for i in range(16)]
    assert len(set(_score(blurred, "cat", score="likelihood", detect=False))) == 16


def test_empty_and_noisy_images_score_low_and_apart():
    images = [BLACK, WHITE, noise()]
    scores = _score(images, "cat", score="likelihood", detect=False)
    assert max(scores) < 0.25
    assert len(set(scores)) == 3
    assert _score(images, "cat", detect=False)[:2] == [0, 0]
    assert _score(images, "cat", score="exact") == [0, 0, 0]


@pytest.mark.parametrize("score", SCORES)
def test_extra_text_in_the_image_lowers_every_score(score):
    right, extra = _score([draw("CAT"), draw("CATS")], "cat", score=score, detect=False)
    assert extra < right - 0.2


@pytest.mark.parametrize("score", SCORES)
def test_lines_are_read_from_top_to_bottom(score):
    images = [draw("HELLO", "WORLD", width=320, height=200, size=50)]
    (right,) = _score(images, "hello world", score=score)
    (patched,) = _score(images, "world hello", score=score)
    assert right > 0.99
    assert patched < 0.6


def test_an_image_too_narrow_for_its_target_is_padded_and_scored():
    (score,) = _score(
        [draw("A", width=32)], "antidisestablishment", score="likelihood", detect=False
    )
    assert 0 < score < 0.3


@pytest.mark.parametrize("detect", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_a_shuffled_batch_scores_as_one_by_one(score, detect):
    words = ["CAT", "DOG", "SUN", "HOUSE", "CAR"]
    shown = ["CAT", "DIG", "SUN", "HORSE", "BUS"]
    images = [draw(w, width=64 + 24 * (i % 2)) for i, w in enumerate(shown)]
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
    images = [draw("CAT"), draw("DOG"), noise()]
    arrays = np.stack([np.asarray(image) for image in images])
    tensor = torch.from_numpy(arrays).permute(0, 3, 1, 2) / 255
    pil = _score(images, "cat", score=score, detect=False)
    assert _score(tensor, "cat", score=score, detect=False) == pil
    nearly = (tensor - 0.4 / 255).clamp(min=0)
    assert _score(nearly, "cat", score=score, detect=False) == pil
    assert _score([i.convert("RGBA") for i in images], "cat", score=score, detect=False) == pil


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
def test_images_of_another_type_or_range_are_refused(images, message):
    with pytest.raises(ValueError, match=message):
        ocr(images, ['"a"'])


def test_a_missing_package_gives_its_install_line(monkeypatch):
    text_reader._engine.cache_clear()
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(ImportError, match="pip install rapidocr onnxruntime"):
        _score([BLACK], "cat")


def test_importing_the_reward_imports_nothing_heavy():
    code = "import sys, rewards.ocr; print({'torch', 'rapidocr', 'cv2'} & set(sys.modules))"
    root = Path(rewards.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert run.stdout.strip() == "set()"


def test_reading_is_silent(capfd, caplog):
    text_reader._engine.cache_clear()
    with caplog.at_level(logging.INFO):
        _score([BLACK, draw("CAT")], "cat")
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
