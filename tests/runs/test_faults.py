"""Kills, signals, damaged checkpoints and full disks: a resumed run ends like an uninterrupted one.

FLOWGRPO_KILL_SEED=7 draws other points; `scripts/kill_points.py` draws any number of them.
"""

import copy
import os
import random
import shutil

import pytest
from faults import RUN, Point
from trials import Trials

from flowgrpo.runs.provenance import STARTS

SEED = int(os.environ.get("FLOWGRPO_KILL_SEED", "0"))
AFTER_EPOCH_3 = ("open metrics.jsonl", 3)
"""Three epochs are saved, and the line of the fourth is about to be written."""
REMOVAL = "os.remove checkpoints/.epoch-0001.removed/manifest.json"


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    """Trials of a run that saves every epoch."""
    return Trials(tmp_path_factory.mktemp("each"), seed=SEED)


@pytest.fixture(scope="module")
def sparse_trials(tmp_path_factory):
    """Trials of a run that saves every other epoch."""
    return Trials(tmp_path_factory.mktemp("sparse"), "checkpoint_every=2", seed=SEED + 1)


@pytest.fixture(scope="module")
def three_epochs(trials, tmp_path_factory):
    """A run that was killed after its third epoch was saved, before anything of the fourth was."""
    folder = tmp_path_factory.mktemp("three")
    ended = trials.run(folder, Point(event="file", at=trials.at(*AFTER_EPOCH_3)))
    assert ended.code == -9
    return folder


@pytest.fixture
def stopped(three_epochs, tmp_path):
    """A copy of `three_epochs`."""
    return shutil.copytree(three_epochs, tmp_path / "stopped")


def check(trial):
    # The second point may lie beyond the end of the resumed run.
    assert trial.deaths[0].code < 0, (trial.points, trial.deaths)
    assert all(death.code <= 0 for death in trial.deaths), (trial.points, trial.deaths)
    assert not trial.wrong, f"FLOWGRPO_KILL_SEED={SEED}, {trial.points}: {trial.wrong}"


@pytest.mark.parametrize("number", range(14))
def test_a_run_killed_anywhere_ends_like_an_uninterrupted_one(trials, number):
    check(trials.trial(number))


@pytest.mark.parametrize("number", range(6))
def test_so_does_one_with_a_checkpoint_every_other_epoch(sparse_trials, number):
    check(sparse_trials.trial(number))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(14, 94))
def test_so_do_eighty_more(trials, number):
    check(trials.trial(number))


def test_a_kill_while_the_result_is_written_leaves_no_trace(trials, tmp_path):
    at = trials.at("/generation.json", -1) - 1
    death = trials.run(tmp_path, Point(event="file", at=at, deed="size", amount=5000))
    assert death.code < 0
    assert not trials.finish(tmp_path)


def test_another_seed_draws_other_points(trials):
    other = copy.copy(trials)
    other.seed += 1
    numbers = range(20)
    assert [trials.draw(number) for number in numbers] == [trials.draw(n) for n in numbers]
    assert sum(trials.draw(number) != other.draw(number) for number in numbers) > 15


def test_the_comparison_finds_a_changed_digit(trials, stopped):
    scores = stopped / RUN / "eval" / "epoch-0002" / "scores.json"
    scores.write_text(scores.read_text().replace("0.", "0.1", 1))
    assert "eval/epoch-0002/scores.json" in trials.finish(stopped)


@pytest.mark.parametrize("event", ["os.rename checkpoints/epoch-0001", REMOVAL])
def test_a_kill_while_an_old_checkpoint_is_removed_leaves_no_trace(trials, tmp_path, event):
    assert trials.run(tmp_path, Point(event="file", at=trials.at(event))).code == -9
    assert not trials.finish(tmp_path)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(("deed", "code"), [("terminate", 143), ("interrupt", 130)])
def test_a_signal_ends_a_run_at_once_and_loses_no_finished_epoch(
    sparse_trials, tmp_path, deed, code, number
):
    generator = random.Random(f"{SEED}/{deed}/{number}")
    event = ("file", "model", "model", "reward")[number]
    # Not at the very end, when nothing is left to stop.
    at = generator.randint(1, int(0.8 * len(sparse_trials.events[event])))
    ended = sparse_trials.run(tmp_path, Point(event=event, at=at, deed=deed))
    assert ended.code == code, (event, at, ended)
    assert ended.seconds < 20
    assert epochs_saved(tmp_path / RUN) == epochs_logged(tmp_path / RUN)
    # Checkpoints and contact sheets that the signal caused to be saved may stay.
    extra = ("checkpoints/", "samples/")
    assert not [name for name in sparse_trials.finish(tmp_path) if not name.startswith(extra)]


