"""The embedded models, CLIP and prompts, used with the stock libraries."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from diffusers import StableDiffusion3Pipeline, WanPipeline
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "assets"
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "configs")]
import tiny_video as video  # noqa: E402
import tiny_world as world  # noqa: E402
from motion import COLOURS, motion  # noqa: E402

MEGABYTE = 10**6


@pytest.fixture(scope="module")
def pipe():
    """The embedded image pipeline, opened without a dtype."""
    pipe = StableDiffusion3Pipeline.from_pretrained(
        ASSETS / "tiny-sd3", text_encoder_3=None, tokenizer_3=None
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def lines(name):
    return (ASSETS / "prompts" / f"{name}.txt").read_text().splitlines()


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def sample_with(pipe, prompts, **call):
    generator = torch.Generator().manual_seed(0)
    call = {"num_inference_steps": 10, "guidance_scale": 1.0, "max_sequence_length": 1} | call
    images = pipe(prompts, height=32, width=64, generator=generator, **call).images
    return [np.asarray(image).astype(float) for image in images]


def test_folders_are_within_their_sizes():
    assert 5 * MEGABYTE < size(ASSETS / "tiny-sd3") <= 12 * MEGABYTE
    assert size(ASSETS / "tiny-clip") <= 4 * MEGABYTE


def test_latents_have_1024_dimensions_on_32_tokens(pipe):
    latents = pipe(
        "a red circle", height=32, width=64, num_inference_steps=1, output_type="latent"
    ).images
    assert latents.shape == (1, 8, 8, 16)
    assert pipe.transformer.config.patch_size == 2


def test_transformer_and_vae_are_half_precision_on_disk():
    for part in ("transformer", "vae"):
        path = ASSETS / "tiny-sd3" / part / "diffusion_pytorch_model.safetensors"
        assert {weight.dtype for weight in load_file(path).values()} == {torch.float16}


def test_test_words_are_not_train_words():
    train, test = ({line.split('"')[1] for line in lines(f"signs_{s}")} for s in ("train", "test"))
    assert len(train) >= 150
    assert len(test) == 64
    assert not train & test
    assert all(set(word) <= set(world.LETTERS) and 2 <= len(word) <= 4 for word in train | test)


def test_test_shapes_are_not_train_shapes():
    train, test = (
        {frozenset(line.split(" and ")) for line in lines(name)}
        for name in ("shapes_train", "shapes_test")
    )
    assert len(lines("shapes_train")) >= 150
    assert len(lines("shapes_test")) == 64
    assert not train & test


def test_pretraining_scenes_never_hold_a_test_prompt():
    rng = random.Random(0)
    seen = {world.random_sign(rng)[0].split('"')[1] for _ in range(3000)}
    seen |= {world.random_shapes(rng)[0] for _ in range(3000)}
    held_out = {line.split('"')[1] for line in lines("signs_test")} | set(lines("shapes_test"))
    assert not seen & held_out


@pytest.mark.parametrize("make", [world.random_sign, world.random_shapes])
def test_a_prompt_draws_the_image_it_was_made_from(make):
    rng = random.Random(1)
    for _ in range(50):
        prompt, image = make(rng)
        assert np.array_equal(np.asarray(world.draw(prompt)), np.asarray(image))


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_2"])
def test_tokenizers_spell_words_but_have_a_token_for_each_fixed_word(pipe, name):
    tokenizer = getattr(pipe, name)
    tokens = tokenizer.tokenize('a red sign that says "REST"')
    assert tokens == ["a</w>", "red", "sign", "that", "says", '"</w>', *"res", "t</w>", '"</w>']
    longest = tokenizer('a purple sign that says "MOON"').input_ids
    assert len(longest) <= tokenizer.model_max_length == 16


def test_signs_have_their_colour(pipe):
    colours = list(world.COLOURS)
    images = sample_with(pipe, [world.sign_prompt(colour, "NOT") for colour in colours])
    for colour, image in zip(colours, images, strict=True):
        ground = np.median(image[5:27, 3:61].reshape(-1, 3), axis=0)
        distance = {name: np.abs(ground - rgb).sum() for name, rgb in world.COLOURS.items()}
        assert min(distance, key=distance.get) == colour
        assert distance[colour] < 60


def test_the_default_context_length_gives_nearly_the_image_of_one_zero_token(pipe):
    prompt = ['a green sign that says "HAT"']
    short, long = (sample_with(pipe, prompt, max_sequence_length=n)[0] for n in (1, 256))
    other = sample_with(pipe, ["two blue squares"])[0]
    assert np.abs(short - long).mean() < 0.3 * np.abs(short - other).mean()


@pytest.mark.parametrize("family", ["signs", "shapes"])
def test_tiny_clip_ranks_the_caption_first_among_32(family):
    name = f"local-dir:{ASSETS / 'tiny-clip'}"
    model, preprocess = open_clip.create_model_from_pretrained(name)
    tokenizer = open_clip.get_tokenizer(name)
    captions = lines(f"{family}_test")
    pixels = torch.stack([preprocess(world.draw(caption)) for caption in captions])
    with torch.no_grad():
        images = model.encode_image(pixels, normalize=True)
        texts = model.encode_text(tokenizer(captions), normalize=True)
    halves = [images[i : i + 32] @ texts[i : i + 32].T for i in (0, 32)]
    right = [(half.argmax(1) == torch.arange(32)).float().mean().item() for half in halves]
    assert np.mean(right) >= 0.9


def test_recorded_base_score_leaves_room_to_improve():
    scores = json.loads((ASSETS / "scores.json").read_text())
    assert 0.35 <= scores["ocr, 20 steps, guidance 1"][0] <= 0.7


@pytest.fixture(scope="module")
def video_pipe():
    """The embedded video pipeline, opened without a dtype."""
    pipe = WanPipeline.from_pretrained(ASSETS / "tiny-wan")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sample_clips_with(pipe, prompts, **call):
    """One clip of nine frames per prompt."""
    call = {"num_inference_steps": 8, "guidance_scale": 1.0, "max_sequence_length": 16} | call
    generator = torch.Generator().manual_seed(0)
    size = {"height": video.SIZE, "width": video.SIZE, "num_frames": video.NUM_FRAMES}
    return pipe(prompts, generator=generator, output_type="pil", **size, **call).frames


def motions(split):
    return [tuple(line.split()[i] for i in (1, 2, 4)) for line in lines(f"motions_{split}")]


def test_video_folder_is_within_its_size():
    assert MEGABYTE < size(ASSETS / "tiny-wan") <= 8 * MEGABYTE


def test_video_transformer_and_vae_are_half_precision_on_disk():
    for part in ("transformer", "vae"):
        path = ASSETS / "tiny-wan" / part / "diffusion_pytorch_model.safetensors"
        assert {weight.dtype for weight in load_file(path).values()} == {torch.float16}


def test_no_motion_of_the_test_prompts_is_in_the_train_prompts_or_in_pretraining():
    train, test = set(motions("train")), set(motions("test"))
    assert (len(train), len(test)) == (72, 48)
    assert not train & test
    assert set(video.split_scenes()[0]) == train
    rng = random.Random(0)
    captions = {video.misdescribe(rng, scene, 0.5, 0.5) for scene in sorted(train) for _ in "abcd"}
    assert not captions & set(lines("motions_test"))


def test_every_colour_and_direction_is_tested_equally_often():
    test = motions("test")
    assert {sum(scene[0] == colour for scene in test) for colour in video.COLOURS} == {8}
    assert {sum(scene[2] == word for scene in test) for word in video.DIRECTIONS} == {12}


def test_the_video_tokenizer_has_a_token_for_each_word_of_the_prompts(video_pipe):
    for scene in motions("train") + motions("test"):
        ids = video_pipe.tokenizer(video.prompt_of(scene)).input_ids
        assert len(ids) == 6
        assert video_pipe.tokenizer.unk_token_id not in ids


def test_a_clip_has_nine_frames_and_768_latent_dimensions(video_pipe):
    call = {"height": 32, "width": 32, "num_frames": 9, "num_inference_steps": 1}
    latents = video_pipe("a red ring moves up", **call, output_type="latent").frames
    assert latents.shape == (1, 16, 3, 4, 4)
    clip = sample_clips_with(video_pipe, ["a red ring moves up"], num_inference_steps=1)[0]
    assert [frame.size for frame in clip] == [(32, 32)] * 9


def test_most_clips_are_clean_but_often_show_another_motion(video_pipe):
    prompts = lines("motions_test")
    clips = sample_clips_with(video_pipe, prompts)
    assert 0.35 < np.mean(motion(clips, prompts)) < 0.65
    best = np.max([motion(clips, [prompt] * len(clips)) for prompt in every_motion()], axis=0)
    assert np.median(best) > 0.85


def every_motion():
    """One prompt per colour and direction."""
    return [f"a {colour} ring moves {word}" for colour in COLOURS for word in video.DIRECTIONS]


def test_recorded_base_score_of_the_video_model_leaves_room_to_improve():
    scores = json.loads((ASSETS / "scores.json").read_text())["wan"]
    assert 0.35 <= scores["motion, 8 steps, guidance 1"] <= 0.65
