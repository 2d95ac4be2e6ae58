"""Several real processes are one run: the same numbers, and all end when one is gone."""

import json
import signal

import pytest
import together
import torch
from families import FAMILIES
from safetensors.torch import load_file
from together import launch, run


def metrics(folder, without=("seconds",)):
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in without} for line in lines]


def first_epoch(folder):
    """The first epoch as each process has it, by rank."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("seen-*.json"))]


def weights(folder, rank=0):
    return load_file(folder / f"weights-{rank}.safetensors")


def max_difference(a, b, prefix="weights/"):
    """Largest absolute difference of two states."""
    assert a.keys() == b.keys()
    return max(float((a[n].float() - b[n].float()).abs().max()) for n in a if n.startswith(prefix))


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Folder of a run of one process."""
    folder = tmp_path_factory.mktemp("single")
    run(together.train, 1, folder)
    return folder


@pytest.mark.parametrize("count", [2, 3])
def test_samples_rewards_and_advantages_are_those_of_one_process(tmp_path, count):
    options = {"train": {"advantage": "gdpo"}, "sampling": {"groups_per_epoch": 5}}
    options["train"]["updates_per_epoch"] = 1
    run(together.first_epoch, 1, tmp_path / "one", **options)
    run(together.first_epoch, count, tmp_path / "many", **options)
    (alone,), each = first_epoch(tmp_path / "one"), first_epoch(tmp_path / "many")
    assert len(each) == count
    assert {k: v for part in each for k, v in part["images"].items()} == alone["images"]
    for part in each:
        assert part["rewards"] == alone["rewards"]
        assert part["advantages"] == alone["advantages"]
        assert len(part["images"]) < 5


def test_two_processes_train_as_one(tmp_path, single):
    run(together.train, 2, tmp_path)
    assert max_difference(weights(tmp_path), weights(single)) < 1e-6
    assert all(torch.equal(v, weights(tmp_path, 1)[n]) for n, v in weights(tmp_path).items())
    counts = ("images", "denoiser_forwards", "denoiser_backwards", "tied_groups", "epoch")
    for two, alone in zip(metrics(tmp_path), metrics(single), strict=True):
        assert {k: two[k] for k in counts} == {k: alone[k] for k in counts}
        assert two["rewards"]["redness"]["mean"] == pytest.approx(
            alone["rewards"]["redness"]["mean"], abs=1e-6
        )
    base = [f / "run" / "eval" / "epoch-0000" / "scores.json" for f in (tmp_path, single)]
    assert base[0].read_text() == base[1].read_text()


def test_a_sharded_denoiser_trains_like_an_unsharded_one(tmp_path, single):
    run(together.train, 2, tmp_path, train={"shard": True})
    assert max_difference(weights(tmp_path), weights(single)) < 1e-6
    assert max_difference(weights(tmp_path), weights(single), "optimizer/") < 1e-6
    assert metrics(tmp_path)[-1]["denoiser_backwards"] == metrics(single)[-1]["denoiser_backwards"]
    saved = [load_file(f / "run/lora/pytorch_lora_weights.safetensors") for f in (tmp_path, single)]
    assert max_difference(*saved, prefix="transformer") < 1e-6


@pytest.mark.parametrize(("before", "after"), [((2, True), (1, False)), ((1, False), (2, True))])
def test_a_sharded_run_resumes_unsharded_and_back(tmp_path, single, before, after):
    options = {"train": {"ema": 0.9, "shard": before[1], "epochs": 1}}
    run(together.train, before[0], tmp_path, **options)
    options = {"train": {"ema": 0.9, "shard": after[1], "epochs": 2}}
    run(together.train, after[0], tmp_path, **options, resume=True)
    uninterrupted = {"train": {"ema": 0.9}}
    run(together.train, 1, tmp_path / "uninterrupted", **uninterrupted)
    for part in ("weights/", "average/", "optimizer/"):
        assert max_difference(weights(tmp_path), weights(tmp_path / "uninterrupted"), part) < 1e-6


def test_all_weights_of_a_sharded_denoiser_are_saved_as_diffusers_saves_them(tmp_path):
    from diffusers import SD3Transformer2DModel

    options = {"train": {"lora": None, "epochs": 1, "shard": True}}
    run(together.train, 2, tmp_path, **options)
    options["train"]["shard"] = False
    run(together.train, 1, tmp_path / "one", **options)
    sharded, unsharded = (
        SD3Transformer2DModel.from_pretrained(folder / "run" / "lora" / "transformer").state_dict()
        for folder in (tmp_path, tmp_path / "one")
    )
    assert max_difference(sharded, unsharded, prefix="") < 1e-6
    saved = json.loads((tmp_path / "run/lora/transformer/config.json").read_text())
    assert saved["_class_name"] == "SD3Transformer2DModel"


