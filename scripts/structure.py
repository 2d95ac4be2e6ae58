"""Prints how large and how deep the code of a checkout is: files, functions, imports, comments.

python scripts/structure.py            # this checkout
python scripts/structure.py FOLDER     # another one, to compare
"""

import ast
import functools
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path


def imports(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a file imports when it runs, not for type checking alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def at_90_percent(values: list[int]) -> int:
    return sorted(values)[int(0.9 * len(values))]


def main(root: Path) -> None:
    files = [*root.glob("flowgrpo/**/*.py"), *root.glob("rewards/**/*.py")]
    if not files:
        sys.exit(f"{root} is no checkout of flowgrpo; name its folder.")
    texts = {path: path.read_text() for path in files}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    functions = [
        node for t in trees.values() for node in ast.walk(t) if isinstance(node, ast.FunctionDef)
    ]
    modules = {}
    for path in files:
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    edges = {
        name: {other for other in imports(trees[path]) if other in modules} - {name}
        for name, path in modules.items()
    }

    @functools.cache
    def chain(name: str) -> tuple[str, ...]:
        return (name, *max(map(chain, edges[name]), key=len, default=()))

    lines = [len(text.splitlines()) for text in texts.values()]
    lengths = [(node.end_lineno or 0) - node.lineno + 1 for node in functions]
    counts = []
    for node in functions:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        counts.append(len([a for a in arguments if a.arg not in ("self", "cls")]))
    comments = sum(
        token.type == tokenize.COMMENT
        for text in texts.values()
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )
    longest = max(map(chain, edges), key=len)
    rows = {
        "files, lines": f"{len(files)}, {sum(lines)}",
        "lines of a file: 90 %, longest": f"{at_90_percent(lines)}, {max(lines)}",
        "functions": f"{len(functions)}",
        "lines of a function: 90 %, longest": f"{at_90_percent(lengths)}, {max(lengths)}",
        "functions of more than 6 parameters": f"{sum(count > 6 for count in counts)}",
        "imports between files": f"{sum(map(len, edges.values()))}",
        "longest chain of imports": f"{len(longest)} files ({' > '.join(longest)})",
        "comments per 100 lines": f"{100 * comments / sum(lines):.2f}",
    }
    for label, value in rows.items():
        print(f"{label:38}{value}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])
