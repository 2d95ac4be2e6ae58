"""Trackers get what metrics.jsonl gets, and no failure of a tracker stops a run."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from accelerate import tracking
from accelerate.state import PartialState
from PIL import Image

from flowgrpo.core.config import GRPOConfig
from flowgrpo.core.errors import ConfigError
from flowgrpo.runs.trackers import Trackers, check_trackers, flatten

LINE = {"epoch": 1, "rewards": {"ocr": {"mean": 0.5, "note": "none"}}, "images": 8, "kl": None}


class Diary(tracking.GeneralTracker):
    """Keeps its entries in memory; `fails` maps a call to the fault that happens in it."""

    name = "diary"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, run_name):
        super().__init__()
        self.entries.append(("made", run_name))

    @property
    def tracker(self):
        return self

    def _do(self, call, value=None):
        self.entries.append((call, value))
        if call in self.fails:
            self.fails[call]()

    @tracking.on_main_process
    def start(self):
        self._do("start")

    @tracking.on_main_process
    def store_init_configuration(self, values):
        self._do("settings", values)

    @tracking.on_main_process
    def log(self, values, step=None):
        self._do("log", (values, step))

    @tracking.on_main_process
    def finish(self):
        self._do("finish")


@pytest.fixture
def diary():
    """A function that registers a tracker with accelerate by name and returns its entries."""

    def register(name, **fails):
        made = type(name, (Diary,), {"name": name, "entries": [], "fails": fails})
        tracking.LOGGER_TYPE_TO_CLASS[name] = made
        return made.entries

    before = dict(tracking.LOGGER_TYPE_TO_CLASS)
    yield register
    tracking.LOGGER_TYPE_TO_CLASS.clear()
    tracking.LOGGER_TYPE_TO_CLASS.update(before)


def trackers(folder, *names, **options):
    return Trackers(GRPOConfig(trackers=list(names)), folder, **options)


def raises(error):
    def fail():
        raise error

    return fail


def test_an_unknown_tracker_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r'"tensorbord" is unknown; did you mean "tensorboard"\?'):
        check_trackers(["tensorbord"])


def test_a_tracker_that_is_not_installed_is_refused_with_its_install_command():
    installed = {str(name) for name in tracking.get_available_trackers()}
    missing = sorted({str(name) for name in tracking.LoggerType} - installed - {"all"})
    assert missing, "every tracker is installed here"
    with pytest.raises(ConfigError, match=f"run `pip install {missing[0]}`"):
        check_trackers([missing[0]])


def test_numbers_are_flattened_and_other_values_are_dropped():
    assert flatten(LINE) == {"epoch": 1, "rewards/ocr/mean": 0.5, "images": 8}


def test_a_tracker_gets_the_settings_once_and_every_line_in_order(diary, tmp_path):
    entries = diary("diary")
    run = trackers(tmp_path, "diary", "diary")
    for step in range(1, 4):
        run.log({**LINE, "epoch": step}, step)
    run.close()
    names = [name for name, _ in entries]
    assert names == ["made", "start", "settings", "log", "log", "log", "finish"]
    settings = entries[2][1]
    assert settings["train.lora.rank"] == 32
    assert settings["objective.clip_range"] == "[0.0001, 0.0001]"
    assert entries[4][1] == ({"epoch": 2, "rewards/ocr/mean": 0.5, "images": 8}, 2)


def test_a_tracker_without_support_for_images_gets_none(diary, tmp_path, capsys):
    entries = diary("diary")
    run = trackers(tmp_path, "diary")
    run.log_image("samples", tmp_path / "none.png", 1)
    run.close()
    assert [name for name, _ in entries][-2:] == ["settings", "finish"]
    assert not capsys.readouterr().err


@pytest.mark.parametrize("call", ["start", "settings", "log", "finish"])
@pytest.mark.parametrize("error", [OSError("no network"), SystemExit(1)])
def test_a_tracker_that_fails_is_off_after_one_warning_and_others_continue(
    diary, tmp_path, capsys, call, error
):
    bad, good = diary("bad", **{call: raises(error)}), diary("good")
    run = trackers(tmp_path, "bad", "good")
    for step in range(3):
        run.log(LINE, step)
    run.close()
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert f"tracker bad failed ({type(error).__name__}: " in warning
    assert [name for name, _ in bad].count(call) == 1
    assert [name for name, _ in good].count("log") == 3


def test_a_tracker_that_cannot_open_an_image_does_not_stop_the_run(tmp_path, capsys):
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    run = trackers(tmp_path, "tensorboard")
    run.log_image("samples", tmp_path / "none.png", 1)
    run.close()
    assert "tracker tensorboard failed (FileNotFoundError" in capsys.readouterr().err


@pytest.mark.parametrize("call", ["start", "log", "finish"])
def test_a_tracker_that_hangs_delays_no_log_and_the_end_only_by_the_timeout(
    diary, tmp_path, capsys, call
):
    release = threading.Event()
    diary("hangs", **{call: lambda: release.wait(60)})
    run = trackers(tmp_path, "hangs", timeout=0.3, max_entries=100)
    began = time.monotonic()
    for step in range(50):
        run.log(LINE, step)
    assert time.monotonic() - began < 0.3
    run.close()
    assert time.monotonic() - began < 5
    assert capsys.readouterr().err.count("tracker hangs did not finish in time and is now off") == 1
    release.set()


def test_a_full_queue_switches_a_tracker_off_without_waiting(diary, tmp_path, capsys):
    release = threading.Event()
    entries = diary("hangs", start=lambda: release.wait(60))
    run = trackers(tmp_path, "hangs", timeout=60, max_entries=2)
    began = time.monotonic()
    for step in range(10):
        run.log(LINE, step)
    run.close()
    assert time.monotonic() - began < 5
    assert capsys.readouterr().err.count("tracker hangs is 2 entries behind and is now off") == 1
    release.set()
    for thread in threading.enumerate():
        if thread.name == "tracker-hangs":
            thread.join(5)
    assert [name for name, _ in entries] == ["made", "start", "settings", "finish"]


def test_a_slow_tracker_gets_everything_without_delaying_the_run(diary, tmp_path):
    entries = diary("slow", log=lambda: time.sleep(0.02))
    run = trackers(tmp_path, "slow")
    began = time.monotonic()
    for step in range(30):
        run.log(LINE, step)
    assert time.monotonic() - began < 0.3
    run.close()
    assert [value[1] for name, value in entries if name == "log"] == list(range(30))


def test_only_the_main_process_has_trackers(diary, tmp_path):
    entries = diary("diary")
    run = trackers(tmp_path / "run", "diary", main=False)
    run.log(LINE, 1)
    run.close()
    assert entries == []
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_has_the_same_name_in_trackers(diary, tmp_path):
    diary("diary")
    trackers(tmp_path, "diary").close()
    first = (tmp_path / "tracker_id.txt").read_text()
    trackers(tmp_path, "diary", epoch=3).close()
    assert (tmp_path / "tracker_id.txt").read_text() == first
    assert len(first) == 16


def test_trackers_leave_the_process_state_of_accelerate_alone(diary, tmp_path):
    diary("diary")
    before = dict(PartialState._shared_state)
    run = trackers(tmp_path, "diary")
    run.log(LINE, 1)
    run.close()
    assert dict(PartialState._shared_state) == before


PROCESS = """
import os, sys, torch, torch.distributed as dist
from pathlib import Path
from accelerate.state import PartialState
from flowgrpo.core.config import GRPOConfig
from flowgrpo.runs.trackers import Trackers

