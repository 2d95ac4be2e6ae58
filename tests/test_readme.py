"""What the documents claim: links lead somewhere, named tests exist, and code in them is real."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    ROOT / name
    for name in (
        "README.md",
        "assets/README.md",
        "assets/supported.md",
        "configs/README.md",
        "configs/running.md",
        "rewards/README.md",
    )
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_files_that_a_document_names_exist(path):
    text = path.read_text()
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    missing = [link for link in links if not (path.parent / link).exists()]
    named = re.findall(r"\b((?:configs|scripts|assets|tests)/[\w/]+\.\w+)", text)
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_every_claim_names_a_test_in_the_file_it_links_to():
    text = (ROOT / "README.md").read_text()
    claims = re.findall(r"\[test\]\((\S+)\):\s+`(\w+)`", text)
    assert len(claims) >= 3
    for file, name in claims:
        tree = ast.parse((ROOT / file).read_text())
        assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, name


def test_the_python_of_the_readme_uses_names_that_exist():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    tree = ast.parse(code)
    assert len([line for line in code.splitlines() if line.strip()]) <= 8
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            for alias in node.names:
                try:
                    getattr(module, alias.name)
                except AttributeError:
                    importlib.import_module(f"{node.module}.{alias.name}")
    # The settings are real, and the reward is the function of configs/saturation.py.
    scope = {}
    exec(code.replace("GRPOTrainer(", "None and GRPOTrainer("), scope)
    assert scope["args"].train.epochs == 10
    shipped = (ROOT / "configs" / "saturation.py").read_text()
    assert ast.unparse(ast.parse(shipped).body[-1]) in ast.unparse(tree)


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


def test_the_readme_names_every_command_and_every_wing():
    text = (ROOT / "README.md").read_text()
    from flowgrpo.cli import app

    for command in app.registered_commands:
        assert f"`flowgrpo {command.callback.__name__} " in text
    for wing in ROOT.glob("flowgrpo/*/__init__.py"):
        assert re.search(rf"[`/ ]{wing.parent.name}/`", text), wing.parent.name
