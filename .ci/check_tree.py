"""Checks the package's tree: every class name is unique, and no folder has more than ten modules."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

MOST_MODULES = 10

classes: dict[str, list[Path]] = defaultdict(list)
folders: dict[Path, int] = defaultdict(int)
for path in sorted(Path("aiofeed").rglob("*.py")):
    folders[path.parent] += path.name not in ("__init__.py", "__main__.py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            classes[node.name].append(path)

problems = [f"class {name} is in {', '.join(map(str, at))}" for name, at in classes.items() if len(at) > 1]
full = {folder: n for folder, n in folders.items() if n > MOST_MODULES}
problems += [f"{folder}/ has {n} modules, at most {MOST_MODULES} are allowed" for folder, n in full.items()]
sys.exit("\n".join(problems) or 0)