def epochs_logged(run):
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def epochs_saved(run):
    return max([0, *(int(path.name.split("-")[1]) for path in run.glob("checkpoints/epoch-*"))])


def truncate(checkpoint):
    state = checkpoint / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-10])


def flip_a_byte(checkpoint):
    state = checkpoint / "state.safetensors"
    data = bytearray(state.read_bytes())
    data[-1000] ^= 1
    state.write_bytes(data)


def remove_a_file(checkpoint):
    (checkpoint / "pytorch_lora_weights.safetensors").unlink()


def halve_the_manifest(checkpoint):
    path = checkpoint / "manifest.json"
    path.write_text(path.read_text()[: path.stat().st_size // 2])


def blank_the_manifest(checkpoint):
    """Zeroes its bytes, as a file system may after a power cut."""
    path = checkpoint / "manifest.json"
    path.write_bytes(bytes(path.stat().st_size))


def empty_the_manifest(checkpoint):
    (checkpoint / "manifest.json").write_text("null")


def empty_the_folder(checkpoint):
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


DAMAGES = [
    truncate,
    flip_a_byte,
    remove_a_file,
    halve_the_manifest,
    blank_the_manifest,
    empty_the_manifest,
    empty_the_folder,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_resumed(trials, stopped, damage):
    damage(stopped / RUN / "checkpoints" / "epoch-0003")
    ended = trials.run(stopped)
    assert ended.code == 0
    assert "epoch-0003 is damaged" in ended.stderr
    assert "epoch-0002 is damaged" not in ended.stderr
    assert not trials.differences(stopped)


def test_if_every_checkpoint_is_damaged_the_run_starts_over(trials, stopped):
    for checkpoint in (stopped / RUN / "checkpoints").glob("epoch-*"):
        truncate(checkpoint)
    assert not trials.finish(stopped)


def test_a_partial_checkpoint_under_its_temporary_name_is_ignored(trials, stopped):
    checkpoints = stopped / RUN / "checkpoints"
    shutil.copytree(checkpoints / "epoch-0003", checkpoints / ".epoch-0004.partial")
    (checkpoints / ".epoch-0004.partial" / "manifest.json").unlink()
    assert not trials.finish(stopped)


@pytest.mark.parametrize(
    ("event", "at", "size"),
    [("file", 1, 0), ("model", 12, 300), ("file", 1, 5000), ("model", 12, 20000)],
)
def test_a_full_disk_is_reported_in_one_sentence_and_harms_nothing(
    trials, stopped, event, at, size
):
    before = {p: p.read_bytes() for p in (stopped / RUN).rglob("*") if p.is_file()}
    may_grow = {stopped / RUN / "metrics.jsonl", stopped / RUN / STARTS}
    ended = trials.run(stopped, Point(event=event, at=at, deed="full", amount=size))
    assert ended.code == 1, (ended.code, ended.stderr)
    *warnings, sentence = ended.stderr.splitlines()
    assert all(line.startswith("warning: ") for line in warnings), ended.stderr
    assert sentence.startswith(f"flowgrpo: {RUN} cannot be written")
    assert "File too large" in sentence
    assert "continue with --resume" in sentence
    for path, data in before.items():
        after = path.read_bytes()
        assert after[: len(data)] == data, path
        assert after == data or path in may_grow, path
    assert not trials.finish(stopped)


def test_a_disk_that_is_full_from_the_start_is_reported_in_one_sentence(trials, tmp_path):
    ended = trials.run(tmp_path, Point(event="file", at=1, deed="full", amount=300))
    assert ended.code == 1
    assert "File too large" in ended.stderr
    assert not trials.finish(tmp_path)


def test_a_run_folder_that_cannot_be_made_is_reported_in_one_sentence(trials, tmp_path):
    (tmp_path / RUN).write_text("a file")
    ended = trials.run(tmp_path)
    assert ended.code == 1
    assert ended.stderr.count("\n") == 1
    assert f"output_dir is {RUN}, but that is a file" in ended.stderr
    assert (tmp_path / RUN).read_text() == "a file"
