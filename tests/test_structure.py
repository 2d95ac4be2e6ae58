"""Imports go one way, rewards know nothing of the trainer, and no line knows a model's name."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = {path.stem: path for path in ROOT.joinpath("flowgrpo").glob("*.py")}
MODEL_NAMES = (
    r"flux|sd3|stable.?diffusion|sdxl|wan\b|qwen|sana|lumina|hunyuan|ltx|mochi|cogv|pixart"
)


def imports(path):
    """Modules of flowgrpo that a file imports when it runs, not for type checking alone."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flowgrpo"):
            inner = node.module.partition(".")[2]
            found |= {inner} if inner else {alias.name for alias in node.names}
    return found & MODULES.keys()


def test_imports_have_no_cycle():
    remaining = {name: imports(path) for name, path in MODULES.items()}
    while remaining:
        free = [name for name, needs in remaining.items() if not needs & remaining.keys()]
        assert free, f"cycle among {sorted(remaining)}"
        for name in free:
            del remaining[name]


def test_rewards_never_import_flowgrpo():
    for path in ROOT.joinpath("rewards").glob("*.py"):
        assert not re.search(r"^\s*(from|import) flowgrpo", path.read_text(), re.MULTILINE), path


def test_no_line_of_the_package_knows_a_models_name():
    for path in MODULES.values():
        code = "\n".join(line.split("#")[0] for line in path.read_text().splitlines())
        found = re.search(MODEL_NAMES, code, re.IGNORECASE)
        assert not found, f"{path.name}: {found}"


def test_the_command_line_sets_the_wait_policy_before_torch_is_imported():
    code = (
        "import os, sys; os.environ.pop('OMP_WAIT_POLICY', None); import flowgrpo.cli;"
        "assert os.environ['OMP_WAIT_POLICY'] == 'PASSIVE'; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    keep = "import os; os.environ['OMP_WAIT_POLICY'] = 'ACTIVE'; import flowgrpo.cli;"
    keep += "assert os.environ['OMP_WAIT_POLICY'] == 'ACTIVE'"
    subprocess.run([sys.executable, "-c", keep], check=True)
