"""Grids hold every picture at its place, under its labels."""

from PIL import Image

from flowgrpo.reporting.grid import (
    CELL,
    FRAME,
    GAP,
    LABEL_WIDTH,
    LINE,
    MARGIN,
    animate_grid,
    draw_grid,
)


def picture(colour, size=(64, 32)):
    return Image.new("RGB", size, colour)


def test_small_pictures_are_enlarged_and_stand_at_their_cells():
    sheet = draw_grid(
        [[picture("red"), picture("lime")], [picture("blue"), picture("black")]],
        ["first", "second"],
        ["base", "tuned"],
        [["0.10", "0.90"], ["0.20", "0.80"]],
    )
    row_height = CELL // 2 + LINE + MARGIN
    for r, colours in enumerate([((255, 0, 0), (0, 255, 0)), ((0, 0, 255), (0, 0, 0))]):
        for c, colour in enumerate(colours):
            left, top = LABEL_WIDTH + c * (CELL + MARGIN), LINE + MARGIN + r * row_height
            for x, y in ((1, 1), (CELL - 2, CELL // 2 - 2)):
                assert sheet.getpixel((left + x, top + y)) == colour
    assert sheet.size == (LABEL_WIDTH + 2 * (CELL + MARGIN), LINE + MARGIN + 2 * row_height)


def test_labels_and_captions_are_drawn():
    bare = draw_grid([[picture("white")]], [""], [""], [[""]])
    labelled = draw_grid([[picture("white")]], ["a prompt"], ["base"], [["0.5"]])
    boxes = {
        "column": (LABEL_WIDTH, 0, LABEL_WIDTH + CELL, LINE),
        "row": (0, LINE + MARGIN, LABEL_WIDTH, LINE + MARGIN + CELL // 2),
        "caption": (LABEL_WIDTH, LINE + MARGIN + CELL // 2, LABEL_WIDTH + CELL, bare.height),
    }
    for name, box in boxes.items():
        assert bare.crop(box).getcolors(2) == [(_area(box), (255, 255, 255))], name
        assert len(labelled.crop(box).getcolors(256)) > 1, name


def test_large_pictures_are_reduced():
    sheet = draw_grid([[picture("red", (1024, 512))]], ["a"], ["b"])
    assert sheet.width == LABEL_WIDTH + 2 * CELL + MARGIN


def test_a_video_is_a_strip_of_its_first_its_last_and_frames_between():
    video = [picture((20 * i, 0, 0), (FRAME, FRAME)) for i in range(9)]
    sheet = draw_grid([[video, video[:2]]], ["a"], ["base", "tuned"])
    step, top = FRAME + GAP, LINE + MARGIN
    reds = [sheet.getpixel((LABEL_WIDTH + step * i, top))[0] for i in range(5)]
    assert reds == [0, 40, 80, 120, 160]
    second = LABEL_WIDTH + 5 * step - GAP + MARGIN
    assert sheet.getpixel((second + step, top)) == (20, 0, 0)


def test_all_videos_of_an_animated_grid_play_at_once_with_their_labels():
    cells = [[[picture("red"), picture("lime"), picture("blue")], [picture("lime")]]]
    labels = ["a prompt"], ["base", "tuned"], [["0.5", "0.6"]]
    frames = list(animate_grid(cells, *labels))
    stills = [[[video[min(i, len(video) - 1)] for video in cells[0]]] for i in range(3)]
    assert [list(f.getdata()) for f in frames] == [
        list(draw_grid(still, *labels).getdata()) for still in stills
    ]


def test_pictures_of_different_sizes_do_not_overlap():
    sheet = draw_grid([[picture("red", (64, 32)), picture("blue", (64, 96))]] * 2, "ab", "cd")
    tall = 96 * (CELL // 64)
    assert sheet.size == (LABEL_WIDTH + 2 * (CELL + MARGIN), LINE + MARGIN + 2 * (tall + MARGIN))


def _area(box):
    return (box[2] - box[0]) * (box[3] - box[1])
