"""Every config loads, and those of real models train tiny stand-ins of their pipeline classes.

A stand-in has the checkpoint's class, scheduler and types of layers, and random weights. Its run
takes everything from the config except sizes, numbers of steps and prompts, and the rewards.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import PNDMScheduler
from families import FAMILIES, built
from families.parts import picture

from flowgrpo import GRPOTrainer
from flowgrpo.cli import plan
from flowgrpo.core.config_file import load_config, parse_config
from flowgrpo.pipelines import loading as pipelines

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(path.stem for path in ROOT.glob("configs/*.yaml"))
STAND_INS = {
    "flux1_dev_clip": "flux",
    "flux1_kontext_ocr": "flux-kontext",
    "flux2_klein_ocr": "flux2-klein",
    "hunyuan_video15_clip": "hunyuan-1.5-guided",
    "ltx_video_clip": "ltx",
    "qwen_image_ocr": "qwen-image",
    "sd15_aesthetic": "sd-1.5",
    "sd35_medium_ocr": "sd3",
    "sdxl_clip": "sdxl",
    "wan21_1b_ocr": "wan-2.1",
    "wan22_5b_clip": "wan-2.2-5b",
    "z_image_clip": "z-image",
}
SIZES = (
    "height",
    "width",
    "num_frames",
    "max_area",
    "max_sequence_length",
    "text_encoder_out_layers",
)
"""Arguments of a call that depend on the size of the model."""


def brightness(images, prompts, **columns):
    return [float(np.asarray(image).mean()) for image in images]


def redness(images, prompts, **columns):
    return [float(np.asarray(image)[..., 0].mean()) for image in images]


def flicker(videos, prompts, **columns):
    stacks = [np.stack(frames).astype(float) for frames in videos]
    return [float(np.abs(np.diff(frames, axis=0)).mean()) for frames in stacks]


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Reads a config by its name. Prompts that a user has to bring are replaced by two edits."""
    monkeypatch.chdir(ROOT)

    def read(name):
        config = load_config(path_of(name))
        if Path(config.prompts.train).exists():
            return config
        edits = [{"prompt": f'write "{word}"', "image": f"{word}.png"} for word in ("ON", "OFF")]
        for seed, edit in enumerate(edits):
            picture(seed=seed).save(tmp_path / edit["image"])
        (tmp_path / "edits.jsonl").write_text("\n".join(map(json.dumps, edits)))
        return load_config(path_of(name), [f"prompts.train={tmp_path / 'edits.jsonl'}"])

    return read


def path_of(name):
    return ROOT / "configs" / f"{name}.yaml"


def shrink(config, family, folder):
    """The config with the sizes of a stand-in, two epochs of two groups of two images, and as few
    steps as its window needs."""
    data = config.model_dump()
    data |= {"output_dir": str(folder), "checkpoint_every": 2}
    sampling, train = data["sampling"], data["train"]
    if sampling["num_inference_steps"] > 10:
        window = sampling["window"]
        needed = max((window["last"] or 0) + 2, (window["size"] or 0) + 1)
        sampling["num_inference_steps"] = max(needed, 4)
    sampling |= {"group_size": 2, "groups_per_epoch": 2, "micro_batch_size": 2}
    sampling["call"] |= {k: v for k, v in FAMILIES[family].call.items() if k in SIZES}
    train |= {"epochs": 2, "updates_per_epoch": min(2, train["updates_per_epoch"])}
    data["evaluation"] |= {"num_inference_steps": 3, "max_prompts": 1}
    return parse_config(data)


def stand_in(name, dtype):
    """A stand-in as loaded from the Hub: without slicing, and with the scheduler that DDIM's config
    replaces."""
    pipe = built(STAND_INS[name], dtype)
    pipe.vae.disable_slicing()
    if name == "sd15_aesthetic":
        pipe.scheduler = PNDMScheduler.from_config(pipe.scheduler.config, skip_prk_steps=True)
    return pipe


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_loads_and_its_plan_is_printed(name, read, capsys):
    config = read(name)
    plan(path_of(name), [f"prompts.train={config.prompts.train}"])
    assert f"plan for runs/{name}\n" in capsys.readouterr().out
    assert config.train.epochs > 0
    assert config.rewards


def test_every_config_for_a_real_model_has_a_stand_in(read):
    real = [name for name in CONFIGS if not (ROOT / read(name).model.path).is_dir()]
    assert real == sorted(STAND_INS)


@pytest.mark.parametrize("name", STAND_INS)
def test_a_real_config_trains_a_stand_in_of_its_pipeline(name, read, tmp_path, monkeypatch):
    # Replaces the download only: scheduler, VAE and dtype are set up as for the real model.
    monkeypatch.setattr(pipelines, "load_pipeline", lambda path, dtype, _: stand_in(name, dtype))
    config = shrink(read(name), STAND_INS[name], tmp_path / "run")
    rewards = [flicker if "num_frames" in config.sampling.call else brightness, redness]
    run = GRPOTrainer(args=config, reward_funcs=rewards[: len(config.rewards)])
    before = {key: value.detach().clone() for key, value in run.policy.parameters.items()}

    summary = run.train()

    assert (summary["epochs"], summary["images"]) == (2, 8)
    for epoch in run.folder.metrics():
        assert epoch["tied_groups"] == 0
        assert 0 < epoch["grad_norm"] < float("inf")
    changed = [key for key, value in run.policy.parameters.items() if not value.equal(before[key])]
    for target in config.train.lora.targets or ["to_q", "to_k", "to_v", "to_out.0"]:
        assert any(f".{target}.lora_" in f".{key}" for key in changed), target
    assert (tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors").exists()
    pipe, model = run.policy.pipe, config.model
    assert model.scheduler in (None, type(pipe.scheduler).__name__)
    assert (pipe.vae.use_slicing, pipe.vae.use_tiling) == (model.vae_slicing, model.vae_tiling)
    assert pipe.text_encoder.dtype == getattr(torch, model.dtype)
