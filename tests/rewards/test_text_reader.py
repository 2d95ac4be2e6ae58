"""Text recognition, on drawn words and on made-up probabilities."""

import numpy as np
import pytest
from drawn_text import draw, font
from PIL import Image, ImageDraw

from rewards.support import text_reader


def test_greedy_decoding_merges_repeats_and_drops_blanks():
    frames = np.eye(3)[[0, 1, 1, 0, 1, 2, 2, 0]]
    assert text_reader.decode(frames, ["blank", "a", "b"]) == "aab"


def test_the_recogniser_gives_a_distribution_for_each_frame_of_8_pixels():
    (frames,) = text_reader.recognise([draw("DOG")], 1)
    assert frames.shape == (12, len(text_reader.characters(1)))
    np.testing.assert_allclose(frames.sum(-1), 1, atol=1e-5)


def test_a_line_is_read_as_rapidocr_reads_it():
    image = Image.new("RGB", (320, 48), (200, 30, 90))
    ImageDraw.Draw(image).text(
        (160, 24), "Orange 42", fill=(60, 90, 200), font=font(30), anchor="mm"
    )
    (frames,) = text_reader.recognise([image], 1)
    expected = text_reader._engine(False, True, 1)(np.asarray(image)[..., ::-1].copy())
    assert text_reader.decode(frames, text_reader.characters(1)) == expected.txts[0]
    best = frames.argmax(-1)
    confidence = frames.max(-1)[(best != 0) & (best != np.append(0, best[:-1]))].mean()
    assert confidence == pytest.approx(expected.scores[0], abs=2e-5)
