"""Trees of leaves: which classes are nodes."""

import collections
import dataclasses
import os
import typing

import pytest
import torch

from aiofeed.kernel.core.pytree import is_flat_plain, leaves, map_leaves, total_nbytes


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


@pytest.mark.parametrize(
    ("tree", "nbytes"),
    [
        ([1, "ab", b"c", None, 2.5, True], 0),
        ([{"a": 1, "b": "x"}, {"a": 2, "b": "y"}], 0),
        ([{"a": 1}, {"a": torch.zeros(3)}], 12),
        ([{"a": [torch.zeros(2), {"b": torch.zeros(1)}]}, (torch.zeros(3), 1)], 24),
        ({"a": {"b": torch.zeros(2)}, "c": ["x"] * 3}, 8),
        ([collections.OrderedDict(a=torch.zeros(1)), Sample(torch.zeros(1), Pair(1, torch.zeros(1)))], 12),
        ([], 0),
        ({}, 0),
        (torch.zeros(5), 20),
    ],
)
def test_total_nbytes(tree, nbytes):
    """The bytes of all arrays and tensors, wherever they are."""
    assert total_nbytes(tree) == nbytes


def test_flat_plain():
    """A built-in container of numbers and strings, and nothing else."""
    assert all(map(is_flat_plain, [(), [1, "a"], {"a": None}, (b"x", 2.5, True)]))
    assert not any(map(is_flat_plain, [1, "a", [[1]], {"a": torch.zeros(1)}, Items([1]), Pair(1, 2)]))
