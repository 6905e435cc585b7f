"""Batch builders: batches equal those of torch's ``default_collate`` for samples of every kind."""

from __future__ import annotations

import collections
import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from aiofeed.kernel.core.errors import CollateError
from aiofeed.kernel.core.types import Row
from aiofeed.kernel.engine.fetch.collate import (
    CollateBatchBuilder,
    DefaultCollateBuilder,
    RowBatchBuilder,
    misfit_error,
)
from aiofeed.kernel.runtime.buffers import HostBufferPool
from aiofeed.kernel.runtime.tensors import as_tensors, stage


class Pair(NamedTuple):
    image: Any
    label: Any


SAMPLES: dict[str, Any] = {
    "tensor": lambda i: torch.full((2, 3), float(i)),
    "0-d tensor": lambda i: torch.tensor(i),
    "bfloat16": lambda i: torch.full((4,), i, dtype=torch.bfloat16),
    "bool tensor": lambda i: torch.tensor([i % 2 == 0, True]),
    "complex": lambda i: torch.tensor([complex(i, -i)]),
    "float16 array": lambda i: np.full((3,), i, np.float16),
    "array": lambda i: np.arange(6, dtype=np.int32).reshape(2, 3) + i,
    "non-contiguous array": lambda i: (np.arange(6).reshape(2, 3) + i).T,
    "non-contiguous tensor": lambda i: (torch.arange(6).reshape(2, 3) + i).T,
    "numpy scalar": lambda i: np.float32(i),
    "0-d array": lambda i: np.array(i),
    "int": lambda i: i,
    "negative int": lambda i: -i,
    "float": lambda i: i / 3,
    "bool": lambda i: i % 2 == 0,
    "int, then float": lambda i: i if i < 2 else i / 2,
    "str": lambda i: f"name {i}",
    "bytes": lambda i: bytes([i]),
    "tuple": lambda i: (torch.tensor([i]), i),
    "list": lambda i: [torch.tensor([i]), f"{i}"],
    "dict": lambda i: {"x": torch.tensor([i]), "y": {"z": i}},
    "ordered dict": lambda i: collections.OrderedDict(b=i, a=np.ones(2) * i),
    "namedtuple": lambda i: Pair(torch.tensor([i]), i),
    "nested": lambda i: ({"a": [torch.ones(2) * i, (i, "s")]}, Pair(i, [1.5 * i])),
    "requires_grad": lambda i: torch.full((2,), float(i), requires_grad=True),
    "arrays of mixed dtypes": lambda i: np.ones(2, (np.float32, np.float64, np.int64)[i % 3]) * i,
    "mixed dtypes": lambda i: torch.tensor([i]) if i % 2 else torch.tensor([i / 2]),
    "array, then tensor": lambda i: np.ones(2) * i if i < 2 else torch.ones(2, dtype=torch.float64) * i,
}


def built(samples: list[Any], order: list[int] | None = None) -> Any:
    builder = DefaultCollateBuilder(len(samples), HostBufferPool(keep=2))
    for position in order or range(len(samples)):
        builder.put(position, samples[position])
    return as_tensors(builder.finish([f"key {i}" for i in range(len(samples))]))