@pytest.mark.parametrize(("shard", "updates"), [(False, 2), (True, 3)])
def test_tied_groups_and_uneven_shards_keep_two_processes_in_step(tmp_path, shard, updates):
    """Unsharded, two processes share the three groups of an update; sharded, they have one each."""
    options = {
        "reward": together.constant_for_dogs,
        "sampling": {"groups_per_epoch": 6},
        "train": {"epochs": 2, "updates_per_epoch": updates, "shard": shard},
    }
    run(together.train, 2, tmp_path / "two", **options)
    options["train"]["shard"] = False
    run(together.train, 1, tmp_path / "one", **options)
    assert max_difference(weights(tmp_path / "two"), weights(tmp_path / "one")) < 1e-6
    assert 0 < metrics(tmp_path / "two")[0]["tied_groups"] < 1


def test_a_guard_stops_all_processes_by_its_name(tmp_path):
    options = {"reward": together.constant, "guards": {"dead_epochs": 2}}
    launched = launch(together.train, 2, tmp_path, **options)
    assert launched.wait() == [1, 1]
    stopped = json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"]
    assert (stopped["reason"], stopped["epoch"]) == ("dead_rewards", 2)


@pytest.mark.parametrize("shard", [False, True])
def test_a_failure_of_one_process_rolls_all_back(tmp_path, shard):
    options = {"train": {"shard": shard, "epochs": 3}, "guards": {"rollbacks": 1}}
    run(together.nan_once, 2, tmp_path, rank=1, at=8, **options)
    lines = metrics(tmp_path)
    assert [line.get("rollbacks") for line in lines] == [1, 1, 1]  # the weights are to blame
    assert max_difference(weights(tmp_path), weights(tmp_path, 1)) == 0


def test_experts_that_would_be_gathered_at_once_are_refused(tmp_path):
    options = {
        "family": "wan-2.2",
        "train": {"shard": True},
        "sampling": {"window": 1, "call": dict(FAMILIES["wan-2.2"].call)},
    }
    launched = launch(together.train, 2, tmp_path, **options)
    assert launched.wait() == [1, 1]
    assert "sampling.window moves" in launched.output()
    del options["sampling"]["window"]
    options["sampling"]["window"] = {"size": 2, "first": 1, "last": 2}
    run(together.train, 2, tmp_path / "sharded", **options)
    options["train"]["shard"] = False
    run(together.train, 1, tmp_path / "unsharded", **options)
    assert max_difference(weights(tmp_path / "sharded"), weights(tmp_path / "unsharded")) < 1e-6


@pytest.mark.parametrize(
    ("rank", "failure", "message"),
    [
        (0, "SIGKILL", "process 0 is gone"),
        (1, "SIGKILL", "process 1 has been silent for 30 s"),
        (1, "fail", "process 1 stopped: redness failed on prompt"),
        (0, "fail", "process 0 stopped: redness failed on prompt"),
    ],
)
def test_when_one_process_is_gone_all_end_within_a_minute(tmp_path, single, rank, failure, message):
    launched = launch(together.misbehaving, 2, tmp_path, rank=rank, at=8, failure=failure)
    codes = launched.wait()
    ended_at = [path.stat().st_mtime for path in launched.logs]
    assert abs(ended_at[0] - ended_at[1]) < 60
    assert codes[1 - rank] == 1
    assert codes[rank] == (-signal.SIGKILL if failure == "SIGKILL" else 1)
    assert message in launched.output()
    if rank == 1:
        stopped = json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"]
        assert message in stopped["message"]
        assert stopped["reason"] == ("reward_failed" if failure == "fail" else "process_lost")
    run(together.train, 1, tmp_path, resume=True)
    assert max_difference(weights(tmp_path), weights(single)) < 1e-6


@pytest.mark.slow
def test_a_process_that_hangs_is_not_waited_for(tmp_path):
    launched = launch(together.misbehaving, 2, tmp_path, rank=1, at=8, failure="SIGSTOP")
    launched.processes[0].join(100)
    launched.send(1, signal.SIGKILL)
    assert launched.wait()[0] == 1
    assert "process 1 has been silent for 30 s" in launched.output()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_saves_and_ends_all(tmp_path, single, rank):
    options = {"rank": rank, "at": 8, "failure": "SIGTERM", "checkpoint_every": 9}
    launched = launch(together.misbehaving, 2, tmp_path, **options)
    assert launched.wait() == [128 + signal.SIGTERM] * 2, launched.output()
    stopped = json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"]
    assert stopped["reason"] == "Interrupted"
    assert stopped["checkpoint"] == "epoch-0001"
    run(together.train, 3, tmp_path, resume=True, checkpoint_every=9)
    assert max_difference(weights(tmp_path), weights(single)) < 1e-6


def test_processes_with_different_inputs_are_refused(tmp_path):
    launched = launch(together.other_prompts, 2, tmp_path)
    assert launched.wait() == [1, 1]
    assert "the input of process 1 differs from that of process 0" in launched.output()
