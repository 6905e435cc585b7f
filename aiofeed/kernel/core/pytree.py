"""Nested batches. Tuples, lists, mappings, namedtuples and dataclasses are nodes; everything else is a leaf.

Of the other classes of tuples, those of ``torch.return_types`` are nodes: ``torch.max``, for example, returns one.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any

from aiofeed.kernel.core.types import HostTensor

Leaf = Callable[[Any], Any]

_MAIN_MODULES = ("__main__", "__mp_main__")
_BUILT_IN = (tuple, list, dict)
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
# Modules whose objects are leaves, as far as trees are concerned; the tests for all kinds of nodes take a microsecond.
_OF_LEAVES = ("numpy", "torch")
# Usual leaves, which need not be tested for all kinds of nodes.
_LEAVES = _PLAIN | {HostTensor}


def is_namedtuple(value: object) -> bool:
    """Return whether ``value`` is an instance of a ``NamedTuple`` class."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def loaded_class(module: str, qualname: str, matches: Callable[[type], bool]) -> type | None:
    """Return the class of that name if this process has loaded it and ``matches`` accepts it; nothing is imported.

    A script's module is ``__main__`` in the process that runs it and ``__mp_main__`` in its children.
    """
    for name in _MAIN_MODULES if module in _MAIN_MODULES else (module,):
        found: Any = sys.modules.get(name)
        for step in qualname.split("."):
            found = getattr(found, step, None)
        if isinstance(found, type) and matches(found):
            return found
    return None


def is_dataclass_instance(value: object) -> bool:
    """Return whether ``value`` is an instance of a dataclass, as opposed to a dataclass itself."""
    return hasattr(type(value), "__dataclass_fields__")


def map_leaves(function: Leaf, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Apply ``function`` to each leaf; the result has the same structure and container types.

    Args:
        function: Maps a leaf to its replacement.
        tree: The nested batch.
        is_leaf: Containers for which it returns True are leaves.
    """
    kind = type(tree)
    if kind in _LEAVES or kind.__module__ in _OF_LEAVES or (is_leaf is not None and is_leaf(tree)):
        return function(tree)
    if kind is tuple:
        return tuple([map_leaves(function, item, is_leaf) for item in tree])
    if kind is list:
        return [map_leaves(function, item, is_leaf) for item in tree]
    if kind is dict:
        return {name: map_leaves(function, item, is_leaf) for name, item in tree.items()}
    if is_namedtuple(tree):
        return kind._make([map_leaves(function, item, is_leaf) for item in tree])
    if isinstance(tree, Mapping):
        return like_mapping(tree, {name: map_leaves(function, item, is_leaf) for name, item in tree.items()})
    if isinstance(tree, list):
        return like_list(tree, [map_leaves(function, item, is_leaf) for item in tree])
    if is_dataclass_instance(tree):
        # Sets the fields without __init__ and __post_init__, which ran when the batch was made.
        clone = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(clone, field.name, map_leaves(function, getattr(tree, field.name), is_leaf))
        return clone
    if kind.__module__ == "torch.return_types":
        return kind([map_leaves(function, item, is_leaf) for item in tree])
    return function(tree)


def like_mapping(model: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """``items`` in a mapping of the model's type; a plain dict if the model is immutable."""
    if isinstance(model, MutableMapping) and type(model) is not dict:
        # Copying preserves the other attributes of a subclass, such as the factory of a defaultdict.
        clone = copy.copy(model)
        clone.update(items)
        return clone
    return items


def like_list(model: list[Any], items: list[Any]) -> Any:
    """``items`` in a list of the model's type."""
    if type(model) is list:
        return items
    clone = copy.copy(model)
    clone[:] = items
    return clone


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of a tree, depth first, in the order of ``map_leaves``; also the items of tuples that it does not map.

    A device must know each tensor of a batch, wherever it is.
    """
    if isinstance(tree, tuple | list):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from leaves(item)
    elif is_dataclass_instance(tree):
        for field in dataclasses.fields(tree):
            yield from leaves(getattr(tree, field.name))
    else:
        yield tree


def is_flat_plain(tree: Any) -> bool:
    """Return whether ``tree`` is a tuple, list or dict of numbers, strings and ``None``, which are quick to tell."""
    return type(tree) in _BUILT_IN and _PLAIN.issuperset(map(type, tree.values() if type(tree) is dict else tree))


def total_nbytes(tree: Any) -> int:
    """Total bytes of the arrays and tensors of a tree; sparse tensors count as 0."""
    if type(tree) in _BUILT_IN:  # several times as fast as ``leaves``
        parts = [*tree.values()] if type(tree) is dict else tree
        if {*map(type, parts)} == {dict}:
            parts = [*chain.from_iterable(map(dict.values, parts))]
        return 0 if is_flat_plain(parts) else sum(map(total_nbytes, parts))
    is_leaf = type(tree).__module__ in _OF_LEAVES
    if not is_leaf and (isinstance(tree, tuple | list | Mapping) or is_dataclass_instance(tree)):
        return sum(map(total_nbytes, leaves(tree)))
    try:
        return int(getattr(tree, "nbytes", 0))
    except RuntimeError:
        return 0  # torch raises it for sparse tensors
