"""Checks the package's tree: class names are unique, folders have ten modules at most, imports have no cycles.

Imports inside functions and under ``TYPE_CHECKING`` count, too.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

MOST_MODULES = 10

classes: dict[str, list[Path]] = defaultdict(list)
folders: dict[Path, int] = defaultdict(int)
modules = {".".join(path.with_suffix("").parts): path for path in sorted(Path("aiofeed").rglob("*.py"))}
imports: dict[str, set[str]] = {}
for name, path in modules.items():
    folders[path.parent] += path.name not in ("__init__.py", "__main__.py")
    used = imports[name] = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
sys.exit("\n".join(problems) or 0)
