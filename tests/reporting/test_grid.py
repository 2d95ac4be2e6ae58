"""Grids hold every image in its cell, with its labels."""

from PIL import Image

from flowgrpo.reporting.grid import (
    CELL_WIDTH,
    FRAME_WIDTH,
    GAP,
    LABEL_WIDTH,
    LINE_HEIGHT,
    MARGIN,
    animate_grid,
    draw_grid,
)


def image(colour, size=(64, 32)):
    return Image.new("RGB", size, colour)


def test_small_images_are_enlarged_and_are_in_their_cells():
    sheet = draw_grid(
        [[image("red"), image("lime")], [image("blue"), image("black")]],
        ["first", "second"],
        ["base", "tuned"],
        [["0.10", "0.90"], ["0.20", "0.80"]],
    )
    row_height = CELL_WIDTH // 2 + LINE_HEIGHT + MARGIN
    for r, colours in enumerate([((255, 0, 0), (0, 255, 0)), ((0, 0, 255), (0, 0, 0))]):
        for c, colour in enumerate(colours):
            left, top = (
                LABEL_WIDTH + c * (CELL_WIDTH + MARGIN),
                LINE_HEIGHT + MARGIN + r * row_height,
            )
            for x, y in ((1, 1), (CELL_WIDTH - 2, CELL_WIDTH // 2 - 2)):
                assert sheet.getpixel((left + x, top + y)) == colour
    assert sheet.size == (
        LABEL_WIDTH + 2 * (CELL_WIDTH + MARGIN),
        LINE_HEIGHT + MARGIN + 2 * row_height,
    )


def test_labels_and_captions_are_drawn():
    bare = draw_grid([[image("white")]], [""], [""], [[""]])
    labelled = draw_grid([[image("white")]], ["a prompt"], ["base"], [["0.5"]])
    boxes = {
        "column": (LABEL_WIDTH, 0, LABEL_WIDTH + CELL_WIDTH, LINE_HEIGHT),
        "row": (0, LINE_HEIGHT + MARGIN, LABEL_WIDTH, LINE_HEIGHT + MARGIN + CELL_WIDTH // 2),
        "caption": (
            LABEL_WIDTH,
            LINE_HEIGHT + MARGIN + CELL_WIDTH // 2,
            LABEL_WIDTH + CELL_WIDTH,
            bare.height,
        ),
    }
    for name, box in boxes.items():
        assert bare.crop(box).getcolors(2) == [(_area(box), (255, 255, 255))], name
        assert len(labelled.crop(box).getcolors(256)) > 1, name


def test_large_images_are_reduced():
    sheet = draw_grid([[image("red", (1024, 512))]], ["a"], ["b"])
    assert sheet.width == LABEL_WIDTH + 2 * CELL_WIDTH + MARGIN


def test_a_video_is_a_strip_from_its_first_frame_to_its_last():
    video = [image((20 * i, 0, 0), (FRAME_WIDTH, FRAME_WIDTH)) for i in range(9)]
    sheet = draw_grid([[video, video[:2]]], ["a"], ["base", "tuned"])
    step, top = FRAME_WIDTH + GAP, LINE_HEIGHT + MARGIN
    reds = [sheet.getpixel((LABEL_WIDTH + step * i, top))[0] for i in range(5)]
    assert reds == [0, 40, 80, 120, 160]
    second = LABEL_WIDTH + 5 * step - GAP + MARGIN
    assert sheet.getpixel((second + step, top)) == (20, 0, 0)


def test_all_videos_of_an_animated_grid_play_at_once_with_their_labels():
    cells = [[[image("red"), image("lime"), image("blue")], [image("lime")]]]
    labels = ["a prompt"], ["base", "tuned"], [["0.5", "0.6"]]
    frames = list(animate_grid(cells, *labels))
    stills = [[[video[min(i, len(video) - 1)] for video in cells[0]]] for i in range(3)]
    assert [list(f.getdata()) for f in frames] == [
        list(draw_grid(still, *labels).getdata()) for still in stills
    ]


def test_images_of_different_sizes_do_not_overlap():
    sheet = draw_grid([[image("red", (64, 32)), image("blue", (64, 96))]] * 2, "ab", "cd")
    tall = 96 * (CELL_WIDTH // 64)
    assert sheet.size == (
        LABEL_WIDTH + 2 * (CELL_WIDTH + MARGIN),
        LINE_HEIGHT + MARGIN + 2 * (tall + MARGIN),
    )


def _area(box):
    return (box[2] - box[0]) * (box[3] - box[1])
