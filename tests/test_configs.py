"""The configs for real models train on tiny stand-ins of the same pipeline class."""

from pathlib import Path

import pytest
import yaml
from tiny_pipelines import build

from flowgrpo import GRPOTrainer
from flowgrpo.config import load_config

ROOT = Path(__file__).parent.parent
TINY = {
    "call": {"height": 16, "width": 16, "max_sequence_length": 8},
    "sampling": {"group_size": 3, "groups_per_epoch": 2, "micro_batch_size": 2},
}
TINY_CLIP = {"reward": "clip", "params": {"model": str(ROOT / "assets/tiny-clip")}}
STAND_INS = {"sd35_medium_ocr": ("sd3", []), "flux1_dev_clip": ("flux", [TINY_CLIP])}


@pytest.mark.parametrize("name", STAND_INS)
def test_a_real_config_runs_on_a_stand_in_of_its_pipeline(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    family, rewards = STAND_INS[name]
    data = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    data["output_dir"] = str(tmp_path / "run")
    data["rewards"] = rewards or data.pop("rewards", None) or [data.pop("reward")]
    data["sampling"] |= TINY["sampling"]
    data["sampling"]["call"] |= TINY["call"]
    data["train"]["epochs"] = 2
    data["evaluation"] |= {"num_inference_steps": 3, "max_prompts": 2}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    run = GRPOTrainer(build(family), args=load_config(path))
    summary = run.train()
    assert summary["images"] == 12
    assert summary["epochs"] == 2
    metrics = run.folder.metrics()
    assert metrics[0]["grad_norm"] > 0 or metrics[0]["tied_groups"] == 1
    assert (tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors").exists()
