"""Tests of the faces: what a user passes is adapted once, with each member that it has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiofeed
from aiofeed.cache.layout import pack_record, unpack_record
from aiofeed.kernel.core.faces import BaseCache, BaseSource, adapt_source, passes_on
from aiofeed.kernel.runtime.tensors import is_plain
from aiofeed.kernel.sources.file_io import Content
from aiofeed.kernel.sources.subset import IndexedSource


class Letters:
    """A source with three methods."""

    def __len__(self) -> int:
        return 3

    def key(self, index: int) -> str:
        return f"letter {index}"

    async def read(self, index: int) -> bytes:
        return b"abc"[index : index + 1]


def batches(source: Any, **options: Any) -> list[int]:
    with aiofeed.Feeder(source, decode=ord, batch_size=3, **options) as feeder:
        return [sample for batch in feeder for sample in batch.tolist()]


@pytest.mark.parametrize("name", ["target", "fingerprint", "open", "aclose"])
def test_a_member_that_is_no_method_is_refused_by_name(name: str) -> None:
    """A feeder refuses a source whose attribute has the name of a method that it calls, before the first batch."""
    source = type("Labelled", (Letters,), {name: "label"})()
    with pytest.raises(TypeError, match=f"Labelled.{name} must be a method, got 'label'"):
        aiofeed.Feeder(source, decode=ord, batch_size=3)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"looks_ahead": True}, "Odd.looks_ahead needs nbytes"),
        ({"looks_ahead": True, "nbytes": lambda self, index: 1}, "Odd.looks_ahead needs nbytes"),
        ({"open": lambda self: None}, "Odd.open must be an async method"),
        ({"fingerprint": lambda self: 3}, "Odd.fingerprint.* must return a str, got 3"),
    ],
)
def test_a_member_that_cannot_work_is_refused_by_name(members: dict[str, Any], words: str) -> None:
    """A source whose optional member lacks another one, or returns something else, is refused with its name."""
    source = type("Odd", (Letters,), members)()
    with pytest.raises(TypeError, match=words), aiofeed.Feeder(source, decode=ord, batch_size=3) as feeder:
        next(iter(feeder))
        feeder.state_dict()


@pytest.mark.parametrize("name", ["__len__", "key", "read"])
def test_a_source_of_the_base_class_lacks_a_method(name: str) -> None:
    """The error of a method that is missing says which one."""
    members = {each: vars(Letters)[each] for each in {"__len__", "key", "read"} - {name}}
    with pytest.raises((NotImplementedError, aiofeed.errors.ReadError), match=f"Short needs a method .*{name}"):
        batches(type("Short", (BaseSource,), members)(), keys=True)


@pytest.mark.parametrize("base", [BaseSource, IndexedSource, object])
@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"slots": True}])
def test_a_dataclass_without_a_hash_is_a_source(base: type, options: dict[str, bool]) -> None:
    """A source may be a dataclass that has no hash, and so may its cache."""
    members = {name: vars(Letters)[name] for name in ("__len__", "key", "read")}
    kind = dataclass(**options)(type("Kept", (base,), {**members, "__annotations__": {"data": list}}))

    @dataclass
    class Cache(BaseCache):
        data: dict[int, bytes]

        def wrap(self, source: BaseSource) -> BaseSource:
            return source

    assert batches(kind([1]), cache=Cache({})) == [*b"abc"]


def test_a_wrapper_passes_members_on_without_a_method_for_it() -> None:
    """``passes_on`` needs no ``_passed``: members are then those of the whole source."""

    @passes_on
    class Wrapper(BaseSource):
        def __init__(self, whole: BaseSource) -> None:
            self.whole = whole

        def __len__(self) -> int:
            return len(self.whole)

    class Named(Letters, BaseSource):
        def fingerprint(self) -> str:
            return "letters"

    assert batches(Wrapper(Named())) == [*b"abc"]
    assert Wrapper(Named()).fingerprint() == "letters"


@pytest.mark.parametrize("wrapped", [False, True])
def test_contents_of_any_source_are_compared_from_the_first_epoch_on(tmp_path: Path, wrapped: bool) -> None:
    """A state identifies the files of a source with ``content_parts`` as they were when its epoch began."""
    path = tmp_path / "data"
    path.write_bytes(b"before")

    class Filed(Letters):
        def content_parts(self) -> list[Content]:
            return [Content(str(path))]

    def states() -> tuple[Any, Any]:
        source: Any = Filed()
        if wrapped:
            source = passes_on(type("Wrapper", (BaseSource,), {"__len__": lambda self: 3}))()
            source.whole = adapt_source(Filed())
        with aiofeed.Feeder(source, decode=ord, batch_size=3) as feeder:
            iterator = iter(feeder)
            begun = vars(feeder._session).get("fingerprint")
            next(iterator)
            return begun, feeder._session.fingerprint

    begun, later = states()
    assert begun is not None
    assert begun == later


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8, torch.bfloat16])
def test_a_sample_of_one_element_without_strides_is_packed(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A record keeps a tensor of one element, whatever its strides are."""
    tensor = torch.ones(3, dtype=dtype).as_strided(shape, (0,) * len(shape), 1)
    assert torch.equal(unpack_record(pack_record(("name", tensor)))[1], tensor)


@pytest.mark.parametrize("char", "?bBhHiIlLqQefdgFDGOSUMm")
def test_a_plain_dtype_is_one_that_torch_has(char: str) -> None:
    """``is_plain`` is true for the dtypes of which torch makes tensors."""
    try:
        torch.from_numpy(np.zeros(1, np.dtype(char)))
        found = True
    except TypeError:
        found = False
    assert is_plain(np.dtype(char)) == found


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (lambda: aiofeed.Tensors(torch.arange(4)), {"key", "split", "tensors"}),
        (lambda: aiofeed.Tensors(torch.arange(4))[:2], {"key", "split"}),
        (lambda: aiofeed.Files(["a.jpg"]), {"key", "split", "paths", "targets", "read"}),
        (lambda: aiofeed.Files(["a.jpg", "b.jpg"])[:1], {"key", "split"}),
        (lambda: aiofeed.FromDataset([1, 2]), {"key", "dataset"}),
        (lambda: aiofeed.Mixture({"a": aiofeed.Files(["a.jpg"])}), {"key", "names"}),
        (lambda: aiofeed.Stream([1]), {"length"}),
        (lambda: aiofeed.Buckets([1, 2], [2], [1, 1]), {"boundaries", "batch_sizes"}),
        (lambda: aiofeed.DiskCache("train.cache"), {"path", "max_bytes", "verify"}),
        (lambda: aiofeed.Feeder([1, 2], batch_size=1), {"epochs", "statistics", "explain"}),
    ],
)
def test_completion_shows_no_members_for_the_kernel(made: Any, shown: set[str]) -> None:
    """Of a source, a plan, a cache and a feeder it shows what programs use."""
    found = set(dir(made()))
    assert shown <= found
    inner = {
        "adopted",
        "traits",
        "given",
        "gathered",
        "in_pieces",
        "for_memory",
        "facts",
        "excluded",
        "new_lister",
        "wrap",
    }
    assert not found & inner
