"""Trees of leaves: which classes are nodes."""

import collections
import dataclasses
import os
import typing

import pytest
import torch

from aiofeed.kernel.core.pytree import leaves, map_leaves


class Pair(typing.NamedTuple):
    first: object
    second: object


@dataclasses.dataclass(frozen=True)
class Sample:
    first: object
    second: object


class Items(list):
    pass


class Points(tuple):
    pass


@pytest.mark.parametrize(
    "tree",
    [
        (1, 2),
        [1, 2],
        Items([1, 2]),
        {"b": 1, "a": 2},
        collections.OrderedDict(b=1, a=2),
        Pair(1, 2),
        Sample(1, 2),
        torch.return_types.max((1, 2)),
        [(1,), {"a": [2]}],
    ],
)
def test_nodes(tree):
    """Each leaf is replaced, in the order in which ``leaves`` gives them, and containers keep their types."""
    assert list(leaves(tree)) == [1, 2]
    found = iter("xy")
    mapped = map_leaves(lambda leaf: next(found), tree)
    assert type(mapped) is type(tree)
    assert list(leaves(mapped)) == ["x", "y"]
    assert list(leaves(tree)) == [1, 2]


@pytest.mark.parametrize("tree", [Points([1, 2]), torch.Size([1, 2]), os.stat("."), "ab", None, Pair])
def test_leaves(tree):
    """Tuples of other classes, texts and classes are mapped as they are."""
    assert map_leaves(lambda leaf: [leaf], tree) == [tree]
