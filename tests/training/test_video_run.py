"""A run of an image-to-video pipeline: pictures go in, videos come out, into files that play."""

import json

import numpy as np
import pytest
import yaml
from families import built
from families.parts import picture
from PIL import Image
from tiny_run import flowgrpo

from flowgrpo.core.config_file import load_config
from flowgrpo.data.prompts import load_prompts
from flowgrpo.data.samples import load_sample, read_video, strip_of

CALL = {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 8}

REWARDS = """
def change(videos, prompts, image, **columns):
    return [float(len(v)) + video_mean(v[-1]) - video_mean(v[0]) for v in videos]


def redness(images, prompts, image, **columns):
    assert all(given.size == (24, 24) for given in image)
    return [i.resize((1, 1)).getpixel((0, 0))[0] / 255 for i in images]


def video_mean(frame):
    return sum(frame.resize((1, 1)).getpixel((0, 0))) / 765
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A run of one epoch on two pictures, whose rewards take videos, and images."""
    folder = tmp_path_factory.mktemp("world")
    built("wan-2.2-5b-i2v").save_pretrained(folder / "model")
    (folder / "rewards.py").write_text(REWARDS)
    lines = []
    for seed in range(2):
        picture(seed=seed).resize((24, 24)).save(folder / f"{seed}.png")
        lines.append({"prompt": "a cat", "image": f"{seed}.png", "negative_prompt": "dull"})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = {
        "output_dir": str(folder / "run"),
        "fps": 8,
        "model": {"path": str(folder / "model")},
        "prompts": {"train": str(folder / "rows.jsonl")},
        "rewards": [f"{folder}/rewards.py:change", f"{folder}/rewards.py:redness"],
        "sampling": {
            "num_inference_steps": 3,
            "group_size": 2,
            "groups_per_epoch": 2,
            "call": {**CALL, "guidance_scale": 2.0},
        },
        "train": {"epochs": 1, "lora": {"rank": 4, "alpha": 8}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert flowgrpo("train", folder / "config.yaml") == 0
    return folder


def test_a_video_run_leaves_videos_and_strips(world):
    for name in ("0000-seed0", "0001-seed0"):
        path = world / "run" / "eval" / "epoch-0000" / "train_prompts" / name
        assert len(read_video(path.with_suffix(".mp4"))) == 5
        assert [frame.size for frame in load_sample(path.with_suffix(".png"))] == [(16, 16)] * 5
    samples = world / "run" / "samples"
    assert len(list((samples / "epoch-0001").glob("*.mp4"))) == 4
    assert Image.open(samples / "epoch-0001.png").width > 2 * 5 * 96
    assert Image.open(world / "run" / "compare.png").width > 2 * 5 * 96


def test_the_pictures_of_the_rows_reach_the_pipeline(world):
    folder = world / "run" / "eval" / "epoch-0000" / "train_prompts"
    one, two = (load_sample(folder / f"000{i}-seed0.png") for i in range(2))
    assert not np.array_equal(one[-1], two[-1])


def test_the_snippet_opens_the_rows_picture_and_gives_the_runs_video(world, monkeypatch):
    import torch

    from flowgrpo.core.seeds import initial_noise_seed
    from flowgrpo.pipelines.loading import DiffusionPipeline
    from flowgrpo.reporting.snippet import inference_snippet

    monkeypatch.chdir(world)
    config = load_config(world / "run" / "config.yaml")
    (row, _) = load_prompts(world / "rows.jsonl")
    pipeline = type(DiffusionPipeline.from_pretrained(world / "model"))
    code = inference_snippet(config, pipeline, world / "run" / "lora", row)
    assert "from diffusers.utils import export_to_video, load_image" in code
    assert "negative_prompt='dull'" in code
    noise = "generator=torch.Generator().manual_seed(seed)"
    scope = {"torch": torch, "seed": initial_noise_seed(0, "a cat", 0)}
    exec(
        code.replace("pipe(prompt='a cat'", f"pipe(prompt='a cat', {noise}, output_type='pil'"),
        scope,
    )
    saved = load_sample(world / "run/eval/epoch-0001/train_prompts/0000-seed0.png")
    for frame, expected in zip(strip_of(scope["frames"]), saved, strict=True):
        assert np.array_equal(frame, expected)
    assert (world / "video.mp4").stat().st_size > 0


def test_a_compared_grid_is_a_picture_and_a_video_and_a_cell_alone_equals_its_cell(world, capsys):
    from flowgrpo.reporting import model_grid as compare

    assert flowgrpo("compare", world / "run", "--num-prompts", 2, "--out", world / "grid.png") == 0
    grid, frames = Image.open(world / "grid.png"), read_video(world / "grid.mp4")
    assert len(frames) == 5
    assert grid.width > frames[0].width > 2 * 96
    columns = compare.columns_of_runs([world / "run"])
    rows = load_prompts(world / "rows.jsonl")
    cells = compare.sample_columns(columns, rows, [0])
    ((alone,),) = compare.sample_columns(columns[1:], rows[1:], [0])
    for frame, expected in zip(alone, cells[1][1], strict=True):
        assert np.array_equal(frame, expected)
    assert not np.array_equal(cells[1][0], cells[1][1])
