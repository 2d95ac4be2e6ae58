"""The wheel: what it contains, and that it works when installed, away from the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from flowgrpo.runs.environment import code_hash

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
GENERATED = {"runs", "work", "build", "dist"}


def run(*command, folder):
    """The standard output of a command that must succeed, without the caller's import paths."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def not_source(folder, names):
    """Names that are no part of the source; flowgrpo/runs is, so GENERATED counts at ROOT only."""
    generated = GENERATED if Path(folder) == ROOT else set()
    hidden = {name for name in names if name.startswith(".") or name == "__pycache__"}
    return hidden | generated | {name for name in names if name.endswith(".egg-info")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy, since a build leaves folders in the source."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", ignore=not_source)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, folder / "source", folder=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def scripts(wheel, tmp_path_factory):
    """The scripts of a new virtual environment with the wheel in it.

    The dependencies are those of the running interpreter. Its site-packages is a line in a .pth
    file, so that Python adds it to sys.path without reading the .pth files inside: one of them may
    be that of an editable install, which would hide the wheel.
    """
    venv = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, folder=venv.parent)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", python]
    run(*pip, "install", "--no-deps", wheel, folder=venv.parent)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin"


def test_the_wheel_contains_both_packages_complete_and_nothing_else(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    files = [path for package in ("flowgrpo", "rewards") for path in ROOT.glob(f"{package}/**/*")]
    source = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert {"flowgrpo/py.typed", "rewards/py.typed", "flowgrpo/runs/folder.py"} <= source
    assert names == source


@pytest.fixture(scope="module")
def metadata(wheel):
    """The wheel's metadata, by its field names."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def test_the_wheel_contains_the_licence_and_names_it(wheel, metadata):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/licenses/LICENSE")]
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"


@pytest.mark.parametrize("name", ["bitsandbytes", "datasets", "trackio", "wandb", "xformers"])
def test_an_optional_package_is_an_extra_of_its_own_name(name, metadata):
    assert f'{name}; extra == "{name}"' in metadata.get_all("Requires-Dist")


def test_the_installed_packages_are_those_of_the_wheel_and_have_the_hash_of_the_source(
    scripts, tmp_path
):
    code = "import flowgrpo, rewards; print(flowgrpo.__file__); print(rewards.__file__)"
    hashed = "from flowgrpo.runs.environment import code_hash; print(code_hash())"
    output = run(scripts / "python", "-c", f"{code}; {hashed}", folder=tmp_path)
    *files, found = output.splitlines()
    assert all(Path(file).is_relative_to(scripts.parent) for file in files)
    assert found == code_hash()


def test_the_installed_script_lists_its_commands(scripts, tmp_path):
    lines = run(scripts / "flowgrpo", "--help", folder=tmp_path).splitlines()
    words = {line.split()[0] for line in lines if line.strip()}
    assert {"train", "plan", "check", "compare"} <= words


def test_the_installed_script_checks_a_pipeline_outside_of_the_checkout(scripts, tmp_path):
    model = ROOT / "assets" / "tiny-sd3"
    output = run(scripts / "flowgrpo", "check", model, "height=32", "width=64", folder=tmp_path)
    assert "can be trained" in output
