"""The CLIP reward and its models, on an untrained open_clip folder in a temporary directory."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import rewards
from rewards import options_of
from rewards.clip import clip
from rewards.support import clip_model
from rewards.support.clip_model import load, tokenize

open_clip = pytest.importorskip("open_clip", reason="pip install open_clip_torch")

CONTEXT = 16
MEAN, STD = [0.1, 0.5, 0.9], [0.5, 0.25, 1.0]
PROMPTS = ["a red cube", "a blue sphere", "two dogs", "a red cube"]


def _save(folder: Path, hf_tokenizer: bool) -> str:
    """A CLIP with one block per tower, for images of 32 x 32 pixels and texts of 16 tokens."""
    from safetensors.torch import save_file

    vision = {"image_size": 32, "layers": 1, "width": 32, "patch_size": 16, "head_width": 16}
    text = {"context_length": CONTEXT, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    config = {"embed_dim": 8, "vision_cfg": vision, "text_cfg": text}
    torch.manual_seed(0)
    save_file(open_clip.CLIP(**config).state_dict(), folder / "open_clip_model.safetensors")
    if hf_tokenizer:
        _save_tokenizer(folder)
        text["hf_tokenizer_name"] = "its-own-folder"
    preprocess = {"mean": MEAN, "std": STD}
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": config, "preprocess_cfg": preprocess})
    )
    return str(folder)


def _save_tokenizer(folder: Path) -> None:
    """A tokenizer of single letters; CLIP pools at the highest id, which is the end token."""
    from transformers import CLIPTokenizer

    letters = open_clip.tokenizer.bytes_to_unicode().values()
    pieces = [
        *letters,
        *(letter + "</w>" for letter in letters),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    (folder / "vocab.json").write_text(json.dumps({p: i for i, p in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizer(
        vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt")
    ).save_pretrained(folder)


@pytest.fixture(scope="module", params=["simple", "transformers"])
def folder(request, tmp_path_factory) -> str:
    name = f"clip-{request.param}"
    return _save(tmp_path_factory.mktemp(name), request.param == "transformers")


@pytest.fixture(autouse=True)
def _no_warnings_yet():
    clip_model._warned.clear()


def _images(count: int, side: int = 32) -> list[Image.Image]:
    pixels = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    return [Image.fromarray(p) for p in pixels]


def test_a_score_is_the_cosine_of_the_models_own_embeddings(folder):
    images = _images(4)
    network = load(folder).model
    pixels = np.stack([(np.asarray(p) / 255 - MEAN) / STD for p in images])
    with torch.no_grad():
        image = network.encode_image(torch.tensor(pixels).permute(0, 3, 1, 2).float())
        text = network.encode_text(open_clip.get_tokenizer(f"local-dir:{folder}")(PROMPTS))
    image, text = image.double().numpy(), text.double().numpy()
    norms = np.linalg.norm(image, axis=1) * np.linalg.norm(text, axis=1)
    expected = (image * text).sum(1) / norms
    assert clip(images, PROMPTS, model=folder) == pytest.approx(expected.tolist(), abs=1e-6)


@settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))
@given(order=st.permutations(range(4)))
def test_a_shuffled_batch_scores_as_one_by_one(folder, order):
    images = _images(4, side=40)
    alone = [clip([i], [p], model=folder)[0] for i, p in zip(images, PROMPTS, strict=True)]
    together = clip([images[i] for i in order], [PROMPTS[i] for i in order], model=folder)
    assert together == pytest.approx([alone[i] for i in order], abs=1e-6)
    assert all(-1 <= score <= 1 for score in alone)
    assert len({round(score, 5) for score in alone}) == 4


def test_more_images_than_one_batch_score_the_same(folder):
    images, prompts = _images(70), PROMPTS * 17 + PROMPTS[:2]
    assert clip(images, prompts, model=folder)[:4] == pytest.approx(
        clip(images[:4], PROMPTS, model=folder), abs=1e-6
    )


@pytest.mark.parametrize("side", [32, 48])
def test_tensors_and_pil_images_score_the_same(folder, side):
    images = _images(4, side)
    tensor = torch.from_numpy(np.stack([np.asarray(p) for p in images])).permute(0, 3, 1, 2) / 255
    assert clip(tensor, PROMPTS, model=folder) == clip(images, PROMPTS, model=folder)


def test_a_long_prompt_is_truncated_but_keeps_its_end_token(folder):
    with pytest.warns(UserWarning, match="1 of 2 prompts"):
        tokens = tokenize(["z " * 100, "z"], load(folder))
    assert tokens.shape == (2, CONTEXT)
    assert tokens[0, -1] == tokens[1, 2] == tokens.max()


def test_long_prompts_are_counted_and_reported_once(folder):
    prompts = ["a cat", "z " * 100, "y " * 100, "z " * 100]
    with pytest.warns(UserWarning, match="2 of 3 prompts are longer than the 16 tokens") as caught:
        clip(_images(4), prompts, model=folder)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip(_images(4), prompts, model=folder)
        clip(_images(1), ["x " * 100], model=folder)


def test_a_prompt_that_just_fits_is_not_reported(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip(_images(1), ["z " * (CONTEXT - 2)], model=folder)
    with pytest.warns(UserWarning, match="1 of 1 prompts"):
        clip(_images(1), ["z " * (CONTEXT - 1)], model=folder)


def test_a_folder_and_local_dir_are_the_same_model(folder):
    arguments = (_images(4), PROMPTS)
    assert clip(*arguments, model=f"local-dir:{folder}") == clip(*arguments, model=folder)


def test_a_folder_decides_activation_preprocessing_and_context(folder):
    loaded = load(folder)
    assert loaded.name == f"local-dir:{folder}"
    names = {type(module).__name__ for module in loaded.model.modules()}
    assert {name for name in names if "GELU" in name} == {"GELU"}
    black = loaded.preprocess(Image.new("RGB", (32, 32)))
    assert black[:, 0, 0].tolist() == pytest.approx(
        [-m / s for m, s in zip(MEAN, STD, strict=True)]
    )
    assert loaded.context_length == CONTEXT


def test_the_declared_models_are_those_of_the_call(folder):
    (model,) = options_of(clip).models(model=folder)
    assert model is load(folder, None, None).model


@pytest.mark.parametrize(
    ("model", "tag", "quick"),
    [
        ("ViT-L-14", "openai", True),
        ("ViT-L-14-quickgelu", "openai", True),
        ("ViT-B-32", "laion2b_s34b_b79k", False),
    ],
)
def test_the_activation_is_that_of_the_weights(model, tag, quick):
    assert clip_model._needs_quick_gelu(open_clip, model, tag) is quick


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "ViT-B32"}, r"model is ViT-B32, but is neither .* did you mean ViT-B-32"),
        ({"model": "ViT-L-14"}, "pretrained is None, but must be a file or a tag .* openai"),
        ({"model": "ViT-B-32", "pretrained": "opnai"}, "pretrained is opnai, but must be a file"),
        ({"model": "local-dir:nowhere"}, "holds no open_clip_config.json; correct the path"),
        ({"model": "hub:org/name"}, "starts with neither local-dir: nor hf-hub:"),
        ({"model": "hf-hub:org/name", "pretrained": "openai"}, "leave pretrained out"),
        ({"modle": "ViT-B-32"}, "modle is 'ViT-B-32', but is neither a setting"),
    ],
)
def test_an_unknown_model_tag_or_setting_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        clip(_images(1), ["a"], **arguments)


def test_one_prompt_for_many_images_is_refused(folder):
    with pytest.raises(ValueError, match="prompts is a list of 1, but 2 images were given"):
        clip(_images(2), ["a"], model=folder)
    with pytest.raises(ValueError, match="colours is a list of 1, but 2 images were given"):
        clip(_images(2), ["a", "b"], model=folder, colours=["red"])
    assert clip([], [], model=folder) == []


def test_a_missing_package_gives_its_install_line(monkeypatch):
    load.cache_clear()
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(ImportError, match="pip install open_clip_torch"):
        clip(_images(1), ["a"])


def test_importing_the_reward_imports_nothing_heavy():
    code = "import sys, rewards.clip; print({'torch', 'open_clip'} & set(sys.modules))"
    root = Path(rewards.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert run.stdout.strip() == "set()"
