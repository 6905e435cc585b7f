"""Torch's own test cases of ``DataLoader``, for ``aiofeed.DataLoader``: the types of batches."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from aiofeed import DataLoader
from tests.support.loader_parts import Pair, Plain, both, same

DATA = torch.randn(50, 2, 3, 5)
LABELS = torch.randperm(25).repeat(2)
PAIRS = TensorDataset(DATA, LABELS)

pytestmark = pytest.mark.filterwarnings(
    # The number of workers exceeds the number of cores of small machines.
    "ignore:This DataLoader will create:UserWarning"
)


# --- types ---


class Tagged(torch.Tensor):
    pass


class CustomList(list[Any]):
    pass


class CustomDict(dict[str, Any]):
    pass


class Wrapped:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Wrapped) and same(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.label = "a label"  # type: ignore[attr-defined]
    return tensor


LARGE = torch.arange(300_000.0).reshape(600, 500)


def items_of_all_types() -> dict[str, Any]:
    return {
        "float": torch.randn(3),
        "bfloat16": torch.randn(40_000).bfloat16(),
        "bool": torch.tensor([True, False]),
        "float8": torch.randn(30).to(torch.float8_e4m3fn),
        "uint16": torch.ones(3).to(torch.uint16),
        "complex": torch.randn(3, dtype=torch.complex128),
        "nan and minus zero": torch.tensor([float("nan"), -0.0]),
        "large": LARGE,
        "empty": torch.empty(0, 3),
        "empty with a stride": torch.empty(4, 0).T,
        "scalar": torch.tensor(3),
        "row of a large one": LARGE[3],
        "column of a large one": LARGE[:, 3],
        "block of a large one": LARGE[10:300, 7:400],
        "transposed": torch.randn(400, 90).T,
        "channels last": torch.randn(2, 3, 40, 40).to(memory_format=torch.channels_last),
        "expanded": torch.zeros(2000, 1).expand(2000, 500),
        "overlapping": torch.as_strided(torch.arange(3000.0), (1000, 3), (1, 1)),
        "strided": torch.as_strided(torch.arange(30000.0), (1000, 10), (20, 2)),
        "offset": torch.arange(30000.0)[5:],
        "requires_grad": torch.randn(3, requires_grad=True),
        "large, requires_grad": torch.randn(300, 300, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.randn(300, 300)),
        "conj": torch.randn(300, 3, dtype=torch.cfloat).conj(),
        "neg": torch.randn(300, dtype=torch.cfloat).conj().imag,
        "sparse": torch.eye(4).to_sparse(),
        "csr": torch.eye(4).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(3), torch.zeros(20_000)]),
        "jagged": torch.nested.nested_tensor([torch.ones(3), torch.zeros(2)], layout=torch.jagged),
        "subclass": torch.randn(3).as_subclass(Tagged),
        "large subclass": torch.randn(300, 300).as_subclass(Tagged),
        "attribute": with_attribute(torch.zeros(30_000)),
        "subclass with an attribute": with_attribute(torch.zeros(30_000).as_subclass(Tagged)),
        "packed sequence": torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
        "array": np.random.rand(3),
        "large array": np.random.rand(300, 300),
        "Fortran order": np.asfortranarray(np.random.rand(300, 300)),
        "not contiguous": np.random.rand(300, 300)[::2, ::3],
        "objects": np.array([1, "a", None], object),
        "strings": np.array(["ab", "c"]),
        "record": Wrapped(np.zeros(3, dtype=[("a", "i4"), ("b", "f8")])),
        "NumPy scalar": np.float32(3),
        "date": Wrapped(np.datetime64("2020-01-01")),
        "text": "text",
        "bytes": b"ab" * 90_000,
        "bytearray": bytearray(b"ab" * 90_000),
        "None": None,
        "int": 3,
        "set": {1, 2},
        "namedtuple": Pair(torch.randn(3), "a"),
        "ordered": collections.OrderedDict(a=torch.ones(2)),
        "default": collections.defaultdict(list, a=[1]),
        "Counter": collections.Counter("abracadabra"),
        "deque": collections.deque([1, 2]),
        "custom list": CustomList([1, 2]),
        "custom dict": CustomDict(a=1),
        "object": Wrapped(torch.ones(90_000)),
        "size": torch.Size([1, 2]),
        "dtype": torch.float32,
    }


def only(batch: Any) -> Any:
    return batch[0]


def as_list(batch: Any) -> Any:
    return batch


@pytest.mark.filterwarnings("ignore:.*sparse:UserWarning", "ignore:.*nested tensors:UserWarning", "ignore:Sparse")
def test_types_arrive_as_from_torch() -> None:
    """A batch of any type arrives from a worker as from torch's: type, dtype, strides, flags and bits."""
    items = items_of_all_types()
    for options in ({"batch_size": None}, {"batch_size": 2, "collate_fn": as_list}):
        theirs, ours = both(lambda cls: list(cls(Plain(list(items.values())), num_workers=1, **options)))  # noqa: B023
        names = list(items) if options["batch_size"] is None else range(len(theirs))
        for name, one, other in zip(names, theirs, ours, strict=True):
            assert same(one, other), name


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "items",
    [
        [("1", 0), ("2", 1), ("3", 2)],
        [{"a": torch.full((4, 2), index), "b": {"c": index}} for index in range(3)],
        [Pair(index, torch.ones(3)) for index in range(3)],
        [np.float16(1), np.float16(2), np.float16(3)],
        [np.int8(1), np.int8(2), np.int8(3)],
        [np.ones((2, 3)) * index for index in range(3)],
        [CustomList([1, torch.ones(2)]), CustomList([2, torch.ones(2)])],
        [CustomDict(a=1.0, b="x"), CustomDict(a=2.0, b="y")],
        [collections.OrderedDict(b=1, a=2), collections.OrderedDict(b=3, a=4)],
        [torch.randn(2).as_subclass(Tagged) for _ in range(3)],
        [True, False],
        [1.5, 2.5],
        [b"one", b"two"],
        [torch.randn(300, 300) for _ in range(3)],
        [(torch.randn(0, 2), [[]]) for _ in range(2)],
        [torch.randn(4, 5).T for _ in range(3)],
    ],
)
def test_collation_is_torchs(items: Any, workers: int) -> None:
    """``default_collate`` gives the types, dtypes and strides that it gives in torch's loader."""
    theirs, ours = both(lambda cls: list(cls(Plain(items), 2, num_workers=workers)))
    assert same(ours, theirs)


