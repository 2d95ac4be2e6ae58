"""Draws the README's figure of how training works: python scripts/draw_how_it_works.py.

The signs are those of the embedded model's world, and the advantages are computed, not made up.
Coordinates are pixels of the figure, y downwards; the README shows it at half this size.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.path import Path as MplPath
from tiny_world import draw_sign, sign_prompt

from flowgrpo.algorithms.advantages import group_normalised

TARGET = Path(__file__).parent.parent / "assets" / "how_it_works.png"
WIDTH, HEIGHT, DPI = 1600, 892, 160

INK, FAINT, EDGE, PAPER = "#1d2129", "#667080", "#aab1bc", "#ffffff"
PANEL, BORDER, PALE = "#f7f8fa", "#d5d9e0", "#e4e8ef"
ORANGE, PALE_ORANGE, BLUE, GREEN, RED = "#d9600a", "#ffe3cc", "#2563c9", "#1d8a4a", "#c23b3b"
SMALL, TITLE = 10, 14  # points

COLOUR, ASKED = "red", "CAT"
GROUP = {"CAT": 1.0, "CAE": 2 / 3, "HAT": 2 / 3, "HOG": 0.0}
"""Words on the signs of a group, and their edit similarity to the word asked for."""
SIGMAS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
WINDOW = (1, 2)

LEFT, RIGHT = (96, 1004), (1164, 1576)
"""Horizontal extent of the pipeline's panels, and of those for rewards and advantages."""
TILE, PITCH = (92, 46), 154
"""Size of a tile, and the distance between two."""


def main() -> None:
    """Draws the figure and writes it to assets/."""
    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, facecolor=PAPER)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    ax.axis("off")
    draw_record(ax, top=24, bottom=300)
    draw_tape(ax, top=360, bottom=492)
    draw_play(ax, top=552, bottom=868)
    draw_score(ax, top=24, bottom=410)
    draw_advantages(ax, top=482, bottom=868)
    draw_flow(ax)
    figure.savefig(TARGET, dpi=DPI, metadata={"Software": None})
    print(TARGET)


def draw_record(ax: Axes, top: float, bottom: float) -> None:
    """Stage 1: the loop that samples, with its stochastic window."""
    texts = "Record", "the stock pipeline, unmodified, samples K images"
    draw_panel(ax, LEFT, top, bottom, "1", *texts)
    middle = top + 146
    for index in range(len(SIGMAS)):
        draw_stack(ax, index, middle)
    for step in range(len(SIGMAS) - 1):
        draw_step(ax, step, middle, ORANGE if step in WINDOW else FAINT)
    draw_bracket(ax, middle + 50, "window: drawn from a Gaussian")
    write(ax, tile_x(0) - TILE[0] / 2, middle + 84, "stock step", FAINT, va="baseline")
    write(ax, step_x(4), middle + 84, "stock steps", FAINT, ha="center", va="baseline")


def draw_tape(ax: Axes, top: float, bottom: float) -> None:
    """The film between recording and playing: what is kept of every step."""
    box = (LEFT[0], top), LEFT[1] - LEFT[0], bottom - top
    ax.add_patch(FancyBboxPatch(*box, boxstyle="round,pad=0,rounding_size=8", fc=INK, ec=INK))
    for x in np.arange(LEFT[0] + 14, LEFT[1] - 20, 26.4):
        for y in (top + 8, bottom - 20):
            ax.add_patch(Rectangle((x, y), 14, 12, fc=PAPER, ec="none", alpha=0.85))
    write(ax, LEFT[0] + 36, (top + bottom) / 2, "Tape", PAPER, TITLE - 2, "bold", rotation=90)
    before, during, after = "latents\noutput", "latents\nmean, std", "latents"
    for step in range(len(SIGMAS) - 1):
        in_window = step in WINDOW
        x, height = step_x(step), bottom - top - 56
        fill = PALE_ORANGE if in_window else PALE
        ax.add_patch(Rectangle((x - 70, top + 28), 140, height, fc=fill, ec="none"))
        text = during if in_window else before if step < WINDOW[0] else after
        write(ax, x, (top + bottom) / 2, text, ORANGE if in_window else INK, ha="center")


