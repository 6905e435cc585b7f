"""What a ``Dataset``'s items look like, and how they are taken apart into arrays that can be kept, and put together."""

from __future__ import annotations

import ast
import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.cache.decoder_codec import NotCacheableError
from aiofeed.cache.layout import ItemLayout, Layout
from aiofeed.core.pytree import is_namedtuple, map_leaves
from aiofeed.core.types import HostTensor
from aiofeed.runtime.tensors import as_array, as_tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

# As default_collate makes tensors of them.
NUMBERS: dict[type, np.dtype[Any]] = {
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    bool: np.dtype(np.bool_),
}
# Others may carry something beside their items, which a batch would have of its first sample.
_MAPPINGS = (dict, OrderedDict)
_SHOWN = 40


_NUMBERS = {kind.__name__: kind for kind in NUMBERS}
_MAPPING_TYPES: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict}
# The module that a script is, in the process that runs it and in one that only imports it.
_MAIN = ("__main__", "__mp_main__")


class ItemPart:
    """A number, an array or a tensor of an item. No dataclass, since those are nodes of an item and this is a leaf.

    Args:
        place: its place among the parts of an item, depth first.
        kind: the type of a number; ``None``: it is an array or a tensor.
        layout: what is kept of it.
    """

    __slots__ = ("kind", "layout", "place")

    def __init__(self, place: int, kind: type | None, layout: Layout) -> None:
        self.place = place
        self.kind = kind
        self.layout = layout

    def __repr__(self) -> str:
        return str(self.layout) if self.kind is None else self.kind.__name__

    def memory(self, value: Any) -> NDArray[Any] | None:
        """What is kept of another item's part; ``None`` where it is of another kind.

        Raises:
            OverflowError: the number is too large for a tensor.
        """
        layout = self.layout
        if self.kind is not None:
            return np.asarray(value, layout.dtype) if _number_type(value) is self.kind else None
        memory, torch_dtype = _memory(value)
        alike = (
            memory is not None
            and memory.shape == layout.shape
            and memory.dtype.name == layout.dtype
            and torch_dtype == layout.torch_dtype
            and isinstance(value, np.ndarray) != layout.tensor
        )
        return memory if alike else None

    def value(self, memory: NDArray[Any]) -> Any:
        """The part again, in memory of its own."""
        if self.kind is not None:
            return memory.item() if self.kind in NUMBERS else memory[()]
        copied = memory.copy()
        if not self.layout.tensor:
            return copied
        return as_tensor(HostTensor(copied, torch_dtype=self.layout.torch_dtype))


def item_layout(item: Any) -> ItemLayout:
    """How items are kept, by one of them.

    Raises:
        UnfitError: they cannot be.
    """
    parts: list[Layout] = []
    template = _template(item, "", parts)
    nbytes = sum(part.nbytes for part in parts)
    if not nbytes:
        raise NotCacheableError(f"it has no elements: it is {describe(item)}")
    words = str(template)
    return ItemLayout((nbytes,), "uint8", form=words, told=words, parts=tuple(parts), template=template)


def parts_of(item: Any, layout: ItemLayout) -> list[NDArray[Any]]:
    """The arrays of an item; views of its own where it has such.

    Raises:
        UnfitError: it is not like the others.
    """
    found: list[NDArray[Any]] = []
    _take(layout.template, item, "", found)
    return found


def item_of(parts: Sequence[NDArray[Any]], layout: ItemLayout) -> Any:
    """An item as the ``Dataset`` gave it, in memory of its own."""
    return map_leaves(lambda part: part.value(parts[part.place]), layout.template)


def batch_of(columns: Sequence[Any], layout: ItemLayout) -> Any:
    """A batch as ``default_collate`` makes it of items, its tensors those of ``columns``."""
    return _collated(layout.template, columns)


def describe(value: Any) -> str:
    """What a part of an item is, in a few words."""
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {list(value.shape)}"
    if hasattr(value, "__torch_function__") and hasattr(value, "requires_grad"):
        odd = [str(value.device)] if value.device.type != "cpu" else []
        odd += ["requires grad"] if value.requires_grad else []
        odd += [str(value.layout)] if str(value.layout) != "torch.strided" else []
        also = f" ({', '.join(odd)})" if odd else ""
        return f"{type(value).__name__.lower()} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}{also}"
    kind = type(value)
    if kind in (str, bytes, int, float, bool):
        text = repr(value)
        return f"a {kind.__name__}, {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}"
    if value is None:
        return "None"
    if isinstance(value, dict):
        return f"a {kind.__name__} with the keys {list(value)}"
    if isinstance(value, tuple | list):
        return f"a {kind.__name__} of {len(value)}"
    return f"a {kind.__name__}"