class Aliases(Plain):
    def __getitem__(self, index: int) -> Any:
        large, small = torch.zeros(30_000), torch.zeros(8)
        return {
            "same": (large, large),
            "view": (large.view(300, 100), large),
            "part first": (torch.zeros(1), large[:3], large),
            "part last": (large, large[100:103]),
            "small": (small, small[2:4]),
        }


def test_tensors_of_a_batch_that_share_memory() -> None:
    """Tensors that share memory in the worker share it here."""
    for item in DataLoader(Aliases(2), None, num_workers=1):
        large = item["same"][0]
        large.fill_(1)
        assert item["same"][1] is large
        assert all(bool((each == 1).all()) for each in (*item["view"], *item["part last"], *item["part first"][1:]))
        item["small"][0].fill_(1)
        assert item["small"][1].tolist() == [1, 1]


def test_a_view_of_a_large_storage_does_not_send_all_of_it() -> None:
    """A row of a large table arrives with the row's memory only."""
    for row in DataLoader(Plain(list(torch.zeros(400, 50_000))), None, num_workers=1, sampler=[7, 8]):
        assert row.untyped_storage().nbytes() <= 4 * 50_000


def test_batches_can_be_written() -> None:
    """Tensors and arrays of a batch are writable; what is written stays in that batch."""
    items = [(torch.zeros(size), np.zeros(size)) for size in (3, 2000, 90_000)]
    for _, array in items:
        array.flags.writeable = False
    batches = list(DataLoader(Plain(items), 1, num_workers=1, collate_fn=only))
    for tensor, array in batches:
        tensor += 1
        array += 1
    for tensor, array in batches:
        assert (float(tensor.sum()), float(array.sum())) == (len(tensor), len(array))