def same(got: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(got, wanted)
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted)
        for name in wanted:
            same(got[name], wanted[name])
    elif isinstance(wanted, tuple | list):
        assert type(got) is type(wanted)
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            same(one, other)
    else:
        assert got == wanted


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("order", [None, [3, 1, 4, 0, 2]], ids=["in order", "out of order"])
def test_a_batch_is_what_default_collate_gives(kind: str, order: list[int] | None) -> None:
    """Types, dtypes, shapes and values are those of ``default_collate``, in whatever order samples arrive."""
    samples = [SAMPLES[kind](i) for i in range(5)]
    same(built(samples, order), default_collate(samples))


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([torch.ones(3), torch.ones(4)], r"shapes \[3\] and \[4\].*'key 0' and 'key 1'"),
        ([torch.ones(3), torch.ones(3), torch.ones(3, 1)], r"shapes \[3\] and \[3, 1\].*'key 0' and 'key 2'"),
        ([(1, 2), (1, 2, 3)], "one has 2 parts, another 3"),
        ([{"a": 1}, {"b": 1}], "one has the key 'a', another has only"),
        ([{"a": 1}, 3], "one is a dict, another an int"),
        ([None, None], r"one is None \('key 0'\)"),
        ([torch.ones(2), None], r"one is None \('key 1'\)"),
        ([torch.ones(2), "text"], "one is a Tensor, another a str.*'key 0' and 'key 1'"),
        ([torch.ones(2), Image.new("L", (1, 1))], "one is an Image, a PIL image.*numpy.asarray.*'key 1'"),
        ([1, 1 << 70], "int64"),
    ],
)
def test_samples_that_do_not_fit_together_are_named(samples: list[Any], message: str) -> None:
    """A ``CollateError`` names shapes, keys and what to change."""
    builder = DefaultCollateBuilder(len(samples), HostBufferPool(keep=2))
    keys = [f"key {i}" for i in range(len(samples))]

    def attempt() -> None:
        for position, sample in enumerate(samples):
            try:
                builder.put(position, sample)
            except Exception as error:
                raise misfit_error(error, keys[position]) or error from None
        builder.finish(keys)

    with pytest.raises(CollateError, match=message) as caught:
        attempt()
    assert "collate_fn=" in str(caught.value)


@pytest.mark.parametrize(
    "samples",
    [
        [{"a": 1.0}, np.float64(1), np.float64(2)],
        [{"a": 1, "b": 2}, {"a": 1}, {"a": 1}],
        [{"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2}],
        [(1, 2), [1, 2], Pair(1, 2)],
        [Pair(1, np.ones(2)), (1, np.ones(2)), (1, np.ones(2))],
        [(1, 2), 3, (1, 2)],
        [np.array(1.0), 2.0, np.float64(3)],
        [np.ones(2), np.ones(2, np.float32), np.ones(2, np.float32)],
        [np.ones(2), 1.0, "text"],
        [{"a": np.ones(2)}, {"a": 1}, {"a": {"b": 1}}],
    ],
)
def test_the_order_of_arrival_decides_nothing(samples: list[Any]) -> None:
    """The batch is ``default_collate``'s, or the error a ``CollateError``, whichever sample arrives first."""
    try:
        wanted = default_collate(samples)
    except Exception:
        wanted = None
    for order in itertools.permutations(range(3)):
        if wanted is None:
            with pytest.raises(CollateError):
                built(samples, list(order))
        else:
            same(built(samples, list(order)), wanted)


def test_a_sample_of_another_structure_may_use_its_memory_again() -> None:
    """It is copied when it arrives, as the others are."""
    memory = np.zeros(2)
    builder = DefaultCollateBuilder(3, HostBufferPool(keep=2))
    for position, sample in enumerate([(1, memory), [1, memory], [1, memory]]):
        memory[:] = position
        builder.put(position, sample)
    assert as_tensors(builder.finish("abc"))[1].tolist() == [[0, 0], [1, 1], [2, 2]]


LACKING = [
    np.zeros(3, np.longdouble), np.zeros(3, np.clongdouble), np.zeros(3, "M8[s]"), np.zeros(3, "m8[s]"),
    np.zeros(3, [("a", "i4")]), np.zeros(3, "V4"), np.array(["a"]), np.array([b"a"]), np.array([{}], object),
    np.zeros(3, np.dtype(np.uint16).newbyteorder()), np.longdouble(1), np.datetime64(0, "s"),
    np.zeros(1, [("a", "i4")])[0],
]  # fmt: skip


@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: (value, 1), lambda value: {"x": value}])
@pytest.mark.parametrize("value", LACKING, ids=lambda value: f"{type(value).__name__} {value.dtype}")
def test_a_dtype_that_torch_lacks_is_named(value: Any, wrap: Any) -> None:
    """It is one error, a ``CollateError`` that names the dtype and a sample."""
    with pytest.raises(CollateError, match=r"has the dtype .*, which torch lacks.*'key 0'"):
        built([wrap(value)] * 2)
    as_target = RowBatchBuilder(Row((2,), "float32"), 2, HostBufferPool(keep=2), targets=True)
    for position in range(2):
        as_target.put(position, wrap(value))
    with pytest.raises(CollateError, match="which torch lacks"):
        as_target.finish(["a", "b"])


