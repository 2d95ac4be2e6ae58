"""Several real processes are one run: the same numbers, and an end for all when one is gone."""

import json
import signal
import time

import pytest
import together
import torch
from safetensors.torch import load_file
from together import launch, run


def metrics(folder, without=("seconds",)):
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in without} for line in lines]


def seen(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("seen-*.json"))]


def weights(folder, rank=0):
    return load_file(folder / f"weights-{rank}.safetensors")


def far(a, b, prefix="adapter/"):
    """Largest difference of two states."""
    assert a.keys() == b.keys()
    return max(float((a[n].float() - b[n].float()).abs().max()) for n in a if n.startswith(prefix))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    run(together.train, 1, folder)
    return folder


@pytest.mark.parametrize("count", [2, 3])
def test_samples_rewards_and_advantages_are_those_of_one_process(tmp_path, count):
    options = {"train": {"advantage": "gdpo"}, "sampling": {"groups_per_epoch": 5}}
    options["train"]["updates_per_epoch"] = 1
    run(together.first_epoch, 1, tmp_path / "one", **options)
    run(together.first_epoch, count, tmp_path / "many", **options)
    (alone,), each = seen(tmp_path / "one"), seen(tmp_path / "many")
    assert len(each) == count
    assert {k: v for part in each for k, v in part["pictures"].items()} == alone["pictures"]
    for part in each:
        assert part["rewards"] == alone["rewards"]
        assert part["advantages"] == alone["advantages"]
        assert len(part["pictures"]) < 5


def test_two_processes_train_as_one(tmp_path, one):
    run(together.train, 2, tmp_path)
    assert far(weights(tmp_path), weights(one)) < 1e-6
    assert all(torch.equal(v, weights(tmp_path, 1)[n]) for n, v in weights(tmp_path).items())
    counts = ("images", "denoiser_forwards", "denoiser_backwards", "tied_groups", "epoch")
    for ours, theirs in zip(metrics(tmp_path), metrics(one), strict=True):
        assert {k: ours[k] for k in counts} == {k: theirs[k] for k in counts}
        assert ours["rewards"]["redness"]["mean"] == pytest.approx(
            theirs["rewards"]["redness"]["mean"], abs=1e-6
        )
    base = [f / "run" / "eval" / "epoch-0000" / "scores.json" for f in (tmp_path, one)]
    assert base[0].read_text() == base[1].read_text()
