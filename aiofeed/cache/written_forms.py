"""The form of a ``Dataset``'s items in writing, for a file that another process reads, and made of that again."""

from __future__ import annotations

import ast
import json
import sys
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np

from aiofeed.cache.decoder_codec import UnfitError
from aiofeed.cache.item_codec import NUMBERS, Part
from aiofeed.cache.layout import ItemLayout, Layout
from aiofeed.core.pytree import is_namedtuple

_NUMBERS = {kind.__name__: kind for kind in NUMBERS}
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict}
# The module that a script is, in the process that runs it and in one that only imports it.
_MAIN = ("__main__", "__mp_main__")


def written(layout: ItemLayout) -> ItemLayout:
    """The same, its form in writing.

    Raises:
        UnfitError: it has keys that a file cannot name.
    """
    types: list[str] = []
    form = json.dumps(_write(layout.template, "", types))
    return replace(layout, form=form, types=tuple(types))


def restored(layout: ItemLayout) -> ItemLayout | None:
    """What a file says made whole again; ``None`` where that cannot be, an item has to tell then.

    A namedtuple's class may not be loaded: nothing is imported because a file says so. Nor need it be a form of ours.
    """
    parts: list[Layout] = []
    try:
        template = _read(json.loads(layout.form), iter(layout.types), parts)
        fits = sum(part.nbytes for part in parts) == layout.nbytes
    except (LookupError, ValueError, TypeError, SyntaxError, StopIteration):
        return None
    if not fits:
        return None
    return replace(layout, parts=tuple(parts), template=template)


def _write(node: Any, path: str, types: list[str]) -> list[Any]:
    if type(node) is Part:
        layout = node.layout
        if node.kind is not None:
            return ["number", node.kind.__name__] if node.kind in NUMBERS else ["scalar", layout.dtype]
        if not layout.tensor:
            return ["array", layout.dtype, layout.shape]
        return ["tensor", layout.dtype, layout.shape, layout.torch_dtype]
    kind = type(node)
    if isinstance(node, dict):
        named = [[_name(key, path), _write(part, f"{path}[{key!r}]", types)] for key, part in node.items()]
        return [kind.__name__, named]
    if is_namedtuple(node):
        types.append(f"{kind.__module__}:{kind.__qualname__}")
        # Its module is no part of the form: a script is another when it is imported.
        found = [_write(part, f"{path}[{at}]", types) for at, part in enumerate(node)]
        return ["namedtuple", kind.__name__, list(kind._fields), found]
    return [kind.__name__, [_write(part, f"{path}[{at}]", types) for at, part in enumerate(node)]]


def _name(key: Any, path: str) -> str:
    text = repr(key)
    try:
        same = repr(ast.literal_eval(text)) == text
    except (ValueError, SyntaxError, RecursionError):
        same = False
    if not same:
        raise UnfitError(f"item{path} has the key {text}, where a file can name texts, numbers, and tuples of these")
    return text


def _read(node: list[Any], types: Any, parts: list[Layout]) -> Any:
    kind, *rest = node
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]([(ast.literal_eval(key), _read(part, types, parts)) for key, part in rest[0]])
    if kind in ("list", "tuple"):
        found = [_read(part, types, parts) for part in rest[0]]
        return found if kind == "list" else tuple(found)
    if kind == "namedtuple":
        cls = _loaded(next(types), *rest[:2])
        return cls._make([_read(part, types, parts) for part in rest[2]])
    number: type | None = None
    if kind == "number":
        number = _NUMBERS[rest[0]]
        layout = Layout((), NUMBERS[number].name)
    elif kind == "scalar":
        number, layout = np.dtype(rest[0]).type, Layout((), rest[0])
    else:
        dtype, shape, *torch_dtype = rest
        layout = Layout(tuple(shape), dtype, torch_dtype[0] if torch_dtype else None, tensor=kind == "tensor")
    parts.append(layout)
    return Part(len(parts) - 1, number, layout)


def _loaded(name: str, kind: str, fields: list[str]) -> Any:
    module, _, path = name.partition(":")
    for place in _MAIN if module in _MAIN else (module,):
        found: Any = sys.modules.get(place)
        for step in path.split("."):
            found = getattr(found, step, None)
        fits = isinstance(found, type) and issubclass(found, tuple) and found.__name__ == kind
        if fits and list(getattr(found, "_fields", ())) == fields:
            return found
    raise LookupError(f"no namedtuple {name} is loaded")