def draw_play(ax: Axes, top: float, bottom: float) -> None:
    """Stage 4: the same loop on the taped latents, with gradients in the window."""
    texts = "Play", "the same pipeline replays the tape"
    draw_panel(ax, LEFT, top, bottom, "4", *texts)
    middle, last = top + 136, max(WINDOW)
    for index in range(len(SIGMAS)):
        draw_stack(ax, index, middle, faded=index > last + 1)
    for step in range(last + 1):
        in_window = step in WINDOW
        draw_step(ax, step, middle, ORANGE if in_window else FAINT, dashed=not in_window)
    draw_bracket(ax, middle + 50, "denoiser runs with gradients")
    write(ax, tile_x(0) - TILE[0] / 2, middle + 84, "taped output", FAINT, va="baseline")
    write(ax, step_x(4), middle + 84, "not replayed", FAINT, ha="center", va="baseline")
    y = bottom - 46
    write(ax, LEFT[0] + 24, y, r"ratio = exp(new $-$ taped log-prob)", INK)
    write(ax, LEFT[1] - 24, y, r"maximize clipped ratio $\times$ advantage", INK, ha="right")


def draw_score(ax: Axes, top: float, bottom: float) -> None:
    """Stage 2: a reward for every image."""
    draw_panel(ax, RIGHT, top, bottom, "2", "Score", "any function of images, prompts")
    write(ax, RIGHT[0] + 24, top + 118, sign_prompt(COLOUR, ASKED), INK, style="italic")
    for row, (word, reward) in enumerate(GROUP.items()):
        y = top + 172 + 57 * row
        draw_tile(ax, sign(word), (RIGHT[0] + 72, y), size=(88, 44))
        x = RIGHT[0] + 144
        ax.add_patch(Rectangle((x, y - 11), 180, 22, fc=PALE, ec="none"))
        ax.add_patch(Rectangle((x, y - 11), 180 * reward, 22, fc=BLUE, ec="none"))
        write(ax, RIGHT[1] - 22, y, f"{reward:.2f}", INK, ha="right")


def draw_advantages(ax: Axes, top: float, bottom: float) -> None:
    """Stage 3: rewards relative to those of the group."""
    draw_panel(ax, RIGHT, top, bottom, "3", "Advantages", "within the prompt's group")
    write(ax, RIGHT[0] + 24, top + 118, r"(reward $-$ mean) / std", INK)
    (values,) = group_normalised([torch.tensor(list(GROUP.values()))])
    zero = RIGHT[0] + 246
    for row, (word, value) in enumerate(zip(GROUP, values.tolist(), strict=True)):
        y = top + 172 + 57 * row
        draw_tile(ax, sign(word), (RIGHT[0] + 72, y), size=(88, 44))
        colour = GREEN if value > 0 else RED
        ax.add_patch(Rectangle((zero, y - 11), 56 * value, 22, fc=colour, ec="none"))
        write(
            ax, RIGHT[1] - 22, y, f"{value:+.2f}".replace("-", "\N{MINUS SIGN}"), colour, ha="right"
        )
    ax.plot([zero, zero], [top + 146, top + 369], color=FAINT, lw=1)


def draw_flow(ax: Axes) -> None:
    """The arrows between the stages, and what they carry."""
    between, middle = (LEFT[1] + RIGHT[0]) / 2, (RIGHT[0] + RIGHT[1]) / 2
    for step in range(len(SIGMAS) - 1):
        colour, x = ORANGE if step in WINDOW else FAINT, step_x(step)
        draw_arrow(ax, [(x, 308), (x, 354)], colour)
        if step <= max(WINDOW):
            draw_arrow(ax, [(x, 498), (x, 546)], colour)
    draw_arrow(ax, [(LEFT[1] + 10, 170), (RIGHT[0] - 10, 170)], INK, 2.4)
    write(ax, between, 148, "images", INK, ha="center")
    draw_arrow(ax, [(middle, 418), (middle, 474)], INK, 2.4)
    write(ax, middle + 20, 445, "rewards", INK)
    draw_arrow(ax, [(RIGHT[0] - 10, 688), (LEFT[1] + 10, 688)], INK, 2.4)
    write(ax, between, 666, "advantages", INK, ha="center")
    x = LEFT[0] - 40
    around = [(LEFT[0] - 10, 688), (x, 688), (x, 170), (LEFT[0] - 10, 170)]
    draw_arrow(ax, around, INK, 2.4)
    write(ax, x - 22, 429, "optimizer updates the LoRA", INK, ha="center", rotation=90)


