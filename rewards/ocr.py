"""Does the picture show the words that were asked for?

`edit_similarity` and `exact` compare the text that was read; `likelihood` asks the recogniser how
probable the wanted text is. The first two are staircases: many pictures of an early run tie. The
last is dense: every change of a stroke moves it, so that a group of pictures hardly ever ties.

Text is compared after `normalise`: case, width, kind of quote or dash and amount of spacing do not
count; letters, digits, accents and punctuation do. Lines of text are joined by one space.
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

from . import reader
from .pictures import to_pil

if TYPE_CHECKING:
    from PIL import Image

    from .pictures import Images

SCORES = ("edit_similarity", "likelihood", "exact")

FLOOR = 1e-6
"""Least probability of a symbol in a frame; less than this is noise in a network's tails."""

TEMPERATURE = 5.0
"""Nats a character that cost a factor of e: one wrong letter of three scores about 0.4."""

_DOUBLE = re.compile('["“”„]([^"“”„]+)["“”]')
_SINGLE = re.compile(r"(?<!\w)['‘]((?:[^'‘’]|(?<=\w)['’](?=\w))+)['’](?!\w)")
_FOLD = str.maketrans("‘’ʼ“”„–—", "'''\"\"\"--")


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
    """Score how well each picture shows its text.

    Args:
        images: B PIL images, or a float tensor (B, 3, H, W) in [0, 1].
        prompts: B prompts; quoted text is the target of a picture without a `target`.
        target: dataset column of B texts; None or "" leaves it to the prompt, see `find_target`.
        score: `edit_similarity`, 1 - edits / length of the longer text, so that missing and extra
            text both cost; `exact`, 1 for the same text and 0 otherwise; or `likelihood`, dense,
            see the function of that name.
        detect: look for lines of text first. False takes the whole picture for one line, which is
            faster, and right where a word fills it. `likelihood` does so too if no line is found.
        threads: of onnxruntime; by default half the cores, at most 4.
        columns: other dataset columns, not read.

    Returns:
        B scores in [0, 1].

    Raises:
        ValueError: no target, one with characters unknown to the recogniser (`likelihood`), an
            unknown `score`, or wrong counts.
        ImportError: RapidOCR is not installed.
    """
    if score not in SCORES:
        raise ValueError(
            f"score is {score}, but must be one of {', '.join(SCORES)}; correct the spelling."
        )
    pictures = to_pil(images, prompts, columns if target is None else {"target": target, **columns})
    targets = target or [None] * len(pictures)
    wanted = [find_target(*row) for row in zip(prompts, targets, strict=True)]
    threads = threads or reader.default_threads()
    if score == "likelihood":
        return _likelihoods(pictures, wanted, detect, threads)
    texts = _read(pictures, detect, threads)
    if score == "exact":
        return [float(normalise(text) == want) for text, want in zip(texts, wanted, strict=True)]
    return [edit_similarity(text, want) for text, want in zip(texts, wanted, strict=True)]


def validate(prompt: str, **row: Any) -> None:
    """Raise ValueError for a data row that names no text to look for."""
    find_target(prompt, row.get("target"))


ocr.validate = validate  # type: ignore[attr-defined]
ocr.overlap = True  # type: ignore[attr-defined]
ocr.columns = ("target",)  # type: ignore[attr-defined]