def _template(value: Any, path: str, parts: list[Layout]) -> Any:
    kind = type(value)
    if kind in _MAPPINGS:
        return kind([(name, _template(part, f"{path}[{name!r}]", parts)) for name, part in value.items()])
    if kind is tuple or kind is list or is_namedtuple(value):
        found = [_template(part, f"{path}[{at}]", parts) for at, part in enumerate(value)]
        return kind._make(found) if is_namedtuple(value) else kind(found)
    number = _number_type(value)
    layout = _array_layout(value) if number is None else _number_layout(value)
    if layout is None:
        raise NotCacheableError(
            f"item{path} is {describe(value)}; a cache can keep plain CPU tensors and arrays, numbers, and tuples, "
            f"lists and dicts of these"
        )
    found_part = ItemPart(len(parts), number, layout)
    parts.append(layout)
    return found_part


def _number_type(value: Any) -> type | None:
    """The type of a number, ``None`` where it is none; of numpy's that are the same (``longlong``) always one."""
    if isinstance(value, np.generic) and type(value) not in NUMBERS:
        return np.dtype(value.dtype.str).type
    return type(value) if type(value) in NUMBERS else None


def _memory(value: Any) -> tuple[NDArray[Any] | None, str | None]:
    # A row of a memmap is one, and default_collate takes it as an array.
    return as_array(np.asarray(value) if type(value) is np.memmap else value)


def _array_layout(value: Any) -> Layout | None:
    import torch

    memory, torch_dtype = _memory(value)
    if memory is None:
        return None
    if isinstance(value, np.ndarray):
        try:
            torch.from_numpy(np.empty(0, memory.dtype))
        except TypeError:  # a dtype that torch lacks: no batch could be made of it
            return None
    return Layout(memory.shape, memory.dtype.name, torch_dtype, tensor=not isinstance(value, np.ndarray))


def _number_layout(value: Any) -> Layout | None:
    if (dtype := NUMBERS.get(type(value))) is not None:
        return Layout((), dtype.name)
    import torch
    from torch.utils.data import default_collate

    try:
        as_torch = torch.from_numpy(np.empty(0, value.dtype)).dtype
        return Layout((), value.dtype.name) if default_collate([value]).dtype is as_torch else None
    except TypeError:  # no number, or one of a dtype that torch lacks
        return None


def _take(node: Any, value: Any, path: str, found: list[NDArray[Any]]) -> None:
    if type(node) is ItemPart:
        try:
            memory = node.memory(value)
        except OverflowError as error:
            raise NotCacheableError(f"item{path} is {describe(value)}: {error}") from None
        if memory is None:
            raise _unlike(node, value, path)
        found.append(memory)
    elif type(value) is not type(node) or len(value) != len(node):
        raise _unlike(node, value, path)
    elif isinstance(node, dict):
        # The order of an OrderedDict's keys is part of its value.
        alike = value.keys() == node.keys() if type(node) is dict else list(value) == list(node)
        if not alike:
            raise _unlike(node, value, path)
        for name, part in node.items():
            _take(part, value[name], f"{path}[{name!r}]", found)
    else:
        for at, part in enumerate(node):
            _take(part, value[at], f"{path}[{at}]", found)


def _unlike(node: Any, value: Any, path: str) -> NotCacheableError:
    others = repr(node) if type(node) is ItemPart else describe(node)
    return NotCacheableError(f"item{path} is {describe(value)}, and that of the others is {others}")


def _collated(node: Any, columns: Sequence[Any]) -> Any:
    if type(node) is ItemPart:
        return columns[node.place]
    if isinstance(node, dict):
        return type(node)([(name, _collated(part, columns)) for name, part in node.items()])
    found = [_collated(part, columns) for part in node]
    return type(node)._make(found) if is_namedtuple(node) else found


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
    if type(node) is ItemPart:
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
        raise NotCacheableError(
            f"item{path} has the key {text}, where a file can name texts, numbers, and tuples of these"
        )
    return text


def _read(node: list[Any], types: Any, parts: list[Layout]) -> Any:
    kind, *rest = node
    if kind in _MAPPING_TYPES:
        return _MAPPING_TYPES[kind]([(ast.literal_eval(key), _read(part, types, parts)) for key, part in rest[0]])
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
    return ItemPart(len(parts) - 1, number, layout)


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