def draw_panel(
    ax: Axes, extent: tuple[int, int], top: float, bottom: float, number: str, *texts: str
) -> None:
    """A rounded box with the number, name and description of a stage."""
    corner, width, height = (extent[0], top), extent[1] - extent[0], bottom - top
    style = "round,pad=0,rounding_size=14"
    ax.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, fc=PANEL, ec=BORDER, lw=1.2))
    x, y = extent[0] + 42, top + 40
    ax.add_patch(Circle((x, y), 20, fc=INK, ec="none"))
    write(ax, x, y + 1, number, PAPER, TITLE - 2, "bold", ha="center")
    title, subtitle = texts
    write(ax, x + 34, y, title, INK, TITLE, "bold")
    if width > 600:
        write(ax, x + 180, y + 2, subtitle, FAINT)
    else:
        write(ax, extent[0] + 24, y + 42, subtitle, FAINT)


def draw_stack(ax: Axes, index: int, y: float, faded: bool = False) -> None:
    """The latents of a group before step `index`, one in front of the others."""
    for depth, word in reversed(list(enumerate(list(GROUP)[:3]))):
        noise = np.random.default_rng(depth).normal(0.5, 0.28, (16, 32, 3))
        noise = noise.repeat(2, axis=0).repeat(2, axis=1)
        noisy = SIGMAS[index] * noise + (1 - SIGMAS[index]) * sign(word)
        if faded:
            noisy = 0.88 + 0.12 * noisy
        draw_tile(ax, noisy.clip(0, 1), (tile_x(index) + 7 * depth - 7, y - 7 * depth + 7))


def draw_tile(
    ax: Axes, image: np.ndarray, center: tuple[float, float], size: tuple[int, int] = TILE
) -> None:
    """One image with a thin frame."""
    (x, y), (width, height) = center, size
    left, top = x - width / 2, y - height / 2
    extent = (left, left + width, top + height, top)
    ax.imshow(image, extent=extent, aspect="auto", interpolation="nearest", zorder=2)
    ax.add_patch(Rectangle((left, top), width, height, fc="none", ec=EDGE, lw=0.8, zorder=2))


def draw_step(ax: Axes, step: int, y: float, colour: str, dashed: bool = False) -> None:
    """The arrow of one step, from its latents to the next."""
    start, end = tile_x(step) + TILE[0] / 2 + 14, tile_x(step + 1) - TILE[0] / 2 - 12
    draw_arrow(ax, [(start, y), (end, y)], colour, 3 if colour == ORANGE else 1.8, dashed)


def draw_bracket(ax: Axes, y: float, text: str) -> None:
    """A bracket under the steps of the window, and a text below it."""
    left, right = tile_x(WINDOW[0]) - TILE[0] / 2, tile_x(WINDOW[-1] + 1) + TILE[0] / 2
    ax.plot([left, left, right, right], [y - 8, y, y, y - 8], color=ORANGE, lw=1.6)
    write(ax, (left + right) / 2, y + 34, text, ORANGE, ha="center", va="baseline")


def draw_arrow(
    ax: Axes,
    points: Sequence[tuple[float, float]],
    colour: str,
    width: float = 1.8,
    dashed: bool = False,
) -> None:
    """An arrow along straight lines through the points."""
    style: dict[str, Any] = {
        "arrowstyle": "-|>",
        "mutation_scale": 8 + 2.5 * width,
        "joinstyle": "miter",
    }
    line = (0, (2.5, 1.6)) if dashed else "solid"
    path = MplPath(points)
    ax.add_patch(FancyArrowPatch(path=path, fc=colour, ec=colour, lw=width, ls=line, **style))


def write(
    ax: Axes,
    x: float,
    y: float,
    text: str,
    colour: str,
    size: float = SMALL,
    weight: str = "normal",
    **options: str | float,
) -> None:
    """Text, centered vertically on y unless `va` is given."""
    defaults: dict[str, Any] = {"ha": "left", "va": "center", "linespacing": 1.25}
    ax.text(x, y, text, color=colour, fontsize=size, fontweight=weight, **{**defaults, **options})


def sign(word: str) -> np.ndarray:
    """The sign with this word, (H, W, 3) in [0, 1]."""
    return np.asarray(draw_sign(COLOUR, word)) / 255


def tile_x(index: int) -> float:
    """Center of a tile."""
    return sum(LEFT) / 2 + PITCH * (index - (len(SIGMAS) - 1) / 2)


def step_x(step: int) -> float:
    """Center of a step: between its tile and the next."""
    return tile_x(step) + PITCH / 2


if __name__ == "__main__":
    main()
