"""Checks the package's tree: unique class names, ten modules per folder, no import cycles, and each room's budget.

Imports inside functions and under ``TYPE_CHECKING`` count, too. ``[tool.aiofeed.budget]`` of pyproject.toml limits the
lines of code of each folder of the package, without blank lines, comments and docstrings, and the number of files.
``--budget`` prints today's figures.
"""

from __future__ import annotations

import ast
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

MOST_MODULES = 10
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def lines_of_code(path: Path, tree: ast.Module) -> int:
    """Count the lines of a file that have code: no blank lines, comments or strings that are statements."""
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in NOT_CODE]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    return len(lines)


classes: dict[str, list[Path]] = defaultdict(list)
folders: dict[Path, int] = defaultdict(int)
modules = {".".join(path.with_suffix("").parts): path for path in sorted(Path("aiofeed").rglob("*.py"))}
imports: dict[str, set[str]] = {}
code = Counter[str]()
for name, path in modules.items():
    folders[path.parent] += path.name not in ("__init__.py", "__main__.py")
    used = imports[name] = set[str]()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lines = lines_of_code(path, tree)
    code.update({path.parts[1] if len(path.parts) > 2 else "aiofeed": lines, "all": lines, "files": 1})
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            classes[node.name].append(path)
        elif isinstance(node, ast.ImportFrom) and node.module:
            used |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)} & modules.keys()

problems = [f"class {name} is in {', '.join(map(str, at))}" for name, at in classes.items() if len(at) > 1]
full = {folder: n for folder, n in folders.items() if n > MOST_MODULES}
problems += [f"{folder}/ has {n} modules, at most {MOST_MODULES} are allowed" for folder, n in full.items()]
try:
    TopologicalSorter(imports).prepare()
except CycleError as error:
    problems.append(f"modules import each other: {' -> '.join(error.args[1])}")
budget = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["tool"]["aiofeed"]["budget"]
for room, lines in code.items():
    if lines > budget.get(room, 0):
        problems.append(
            f"{room} = {lines}, and the budget in pyproject.toml is {budget.get(room, 0)}: take code out; a commit of "
            f"its own, whose message says what the lines buy, may raise it"
        )
if "--budget" in sys.argv:
    print(*(f"{room} = {lines}" for room, lines in sorted(code.items())), sep="\n")
sys.exit("\n".join(problems) or 0)
