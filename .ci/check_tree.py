"""Checks the tree: class names, ten modules per folder, no import cycles, the kernel and its add-ons, budgets.

Imports inside functions and under ``TYPE_CHECKING`` count, too. Tables of pyproject.toml say what is allowed:

- ``[tool.aiofeed.addons]``: the folders beside ``kernel``, and which others each of them may import. The kernel imports
  none of them; ``Feeder`` names their types for type checkers.
- Members of the faces in ``kernel/core/faces.py`` are asked by name (``getattr``, ``hasattr``) there alone.
- ``[tool.aiofeed.budget]``: the lines of code of each folder of the package, without blank lines, comments and
  docstrings, and the number of files. ``--budget`` prints today's figures.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from lines_of_code import lines_of_code

MOST_MODULES = 10
# Its overloads name the types of sources and of results.
NAMES_TYPES = {"aiofeed.kernel.feeder.feeder"}
# It imports modules by its lists of names.
IMPORTS_BY_NAME = {"aiofeed.__init__"}
FACES = Path("aiofeed", "kernel", "core", "faces.py")
# Objects of other libraries that may have an attribute of this name: files have `read`, arrays `nbytes`.
OF_OTHERS = {("aiofeed.kernel.sources.dataset", "read"), ("aiofeed.kernel.core.pytree", "nbytes")}


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each import from the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "aiofeed":
            yield from ((str(node.module), alias.name) for alias in node.names)


def type_imports(tree: ast.Module) -> set[tuple[str, str]]:
    """Return the imports under ``if TYPE_CHECKING``."""
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    return {each for node in tests for statement in node.body for each in imported(statement)}


def imports_by_name(tree: ast.Module) -> bool:
    """Return whether a module imports modules of the package by a string."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args)
    return any(
        ast.unparse(call.func).endswith(("import_module", "__import__")) and "aiofeed" in ast.unparse(call.args[0])
        for call in calls
    )


def face_members() -> set[str]:
    """Return the names of the members that the faces declare."""
    classes = [node for node in ast.parse(FACES.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    declared = [statement for each in classes for statement in each.body]
    names = {each.name for each in declared if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    names |= {ast.unparse(each.target) for each in declared if isinstance(each, ast.AnnAssign)}
    return {name for name in names if not name.startswith("_")}


def asked_by_name(tree: ast.Module, members: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each member that is asked by ``getattr`` or ``hasattr``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            if name in members:
                yield node.lineno, str(name)


def room_of(module: str) -> str:
    """Return the folder of the package that a module is in, "" for one beside the folders."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and Path("aiofeed", parts[1]).is_dir() else ""


settings = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["tool"]["aiofeed"]
addons: dict[str, list[str]] = settings["addons"]
problems: list[str] = []
members = face_members()
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
    for module, each in imported(tree):
        used |= {module, f"{module}.{each}"} & modules.keys()
    room = room_of(name)
    if room == "kernel" and path != FACES:
        problems += [
            f"{path}:{line} asks for {member!r} by its name: use the face of kernel/core/faces.py"
            for line, member in asked_by_name(tree, members)
            if (name, member) not in OF_OTHERS
        ]
    types = set[tuple[str, str]]() if room == "kernel" and name not in NAMES_TYPES else type_imports(tree)
    allowed = {"kernel", *addons} if not room else {room, "kernel", *addons.get(room, ())}
    for module, each in imported(tree):
        if module != "aiofeed" and room_of(module) not in allowed and (module, each) not in types:
            problems.append(f"{path} imports {module}, and [tool.aiofeed.addons] does not allow it")
    if name not in IMPORTS_BY_NAME and imports_by_name(tree):
        problems.append(
            f"{path} imports a module of the package by a string: import it, or use _load_addon of aiofeed/__init__.py"
        )

problems += [f"class {name} is in {', '.join(map(str, at))}" for name, at in classes.items() if len(at) > 1]
full = {folder: n for folder, n in folders.items() if n > MOST_MODULES}
problems += [f"{folder}/ has {n} modules, at most {MOST_MODULES} are allowed" for folder, n in full.items()]
try:
    TopologicalSorter(imports).prepare()
except CycleError as error:
    problems.append(f"modules import each other: {' -> '.join(error.args[1])}")
for room, needs in addons.items():
    used_rooms = {room_of(module) for name in imports if room_of(name) == room for module in imports[name]}
    problems += [
        f"[tool.aiofeed.addons] says that {room} needs {each}: it imports nothing of it"
        for each in {*needs} - used_rooms
    ]
budget = settings["budget"]
for room, lines in code.items():
    if lines > budget.get(room, 0):
        problems.append(
            f"{room} = {lines}, and the budget in pyproject.toml is {budget.get(room, 0)}: take code out; a commit of "
            f"its own, whose message says what the lines buy, may raise it"
        )
if "--budget" in sys.argv:
    print(*(f"{room} = {lines}" for room, lines in sorted(code.items())), sep="\n")
sys.exit("\n".join(problems) or 0)