def log_rank(step):
    run = Trackers(GRPOConfig(trackers=["tensorboard"]), Path(sys.argv[1]), main=rank == 0)
    run.log({"rank": rank}, step)
    run.close()

rank = int(os.environ["RANK"])
log_rank(1)
assert not dist.is_initialized()
dist.init_process_group("gloo")
log_rank(2)
total = torch.tensor([rank + 1])
dist.all_reduce(total)
assert total.item() == 3 and dist.get_world_size() == 2 and dist.get_backend() == "gloo"
assert PartialState._shared_state == {}
dist.destroy_process_group()  # else its threads may abort the process at exit
"""


def test_trackers_neither_start_a_process_group_nor_replace_one(tmp_path):
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path)],
            env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
        )
        for rank in ("0", "1")
    ]
    errors = [process.communicate(timeout=120)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert "warning" not in errors[0]
    assert scalars(tmp_path) == {"rank": [(1, 0.0), (2, 0.0)]}


HANGS = """
import atexit, sys, threading, time
from accelerate import tracking
from pathlib import Path
from flowgrpo.core.config import GRPOConfig
from flowgrpo.runs.tracker_worker import exit_if_hung
from flowgrpo.runs.trackers import Trackers
class Hangs(tracking.GeneralTracker):
    name, requires_logging_directory, tracker = "hangs", False, None
    def start(self):
        atexit.register(time.sleep, 100)
        time.sleep(100)