def test_a_coroutine_in_a_batch_is_an_error_that_says_so() -> None:
    """A decoder that is an ``async def`` returns coroutines."""

    async def sample() -> int:
        return 1

    builder = DefaultCollateBuilder(1, HostBufferPool(keep=2))
    one = sample()
    builder.put(0, one)
    with pytest.raises(CollateError, match=r"one is a coroutine.*'key 0'"):
        builder.finish(["key 0"])
    one.close()


def test_rows_filled_in_place_become_the_batch() -> None:
    """The rows that a decoder fills are the batch: [N, 3, H, W] in channels_last, with targets beside it."""
    builder = RowBatchBuilder(Row((2, 4, 3), "uint8", (2, 0, 1)), 5, HostBufferPool(keep=1), targets=True)
    for position in range(5):
        builder.rows[position] = position
        builder.put(position, position * 10)
    images, labels = as_tensors(builder.finish([]))
    assert images.shape == (5, 3, 2, 4)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert [int(image.float().mean()) for image in images] == [0, 1, 2, 3, 4]
    assert labels.tolist() == [0, 10, 20, 30, 40]


def test_collate_fn_gets_the_samples_in_order() -> None:
    """A user's ``collate_fn`` gets a list of samples and makes the batch."""
    builder = CollateBatchBuilder(3, tuple, HostBufferPool(0), staged=False)
    for position in (2, 0, 1):
        builder.put(position, f"sample {position}")
    assert builder.finish(["a", "b", "c"]) == ("sample 0", "sample 1", "sample 2")


def test_a_failing_collate_fn_is_named() -> None:
    """Its error is chained to a ``CollateError`` that names the samples."""

    def broken(samples: list[Any]) -> Any:
        raise ZeroDivisionError("oops")

    builder = CollateBatchBuilder(1, broken, HostBufferPool(0), staged=False)
    builder.put(0, 1)
    with pytest.raises(CollateError, match=r"collate_fn raised ZeroDivisionError: oops.*'only\.jpg'") as caught:
        builder.finish(["only.jpg"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24).reshape(2, 3, 4),
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.rand(6, 4)[:, ::2],
        torch.rand(3).to(torch.bfloat16),
        torch.tensor(3.5),
        torch.rand(4, 1).expand(4, 3),
    ],
)
def test_staging_moves_a_tensor_and_changes_nothing(tensor: torch.Tensor) -> None:
    """A staged tensor has the values, dtype and, if dense, the memory order of the original."""
    staged, nbytes = stage({"t": [tensor, "text"]}, HostBufferPool(keep=1))
    back = as_tensors(staged)["t"]
    same(back[0], tensor)
    assert back[1] == "text"
    assert nbytes == tensor.numel() * tensor.element_size()
    assert back[0].data_ptr() != tensor.data_ptr()
    if tensor.dim() == 4:
        assert back[0].is_contiguous(memory_format=torch.channels_last)


def test_sparse_tensors_of_a_collate_fn_stay_unchanged() -> None:
    """Their bytes, which torch does not report, are not counted."""
    builder = CollateBatchBuilder(
        2, lambda samples: [torch.eye(2).to_sparse(), torch.zeros(3)], HostBufferPool(0), staged=False
    )
    for position in range(2):
        builder.put(position, position)
    batch, _ = builder.finish(["a", "b"])
    assert batch.layout is torch.sparse_coo
    assert builder.nbytes == 12
