"""Columns of images and videos, opened or refused, and samples, written and read."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from flowgrpo.core.config_file import parse_config
from flowgrpo.core.errors import ConfigError
from flowgrpo.data.media import open_media
from flowgrpo.data.prompts import load_prompts
from flowgrpo.data.samples import load_sample, read_video, save_sample, strip_of
from flowgrpo.preflight.inputs import read_inputs


def make_image(seed=0, size=(32, 16)):
    """Squares of 8 x 8 pixels in random colours."""
    rng = np.random.default_rng(seed)
    colours = rng.integers(0, 256, (-(-size[1] // 8), -(-size[0] // 8), 3), np.uint8)
    return Image.fromarray(colours.repeat(8, 0).repeat(8, 1)[: size[1], : size[0]])


def make_video(frames=8, size=(32, 16)):
    return [make_image(seed, size) for seed in range(frames)]


def equal(a, b):
    return np.array_equal(np.asarray(a), np.asarray(b))


def mean_difference(a, b):
    """Mean absolute difference, in levels of 255."""
    return np.abs(np.asarray(a, dtype=float) - np.asarray(b, dtype=float)).mean()


def test_paths_are_relative_to_the_prompt_file_and_opened_on_demand(tmp_path, monkeypatch):
    folder = tmp_path / "prompts"
    folder.mkdir()
    make_image(0).save(folder / "a.png")
    make_image(1).convert("RGBA").save(folder / "b.png")
    save_sample(make_video(), folder / "c.png", fps=8)
    line = '{"prompt": "x", "image": "a.png", "reference_images": ["a.png", "b.png"]'
    line += ', "mask_image": "b.png", "video": "c.mp4", "last_image": null, "caption": "a.png"}'
    (folder / "rows.jsonl").write_text(line)
    monkeypatch.chdir(tmp_path)
    (row,) = load_prompts("prompts/rows.jsonl")
    assert row.columns["image"] == "prompts/a.png"
    columns = open_media(row.columns)
    assert equal(columns["image"], make_image(0))
    assert [p.mode for p in columns["reference_images"]] == ["RGB", "RGB"]
    assert equal(columns["mask_image"], make_image(1).convert("L"))
    assert len(columns["video"]) == 8
    assert columns["last_image"] is None
    assert columns["caption"] == "a.png"
    (folder / "rows.csv").write_text("prompt,image\nx,\ny,a.png\n")
    assert [row.columns["image"] for row in load_prompts("prompts/rows.csv")] == [
        None,
        "prompts/a.png",
    ]


def test_images_of_a_dataset_stay_there_until_they_are_opened():
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    features = {
        "prompt": datasets.Value("string"),
        "image": datasets.Image(),
        "images": datasets.List(datasets.Image()),
        "target": datasets.Value("string"),
    }
    data = datasets.Dataset.from_dict(
        {
            "prompt": ["a", "b"],
            "image": [make_image(0), make_image(1)],
            "images": [[make_image(2), make_image(3)], []],
            "target": ["A", "B"],
        },
        features=datasets.Features(features),
    )
    rows = load_prompts(data)
    assert not any(isinstance(value, Image.Image) for value in rows[1].columns.values())
    columns = open_media(rows[1].columns)
    assert equal(columns["image"], make_image(1))
    assert columns["target"] == "B"
    assert equal(open_media(rows[0].columns)["images"][1], make_image(3))


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("image", "none.png", "there is no such file"),
        ("image", "cut.png", "cannot be read"),
        ("control_image", "cut.jpg", "cannot be read"),
        ("images", ["complete.png", "cut.png"], "cut.png, but cannot be read"),
        ("video", "cut.mp4", "it ends after"),
        ("video", "complete.txt", "cannot be read"),
        ("image", 3, "of type int, but must be a path"),
    ],
)
def test_media_that_cannot_be_read_is_refused_by_file_and_line(tmp_path, column, value, reason):
    make_image(0, (64, 64)).save(tmp_path / "complete.png")
    make_image(0, (64, 64)).save(tmp_path / "complete.jpg")
    save_sample(make_video(24), tmp_path / "clip.png", fps=8)
    shutil.copy(tmp_path / "clip.mp4", tmp_path / "complete.mp4")
    for name in ("complete.png", "complete.jpg", "complete.mp4"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name.replace("complete", "cut")).write_bytes(data[: len(data) // 2])
    (tmp_path / "complete.txt").write_text("not an image")
    rows = [{"prompt": "a", "image": "complete.png"}, {"prompt": "b", column: value}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match=rf"rows.jsonl line 2: {column} is .*{reason}") as error:
        load_prompts(tmp_path / "rows.jsonl")
    assert "\n" not in str(error.value)


def test_the_fingerprint_depends_on_contents_alone(tmp_path):
    def score(images, prompts, **columns):
        return [0.0] * len(images)

    def fingerprint(image):
        rows = [{"prompt": "a", "image": image, "level": 3, "target": None}]
        return read_inputs(parse_config({}), reward_funcs=score, train_dataset=rows).fingerprint

    path = tmp_path / "a.png"
    make_image(0).save(path)
    first = fingerprint(str(path))
    assert fingerprint(make_image(0)) == fingerprint(make_image(0)) != fingerprint(make_image(1))
    shutil.copy(path, tmp_path / "b.png")
    assert fingerprint(str(tmp_path / "b.png")) == first
    make_image(1).save(path)
    assert fingerprint(str(path)) != first


@pytest.mark.parametrize("size", [(33, 47), (32, 16)])
def test_a_video_is_written_for_browsers_and_its_strip_without_loss(tmp_path, size):
    import imageio.v2 as imageio

    video = make_video(9, size)
    save_sample(video, tmp_path / "a.png", fps=7.5)
    with imageio.get_reader(tmp_path / "a.mp4", "ffmpeg") as reader:
        metadata = reader.get_meta_data()
    assert (metadata["codec"], metadata["fps"]) == ("h264", 7.5)
    assert metadata["pix_fmt"].startswith("yuv420p(")
    assert metadata["size"] == (size[0] + size[0] % 2, size[1] + size[1] % 2)
    frames = read_video(tmp_path / "a.mp4")
    assert len(frames) == 9
    assert all(
        mean_difference(f.crop((0, 0, *size)), v) < 20 for f, v in zip(frames, video, strict=True)
    )
    strip = load_sample(tmp_path / "a.png")
    assert len(strip) == 5
    assert all(equal(f, v) for f, v in zip(strip, strip_of(video), strict=True))
    assert equal(strip[0], video[0])
    assert equal(strip[-1], video[-1])


def test_an_image_is_saved_without_loss(tmp_path):
    save_sample(make_image(), tmp_path / "a.png", fps=8)
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    assert equal(load_sample(tmp_path / "a.png"), make_image())
