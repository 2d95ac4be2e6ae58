"""The structure of the package: wings with one-way imports, short files, patches in one place."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {path.relative_to(ROOT).as_posix(): path for path in ROOT.glob("flowgrpo/**/*.py")}
REWARDS = {path.relative_to(ROOT).as_posix(): path for path in ROOT.glob("rewards/**/*.py")}
MODEL_NAMES = (
    r"flux|sd3|stable.?diffusion|sdxl|wan\b|qwen|sana|lumina|hunyuan|ltx|mochi|cogv|pixart"
)

WINGS = {
    "core": set(),
    "algorithms": set(),
    "data": {"core"},
    "distributed": {"core"},
    "scoring": {"core", "data"},
    "pipelines": {"core", "algorithms", "data", "distributed"},
    "policy": {"core", "algorithms", "data", "distributed", "pipelines"},
    "evaluation": {"core", "data", "distributed", "policy", "scoring"},
    "preflight": {
        "core", "algorithms", "data", "distributed", "pipelines", "policy", "scoring"
    },
    "runs": {"core", "data", "policy", "scoring", "evaluation"},
    "reporting": {"core", "data", "pipelines", "scoring", "evaluation", "runs"},
    "training": {
        "core", "algorithms", "data", "distributed", "pipelines", "policy", "scoring",
        "evaluation", "preflight", "runs", "reporting",
    },
    "commands": {
        "core", "data", "pipelines", "preflight", "runs", "reporting", "training"
    },
    "cli": {"commands", "runs"},
    "__init__": {"core", "preflight", "training"},
}  # fmt: skip
"""Which wings a wing may import. Read from top to bottom, it is also the reading order."""

LONGEST_FILE, LONGEST_FUNCTION, MOST_PARAMETERS, LONGEST_CHAIN = 300, 60, 6, 11
"""In lines, lines, parameters without self, and files that import one another in turn."""
MANY_PARAMETERS = {"GRPOTrainer.__init__", "compare"}
"""Functions whose parameters are a user's choices: the trainer, and a command of typer."""


PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
OBJECTS_BETWEEN_PROCESSES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


def imports(name):
    """Files of flowgrpo that a file imports when it runs, not for type checking alone."""
    tree = ast.parse(FILES[name].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import"
            # `from package import name` may name a module or something within one.
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    places = {module.replace(".", "/") for module in found}
    return {f"{p}{end}" for p in places for end in (".py", "/__init__.py")} & FILES.keys() - {name}


def wing(name):
    parts = Path(name).parts
    return parts[1] if len(parts) > 2 else Path(name).stem


@functools.cache
def longest_chain(name):
    return (name, *max((longest_chain(other) for other in imports(name)), key=len, default=()))


def functions():
    """(file, name with its class, node) of every function of the package and the rewards."""
    for name, path in {**FILES, **REWARDS}.items():
        stack = [(ast.parse(path.read_text()), "")]
        while stack:
            parent, prefix = stack.pop()
            for node in ast.iter_child_nodes(parent):
                inner = prefix
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    inner = f"{prefix}{node.name}."
                if isinstance(node, ast.FunctionDef):
                    yield name, inner[:-1], node
                stack.append((node, inner))


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_wing_imports_only_the_wings_that_it_may(name):
    allowed = WINGS[wing(name)] | {wing(name)}
    assert {wing(other) for other in imports(name)} <= allowed


def test_every_wing_has_a_rule_and_no_two_wings_import_each_other():
    packages = {path.parent.name for path in ROOT.glob("flowgrpo/*/__init__.py")}
    assert packages == WINGS.keys() - {"cli", "__init__"}
    known = set()
    for name, below in WINGS.items():
        assert below <= known, f"{name} imports a wing that stands below it in the table"
        known.add(name)


def test_imports_have_no_cycle_and_no_long_chains():
    remaining = {name: imports(name) for name in FILES}
    while remaining:
        free = [name for name, needs in remaining.items() if not needs & remaining.keys()]
        assert free, f"cycle among {sorted(remaining)}"
        for name in free:
            del remaining[name]
    longest = max(map(longest_chain, FILES), key=len)
    assert len(longest) <= LONGEST_CHAIN, " > ".join(longest)


def test_files_and_functions_are_short_and_take_few_parameters():
    lines = {n: len(p.read_text().splitlines()) for n, p in {**FILES, **REWARDS}.items()}
    assert max(lines.values()) <= LONGEST_FILE, max(lines, key=lines.get)
    assert sorted(lines.values())[int(0.9 * len(lines))] < 240
    lengths = []
    for name, function, node in functions():
        lengths.append(node.end_lineno - node.lineno + 1)
        assert lengths[-1] < LONGEST_FUNCTION, f"{name}: {function}"
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = len([a for a in arguments if a.arg not in ("self", "cls")])
        assert count <= MOST_PARAMETERS or function in MANY_PARAMETERS, f"{name}: {function}"
    assert sorted(lengths)[int(0.9 * len(lengths))] < 25


def patches(source):
    """Lines of a file that set attributes by name, or exchange a class, an object's method or its
    hooks' call."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
            yield ast.unparse(node)
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if getattr(target, "attr", "") in {"__class__", "forward", "_call_impl", "step"}:
                yield ast.unparse(node)


def test_live_objects_are_patched_in_one_file_only():
    seams = "flowgrpo/pipelines/seams.py"
    for name, path in FILES.items():
        assert name == seams or not list(patches(path.read_text())), name
    assert list(patches(FILES[seams].read_text()))
    for line in ("setattr(a, b, c)", "a.__class__ = B", "module.forward = f"):
        assert list(patches(line)), line


def test_rewards_never_import_flowgrpo():
    assert REWARDS
    for path in REWARDS.values():
        assert not re.search(r"^\s*(from|import) flowgrpo", path.read_text(), re.MULTILINE), path


def test_no_line_of_the_package_knows_a_models_name():
    for name, path in FILES.items():
        code = "\n".join(line.split("#")[0] for line in path.read_text().splitlines())
        found = re.search(MODEL_NAMES, code, re.IGNORECASE)
        assert not found, f"{name}: {found}"


def test_the_hash_of_the_code_covers_every_file(monkeypatch, tmp_path):
    import shutil

    from flowgrpo.runs import environment

    for folder in ("flowgrpo", "rewards"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    before = environment.code_hash()
    for name in [*FILES, *REWARDS]:
        path = tmp_path / name
        text = path.read_text()
        path.write_text(text + "# changed\n")
        assert environment.code_hash() != before, name
        path.write_text(text)
    assert environment.code_hash() == before


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
    for path in [*FILES.values(), *REWARDS.values()]:
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


def test_test_files_have_names_of_their_own():
    """pytest imports them by name alone."""
    names = [path.name for path in ROOT.glob("tests/**/test_*.py")]
    assert len(names) == len(set(names))
