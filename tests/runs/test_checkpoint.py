"""Which checkpoints are kept, and what happens to damaged ones."""

import pytest
from tiny_run import trainer

from flowgrpo.runs import checkpoint


def test_the_newest_checkpoints_and_the_best_evaluated_one_are_kept(tmp_path):
    run = trainer(
        tmp_path / "run",
        train={"epochs": 5, "lr": 3e-2},
        evaluation={"every": 1},
        checkpoint_keep=2,
    )
    run.train()
    scores = run.folder.headlines("redness", range(1, 6))
    best = max((1, 2, 3, 4, 5), key=lambda epoch: scores[epoch])
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {f"epoch-{epoch:04d}" for epoch in {best, 4, 5}}


@pytest.mark.parametrize(
    ("scores", "saved", "best"),
    [
        ({0: 0.9, 1: 0.2, 2: 0.5}, {1, 2, 3}, 2),
        ({0: 0.9}, {1, 2}, None),
        ({4: 0.5, 2: 0.5}, {2, 4}, 4),
    ],
)
def test_the_best_checkpoint_is_among_those_that_were_saved_and_evaluated(scores, saved, best):
    assert checkpoint.best_epoch(scores, saved) == best


def test_rotation_spares_the_best_however_old(tmp_path):
    for epoch in (1, 2, 3, 10000):
        (tmp_path / f"epoch-{epoch:04d}").mkdir()
    checkpoint.rotate(tmp_path, 2, best=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch-0001", "epoch-0003", "epoch-10000"]


def test_a_damaged_checkpoint_is_put_aside_and_evicts_no_new_one(tmp_path):
    options = {"train": {"epochs": 2}, "checkpoint_keep": 1}
    trainer(tmp_path / "run", **options).train()
    folder = tmp_path / "run" / "checkpoints"
    (folder / "epoch-0002" / "state.safetensors").write_bytes(b"")
    run = trainer(tmp_path / "run", resume=True, **options)
    assert [path.name for path in folder.iterdir()] == [".epoch-0002.aside"]
    run.run.begin()
    run.state.epoch = 1
    run.run.save()
    assert (folder / "epoch-0001" / "manifest.json").is_file()
    run.train()
    assert [path.name for path in folder.iterdir()] == ["epoch-0002"]
