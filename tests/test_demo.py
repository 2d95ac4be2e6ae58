"""The embedded models on the command line: short runs, and slow ones that must learn."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = sorted(path.name for path in ROOT.joinpath("configs").glob("tiny_*.yaml"))


def train(config, folder, *overrides):
    command = [sys.executable, "scripts/train.py", f"configs/{config}", f"output_dir={folder}"]
    done = subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "summary.json").read_text()), done


@pytest.mark.parametrize("config", TINY)
def test_a_tiny_config_runs_and_is_quiet_when_not_in_a_terminal(config, tmp_path):
    short = ["train.epochs=1", "sampling.groups_per_epoch=2", "evaluation.max_prompts=2"]
    summary, done = train(config, tmp_path / "run", *short, "evaluation.seeds=1")
    assert summary["images"] == 2 * 16
    assert 0 < summary["base"]["test_prompts"] < 1
    assert "Use it with plain diffusers" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("config", [name for name in TINY if "long" not in name])
def test_a_tiny_config_raises_its_held_out_score(config, tmp_path):
    summary, _ = train(config, tmp_path / "run")
    low, _ = summary["scores"]["test_prompts"][summary["reward"]]["gain_95"]
    assert low > 0