tracking.register_tracker_class(Hangs)
exit_if_hung(4)
run = Trackers(GRPOConfig(trackers=["hangs"]), Path(sys.argv[1]), timeout=0.5)
run.close()
print("closed")
exit_if_hung(3)
"""


def test_a_process_with_a_hung_tracker_ends_without_running_exit_hooks(tmp_path):
    command = [sys.executable, "-c", HANGS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "closed\n"), done.stderr


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return accumulator


def scalars(folder):
    found = events(folder)
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def test_tensorboard_shows_metrics_images_and_settings(tmp_path, capsys):
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    Image.new("RGB", (8, 6), "red").save(tmp_path / "sheet.png")
    run = trackers(tmp_path, "tensorboard")
    run.log(LINE, 1)
    run.log_image("samples", tmp_path / "sheet.png", 1)
    run.close()
    assert not capsys.readouterr().err
    assert scalars(tmp_path)["rewards/ocr/mean"] == [(1, 0.5)]
    (image,) = events(tmp_path).Images("samples")
    assert (image.step, image.width, image.height) == (1, 8, 6)
    (settings,) = tmp_path.glob("tensorboard/*/hparams.yml")
    assert "sampling.group_size: 16" in settings.read_text()


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path):
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    for epoch, value in ((0, 0.0), (2, 1.0)):
        run = trackers(tmp_path, "tensorboard", epoch=epoch)
        for step in range(epoch + 1, 5):
            run.log({"value": value}, step)
        run.close()
        time.sleep(1.1)  # event files are ordered by their time in seconds
    assert scalars(tmp_path)["value"] == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0)]


def test_wandb_continues_the_same_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    Image.new("RGB", (8, 6), "red").save(tmp_path / "sheet.png")
    for epoch in (0, 2):
        run = trackers(tmp_path, "wandb", epoch=epoch)
        run.log(LINE, epoch + 1)
        run.log_image("samples", tmp_path / "sheet.png", epoch + 1)
        run.close()
        time.sleep(1.1)  # names of offline runs hold the time in seconds
    identity = (tmp_path / "tracker_id.txt").read_text()
    assert len(list(tmp_path.glob(f"wandb/offline-run-*-{identity}"))) == 2
    assert "warning: tracker" not in capsys.readouterr().err


def test_trackio_continues_the_same_run(tmp_path):
    pytest.importorskip("trackio", reason="pip install trackio")
    code = (
        "import sys; from pathlib import Path; from flowgrpo.core.config import GRPOConfig;"
        "from flowgrpo.runs.trackers import Trackers; import trackio\n"
        "for epoch in (0, 2):\n"
        "    run = Trackers(GRPOConfig(trackers=['trackio']), Path(sys.argv[1]), epoch=epoch)\n"
        "    run.log({'value': epoch}, epoch + 1); run.close()\n"
        "(only,) = trackio.Api().runs('flowgrpo')\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "logs = SQLiteStorage.get_logs('flowgrpo', only.name)\n"
        "assert [(e['step'], e['value']) for e in logs if 'value' in e] == [(1, 0), (3, 2)], logs\n"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)
