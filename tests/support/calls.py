"""The calls of public names that texts show, such as those that messages advise."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiofeed
from aiofeed import exporters, processes, reports

_OPEN = re.compile(r"(?<![\w.])(?:aiofeed\.)?([A-Za-z_]\w*)\(")
PUBLIC: dict[str, Any] = {
    name: getattr(module, name)
    for module in (exporters, processes, reports, aiofeed)
    for name in module.__all__
    if callable(getattr(module, name))
}


@dataclass(frozen=True)
class ShownCall:
    """A call of a public name. ``...`` and what a program fills in stand for any arguments or any value."""

    name: str
    code: str
    node: ast.Call

    @property
    def is_open(self) -> bool:
        """Whether arguments are left out: a place has ``...``, or it only names arguments."""
        places = self.node.args
        return not places or any(isinstance(each, ast.Constant) and each.value is ... for each in places)

    def bind(self) -> None:
        """Raise ``TypeError`` if the name does not take these arguments, or needs further ones."""
        signature = inspect.signature(PUBLIC[self.name])
        given = [each for each in self.node.args if not isinstance(each, ast.Constant) or each.value is not ...]
        named = {each.arg: None for each in self.node.keywords if each.arg is not None}
        (signature.bind_partial if self.is_open else signature.bind)(*given, **named)


def calls_in(text: str) -> Iterator[ShownCall]:
    """Yield the calls of public names in a text."""
    for match in _OPEN.finditer(text):
        depth = 0
        for end in range(match.end() - 1, len(text)):
            depth += (text[end] in "([{") - (text[end] in ")]}")
            if not depth:
                break
        code = re.sub(r"%[ds]", "...", text[match.start() : end + 1])
        try:
            node = ast.parse(code, mode="eval").body
        except SyntaxError:
            continue  # as the name of a parameter, "Clips(frames=)"
        if isinstance(node, ast.Call) and match[1] in PUBLIC:
            yield ShownCall(match[1], code, node)


def messages_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts in a module, with their lines, without docstrings and ``__repr__``; ``{x}`` is ``...``."""
    left_out: set[int] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or (isinstance(node, ast.FunctionDef) and node.name == "__repr__"):
            left_out.update(map(id, ast.walk(node)))
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.JoinedStr):
            left_out.update(map(id, node.values))
            yield (
                node.lineno,
                "".join(str(each.value) if isinstance(each, ast.Constant) else "..." for each in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
