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

PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
OBJECTS_BETWEEN_PROCESSES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


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


def pickling(source):
    """Lines of a file that write or read pickles, or send them to another process."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").partition(".")[0]
            names = {module, *(alias.name for alias in node.names)}
        else:
            names = {getattr(node, "attr", None)}
        pickled = names & (PICKLES | OBJECTS_BETWEEN_PROCESSES)
        if isinstance(node, ast.Call):
            given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            called = ast.unparse(node.func)
            loads = called == "torch.load" and given.get("weights_only") is not True
            allowed = given.get("allow_pickle", False) is not False
            unsafe = loads or allowed or called == "torch.save"
        else:
            unsafe = False
        if pickled or unsafe:
            yield node.lineno, ast.unparse(node)


def test_the_package_reads_and_sends_no_pickle():
    for path in [*MODULES.values(), *ROOT.joinpath("rewards").glob("*.py")]:
        assert not list(pickling(path.read_text())), path


def test_pickles_are_found_by_any_of_their_names():
    for line in (
        "import pickle",
        "from dill import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.save(state, path)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=allowed)",
        "dist.all_gather_object(found, mine)",
        "from torch.distributed import broadcast_object_list",
    ):
        assert list(pickling(line)), line
    for line in ("torch.load(path, weights_only=True)", "np.load(path)", "json.load(file)"):
        assert not list(pickling(line)), line


def test_the_command_line_sets_the_wait_policy_before_torch_is_imported():
    code = (
        "import os, sys; os.environ.pop('OMP_WAIT_POLICY', None); import flowgrpo.cli;"
        "assert os.environ['OMP_WAIT_POLICY'] == 'PASSIVE'; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    keep = "import os; os.environ['OMP_WAIT_POLICY'] = 'ACTIVE'; import flowgrpo.cli;"
    keep += "assert os.environ['OMP_WAIT_POLICY'] == 'ACTIVE'"
    subprocess.run([sys.executable, "-c", keep], check=True)
