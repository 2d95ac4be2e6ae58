"""Does the image show the words that its prompt requests? Text recognition with PP-OCR.

`edit_similarity` and `exact` compare the recognised text with the target; `likelihood` is the
probability that the recogniser gives to the target. The first two are step functions, so many
images tie early in a run. The last is dense: any change of a stroke changes it, so ties are rare.

Text is compared after `normalise`: case, width, style of quotes and dashes, and amount of spacing
do not count; letters, digits, accents and punctuation do. Lines of text are joined by one space.

Weights: PP-OCR, installed with RapidOCR (Apache-2.0).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rewards.contract import reward
from rewards.support import text_reader
from rewards.support.images import to_pil

if TYPE_CHECKING:
    from PIL import Image

    from rewards.support.images import Images

SCORES = ("edit_similarity", "likelihood", "exact")
"""Values of the setting `score`."""

FLOOR = 1e-6
"""Lower bound of a symbol's probability in a frame; below it, a network's output is noise."""

TEMPERATURE = 5.0
"""Nats per character that divide the score by e; one wrong letter of three scores about 0.4."""

_DOUBLE = re.compile('["“”„]([^"“”„]+)["“”]')
_SINGLE = re.compile(r"(?<!\w)['‘]((?:[^'‘’]|(?<=\w)['’](?=\w))+)['’](?!\w)")
_FOLD = str.maketrans("‘’ʼ“”„–—", "'''\"\"\"--")


def validate(prompt: str, **row: Any) -> None:
    """Raises ValueError for a data row without a target text."""
    find_target(prompt, row.get("target"))


@reward(validate=validate, overlap=True, columns=("target",))
def ocr(
    images: Images,
    prompts: Sequence[str],
    *,
    target: Sequence[str | None] | None = None,
    score: str = "edit_similarity",
    detect: bool = True,
    threads: int | None = None,
    **columns: Any,
) -> list[float]:
    """Scores how well each image shows its target text.

    Args:
        images: B PIL images, or a float tensor (B, 3, H, W) in [0, 1].
        prompts: B prompts; quoted text is the target of an image without a `target`.
        target: data column of B texts; for None or "" the prompt is used, see `find_target`.
        score: `edit_similarity`, 1 - edits / length of the longer text, so that missing and extra
            text both cost; `exact`, 1 for the same text and 0 otherwise; or `likelihood`, dense,
            see the function of that name.
        detect: whether to detect lines of text first. If False, the complete image is read as one
            line, which is faster and suits images filled by a word. `likelihood` also does this
            if no line is detected.
        threads: number of onnxruntime threads; by default half the cores, at most 4.
        columns: other data columns, not used.

    Returns:
        B scores in [0, 1].

    Raises:
        ValueError: no target, a target with characters that the recogniser lacks (`likelihood`),
            an unknown `score`, or wrong counts.
        ImportError: RapidOCR is not installed.
    """
    if score not in SCORES:
        raise ValueError(
            f"score is {score}, but must be one of {', '.join(SCORES)}; correct the spelling."
        )
    if target is not None:
        columns = {"target": target, **columns}
    pil_images = to_pil(images, prompts, columns)
    rows = zip(prompts, target or [None] * len(pil_images), strict=True)
    targets = [find_target(prompt, text) for prompt, text in rows]
    threads = threads or text_reader.default_threads()
    if score == "likelihood":
        return _likelihoods(pil_images, targets, detect, threads)
    pairs = zip(_read(pil_images, detect, threads), targets, strict=True)
    if score == "exact":
        return [float(normalise(text) == target) for text, target in pairs]
    return [edit_similarity(text, target) for text, target in pairs]


def find_target(prompt: str, target: str | None = None) -> str:
    """Returns the normalised text that an image should show: `target`, or the prompt's quoted text.

    Double quotes (straight or curly) take precedence; single ones count only if there are no double
    ones. An apostrophe within a word is not a quote. Several quoted texts are joined by a space.

    Raises:
        ValueError: there is neither.
    """
    if target is not None and not isinstance(target, str):
        raise ValueError(f"target is {target!r}, but must be text; put it in quotes.")
    text = normalise(target or " ".join(_DOUBLE.findall(prompt) or _SINGLE.findall(prompt)))
    if not text:
        raise ValueError(
            f'prompt is "{prompt}", but names no text to look for; add a column "target", '
            "or put the text in quotes."
        )
    return text


def normalise(text: str) -> str:
    """Returns the text in Unicode NFKC (full-width letters become plain ones) and lower case, with
    plain quotes and dashes, and with one space for any spacing within it."""
    return " ".join(unicodedata.normalize("NFKC", text).translate(_FOLD).lower().split())


def edit_similarity(text: str, target: str) -> float:
    """1 - Levenshtein distance / length of the longer text, in [0, 1]; two empty texts give 1."""
    text, target = normalise(text), normalise(target)
    row = list(range(len(target) + 1))
    for i, a in enumerate(text, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(target, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return 1 - row[-1] / max(len(text), len(target), 1)


def likelihood(frames: np.ndarray, characters: Sequence[str], target: str) -> float:
    """Dense score of a text: exp(log p(target | frames) / (length * TEMPERATURE)).

    p is the CTC likelihood (Graves et al. 2006), summed over all alignments, of the target in the
    alphabet of normalised characters: a character's probability is summed over its cases and
    widths. Three choices make it a reward:

    - Per character: otherwise longer words score lower and vary more within their groups.
    - A floor, q = (1 - n FLOOR) p + FLOOR for the n symbols that are blank or in the target, which
      still sums to at most 1. A wrong character costs at most -log FLOOR = 13.8 nats; without the
      floor it costs 5 to 45, which says little about the image.
    - A temperature: networks are over-confident. Without it, one wrong letter of three scores 0.01,
      and everything worse is close to 0.

    Args:
        frames: (T, C) probabilities; symbol 0 is CTC's blank.
        characters: the C symbols.
        target: text that needs at most T frames, see `frames_needed`.

    Returns:
        A score in (0, 1]: above 0.99 for a clear rendering; for words of three letters about 0.4
        with one letter wrong, 0.07 for another word and 0.13 for an empty image.

    Raises:
        ValueError: the recogniser lacks one of the target's characters.
    """
    target = normalise(target)
    alphabet, symbols = sorted(set(target)), _symbols(tuple(characters))
    if missing := [c for c in alphabet if c not in symbols]:
        raise ValueError(
            f'target is "{target}", but the recogniser lacks {" ".join(missing)}; '
            "use characters that it reads."
        )
    columns = [frames[:, 0], *(frames[:, symbols[c]].sum(-1) for c in alphabet)]
    probs = np.stack(columns, -1).astype(np.float64)
    probs = (1 - probs.shape[1] * FLOOR) * probs + FLOOR
    log_p = ctc_log_likelihood(np.log(probs), [1 + alphabet.index(c) for c in target])
    return math.exp(min(0.0, log_p) / (len(target) * TEMPERATURE))


def ctc_log_likelihood(log_probs: np.ndarray, labels: Sequence[int]) -> float:
    """Log-likelihood of labels under frames (T, S) of log-probabilities; label 0 is the blank."""
    import torch

    return -torch.nn.functional.ctc_loss(
        torch.from_numpy(log_probs)[:, None],
        torch.tensor([labels]),
        torch.tensor([len(log_probs)]),
        torch.tensor([len(labels)]),
        reduction="sum",
    ).item()


def frames_needed(target: str) -> int:
    """Smallest T for which CTC can align a text: its length, plus a blank in each double letter."""
    return len(target) + sum(a == b for a, b in itertools.pairwise(target))


def _read(images: list[Image.Image], detect: bool, threads: int) -> list[str]:
    if detect:
        return [text_reader.read_lines(image, threads) for image in images]
    characters = text_reader.characters(threads)
    frames = text_reader.recognise(images, threads)
    return [text_reader.decode(frames_of_image, characters) for frames_of_image in frames]


def _likelihoods(
    images: list[Image.Image], targets: list[str], detect: bool, threads: int
) -> list[float]:
    detected = [text_reader.crop_lines(i, threads) if detect else [] for i in images]
    crops = [found or [image] for found, image in zip(detected, images, strict=True)]
    # Each line is long enough for the complete target: which line shows it is not known yet.
    needed = [frames_needed(t) for t, lines in zip(targets, crops, strict=True) for _ in lines]
    # One call for the lines of all images, so that lines of equal width share a batch.
    recognised = text_reader.recognise([c for lines in crops for c in lines], threads, needed)
    frames, characters = iter(recognised), text_reader.characters(threads)
    joined = [_join([next(frames) for _ in lines], characters.index(" ")) for lines in crops]
    return [likelihood(f, characters, target) for f, target in zip(joined, targets, strict=True)]


def _join(lines: list[np.ndarray], space: int) -> np.ndarray:
    """Joins the frames (T, C) of lines, with a space of probability 1 between two lines."""
    gap = np.zeros_like(lines[0][:1])
    gap[:, space] = 1
    return np.concatenate([part for line in lines for part in (gap, line)][1:])


@functools.cache
def _symbols(characters: tuple[str, ...]) -> dict[str, list[int]]:
    """Returns the indices of symbols, except for the blank, by normalised character."""
    symbols: dict[str, list[int]] = defaultdict(list)
    for index, character in enumerate(characters[1:], 1):
        symbols[normalise(character) or " "].append(index)  # only a space normalises to ""
    return dict(symbols)