def find_target(prompt: str, target: str | None = None) -> str:
    """The text a picture should show, normalised: `target` if given, else the prompt's quoted text.

    Double quotes (straight or curly) come first; single ones count where there are no double ones,
    and an apostrophe within a word is no quote. Several quoted texts are joined by a space.

    Raises:
        ValueError: there is none.
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
    """Unicode NFKC (full-width letters as plain ones), lower case, plain quotes and dashes, and one
    space for any spacing within the text."""
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
    alphabet of normalised characters: a character has the summed probability of its cases and
    widths. Three choices make it a reward:

    - Per character: else longer words score lower, and their groups spread more.
    - A floor, q = (1 - n FLOOR) p + FLOOR for the n symbols that are blank or in the target, still
      at most a distribution. A wrong character costs at most -log FLOOR = 13.8 nats, where the
      network's tails give anything from 5 to 45 that says little about the picture.
    - A temperature: networks are over-confident; without it one wrong letter of three scores 0.01
      and everything worse is crowded near 0.

    Args:
        frames: (T, C) probabilities; symbol 0 is CTC's blank.
        characters: the C symbols.
        target: text that needs at most T frames, see `frames_needed`.

    Returns:
        A number in (0, 1]: above 0.99 for a clear rendering; for words of three letters about 0.4
        with one letter wrong, 0.07 for another word and 0.13 for an empty picture.

    Raises:
        ValueError: the recogniser lacks one of the target's characters.
    """
    target = normalise(target)
    alphabet, symbols = sorted(set(target)), _symbols(tuple(characters))
    if missing := [c for c in alphabet if c not in symbols]:
        raise ValueError(
            f'target is "{target}", but the recogniser does not know {" ".join(missing)}; '
            "use characters it reads."
        )
    columns = [frames[:, 0], *(frames[:, symbols[c]].sum(-1) for c in alphabet)]
    probs = np.stack(columns, -1).astype(np.float64)
    probs = (1 - probs.shape[1] * FLOOR) * probs + FLOOR
    log_p = ctc_log_likelihood(np.log(probs), [1 + alphabet.index(c) for c in target])
    return math.exp(min(0.0, log_p) / (len(target) * TEMPERATURE))


def ctc_log_likelihood(log_probs: np.ndarray, labels: Sequence[int]) -> float:
    """log p of a label sequence under frames (T, S) of log-probabilities; label 0 is the blank."""
    import torch

    return -torch.nn.functional.ctc_loss(
        torch.from_numpy(log_probs)[:, None],
        torch.tensor([labels]),
        torch.tensor([len(log_probs)]),
        torch.tensor([len(labels)]),
        reduction="sum",
    ).item()


def frames_needed(target: str) -> int:
    """Least number of frames that CTC can write a text in: its length, and a blank in each pair."""
    return len(target) + sum(a == b for a, b in itertools.pairwise(target))


def _read(pictures: list[Image.Image], detect: bool, threads: int) -> list[str]:
    if detect:
        return [reader.read_lines(picture, threads) for picture in pictures]
    characters = reader.characters(threads)
    return [reader.decode(frames, characters) for frames in reader.recognise(pictures, threads)]


def _likelihoods(
    pictures: list[Image.Image], wanted: list[str], detect: bool, threads: int
) -> list[float]:
    found = [reader.crop_lines(p, threads) if detect else [] for p in pictures]
    lines = [own or [picture] for own, picture in zip(found, pictures, strict=True)]
    needed = [frames_needed(want) for want, own in zip(wanted, lines, strict=True) for _ in own]
    frames = iter(reader.recognise([line for own in lines for line in own], threads, needed))
    characters = reader.characters(threads)
    joined = [_join([next(frames) for _ in own], characters.index(" ")) for own in lines]
    return [likelihood(f, characters, want) for f, want in zip(joined, wanted, strict=True)]


def _join(lines: list[np.ndarray], space: int) -> np.ndarray:
    """Frames (T, C) of a text from those of its lines, with a certain space between two lines."""
    gap = np.zeros_like(lines[0][:1])
    gap[:, space] = 1
    return np.concatenate([part for line in lines for part in (gap, line)][1:])


@functools.cache
def _symbols(characters: tuple[str, ...]) -> dict[str, list[int]]:
    """Normalised character -> its symbols, without the blank; only a space normalises to ""."""
    symbols: dict[str, list[int]] = defaultdict(list)
    for index, character in enumerate(characters[1:], 1):
        symbols[normalise(character) or " "].append(index)
    return dict(symbols)
