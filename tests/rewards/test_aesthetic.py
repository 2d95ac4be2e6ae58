"""The aesthetic reward: its head against float64 numpy, the reward on an untrained CLIP."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file

from rewards.aesthetic import aesthetic, load_head, predict

PUBLISHED = os.environ.get("FLOWGRPO_AESTHETIC_WEIGHTS")
WIDTHS = {0: (768, 1024), 2: (1024, 128), 4: (128, 64), 6: (64, 16), 7: (16, 1)}


def _random_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = {}
    for layer, (inputs, outputs) in WIDTHS.items():
        weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        state[f"layers.{layer}.weight"] = weight
        state[f"layers.{layer}.bias"] = torch.randn(outputs, generator=generator)
    return state


def _in_float64(state: dict[str, torch.Tensor], embeddings: np.ndarray) -> np.ndarray:
    x = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    for layer in WIDTHS:
        weight, bias = (state[f"layers.{layer}.{p}"].double().numpy() for p in ("weight", "bias"))
        x = x @ weight.T + bias
    return x[:, 0]


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("head") / "head.safetensors"
    save_file(_random_state(), path)
    return str(path)


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory) -> str:
    """An untrained CLIP with one block per tower and embeddings of 768 dimensions."""
    open_clip = pytest.importorskip("open_clip", reason="pip install open_clip_torch")
    vision = {"image_size": 32, "layers": 1, "width": 32, "patch_size": 16, "head_width": 16}
    text = {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    config = {"embed_dim": 768, "vision_cfg": vision, "text_cfg": text}
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    save_file(open_clip.CLIP(**config).state_dict(), folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    return str(folder)


def _embeddings(count: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, 768))


def _images(count: int) -> list[Image.Image]:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    return [Image.fromarray(p) for p in pixels]


def test_the_head_equals_its_layers_in_float64(weights):
    embeddings = _embeddings(5)
    ratings = predict(torch.tensor(embeddings).float(), load_head(weights))
    expected = _in_float64(_random_state(), embeddings)
    np.testing.assert_allclose(ratings.numpy(), expected, rtol=1e-4, atol=1e-5)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(scale=st.floats(0.1, 1000))
def test_scaling_the_embeddings_changes_nothing(weights, scale):
    embeddings = torch.tensor(_embeddings(3)).float()
    head = load_head(weights)
    torch.testing.assert_close(predict(embeddings * scale, head), predict(embeddings, head))


def test_dropout_is_off(weights):
    embeddings = torch.tensor(_embeddings(3)).float()
    first, second = (predict(embeddings, load_head(weights)) for _ in range(2))
    assert torch.equal(first, second)
    assert not load_head(weights).training


def test_a_pickle_of_tensors_gives_the_same_head(weights, tmp_path):
    torch.save(_random_state(), tmp_path / "head.pth")
    embeddings = torch.tensor(_embeddings(3)).float()
    ratings = predict(embeddings, load_head(str(tmp_path / "head.pth")))
    assert torch.equal(ratings, predict(embeddings, load_head(weights)))


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    class Attack:
        def __reduce__(self):
            return Path.touch, (tmp_path / "attacked",)

    torch.save({"layers.0.weight": Attack()}, tmp_path / "head.pth")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        load_head(str(tmp_path / "head.pth"))
    assert not (tmp_path / "attacked").exists()


def test_an_image_is_rated_by_its_normalised_clip_embedding(weights, clip_folder):
    from rewards.support.clip_model import embed_images, load

    embeddings = embed_images(_images(3), load(clip_folder)).double().numpy()
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-6)
    settings = {"weights": weights, "clip_model": clip_folder, "clip_pretrained": None}
    ratings = aesthetic(_images(3), ["", "", ""], **settings)
    expected = _in_float64(_random_state(), embeddings)
    np.testing.assert_allclose(ratings, expected, rtol=1e-4, atol=1e-5)


def test_order_batch_prompt_and_type_of_images_change_nothing(weights, clip_folder):
    settings = {"weights": weights, "clip_model": clip_folder, "clip_pretrained": None}
    images = _images(3)
    ratings = aesthetic(images, ["a", "b", "c"], **settings)
    assert len(set(ratings)) == 3
    assert aesthetic(images[::-1], ["", "", ""], **settings) == pytest.approx(ratings[::-1])
    alone = [aesthetic([image], ["d"], **settings)[0] for image in images]
    assert alone == pytest.approx(ratings)
    tensor = torch.from_numpy(np.stack([np.asarray(p) for p in images])).permute(0, 3, 1, 2) / 255
    assert aesthetic(tensor, ["a", "b", "c"], **settings) == ratings
    assert aesthetic([], [], **settings) == []


def test_embeddings_of_another_width_are_refused(weights):
    with pytest.raises(ValueError, match=r"embeddings is \(2, 512\), but must be \(B, 768\)"):
        predict(torch.zeros(2, 512), load_head(weights))


def test_weights_of_another_layout_or_path_are_refused(tmp_path):
    save_file({"linear.weight": torch.zeros(1, 768)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="lacks the predictor's layers 768-1024-128-64-16-1"):
        load_head(str(tmp_path / "other.safetensors"))
    with pytest.raises(ValueError, match=r"weights is nowhere\.pth, but is neither a file nor"):
        load_head("nowhere.pth")


@pytest.mark.skipif(
    not PUBLISHED,
    reason="set FLOWGRPO_AESTHETIC_WEIGHTS to sac+logos+ava1-l14-linearMSE (.pth or .safetensors)",
)
def test_the_published_head_equals_its_layers_in_float64():
    assert PUBLISHED
    path = Path(PUBLISHED)
    load = load_file if path.suffix == ".safetensors" else torch.load
    embeddings = np.vstack([np.ones((1, 768)), np.eye(768)[:2], _embeddings(5)])
    ratings = predict(torch.tensor(embeddings).float(), load_head(PUBLISHED)).numpy()
    np.testing.assert_allclose(ratings, _in_float64(load(path), embeddings), rtol=1e-4)
    np.testing.assert_allclose(ratings[:3], [4.88328, 4.54505, 4.67965], rtol=1e-4)
