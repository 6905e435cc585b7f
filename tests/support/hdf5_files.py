"""Writes HDF5 files of every layout, also with filters that the library of HDF5 lacks."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from tests.support.arrays import DTYPES

h5py = pytest.importorskip("h5py")
imagecodecs = pytest.importorskip("imagecodecs")
numcodecs = pytest.importorskip("numcodecs")

GZIP, SHUFFLE, FLETCHER32, LZF, BLOSC, LZ4, ZSTD = 1, 2, 3, 32000, 32001, 32004, 32015

PACK: dict[int, Callable[[bytes, int], bytes]] = {
    GZIP: lambda data, size: zlib.compress(data, 4),
    SHUFFLE: lambda data, size: np.frombuffer(data, np.uint8).reshape(-1, size).T.tobytes(),
    FLETCHER32: lambda data, size: data + imagecodecs.h5checksum_fletcher32(data).to_bytes(4, "little"),
    BLOSC: lambda data, size: numcodecs.Blosc("zstd", 3).encode(np.frombuffer(data, np.uint8)),
    LZ4: lambda data, size: imagecodecs.lz4h5_encode(data),
    ZSTD: lambda data, size: imagecodecs.zstd_encode(data),
}
"""What a filter does with the bytes of a chunk, whose values have a size."""


def pack(data: bytes, filters: Sequence[int], itemsize: int, left_out: int = 0) -> bytes:
    """Apply filters, but for those whose bits are set."""
    for at, number in enumerate(filters):
        if not left_out >> at & 1:
            data = PACK[number](data, itemsize)
    return data


def write_packed(
    file: Any,
    name: str,
    values: Any,
    chunks: Sequence[int],
    filters: Sequence[int],
    *,
    fill: Any = 0,
    masks: Sequence[int | None] = (0,),
) -> Any:
    """Write chunks that are packed here; ``masks``, in rotation: the filters left out, ``None`` for a missing chunk.

    Returns the values that the data set has.
    """
    known = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    known.set_chunk(tuple(chunks))
    known.set_fill_value(np.asarray(fill, values.dtype))
    for number in filters:
        if number == GZIP:
            known.set_deflate(4)
        elif number == SHUFFLE:
            known.set_shuffle()
        elif number == FLETCHER32:
            known.set_fletcher32()
        else:
            known.set_filter(number, h5py.h5z.FLAG_OPTIONAL, ())
    space, kind = h5py.h5s.create_simple(values.shape), h5py.h5t.py_create(values.dtype, logical=True)
    data = h5py.h5d.create(file.id, name.encode(), kind, space, known)
    expected = np.full(values.shape, fill, values.dtype)
    grid = itertools.product(*[range(0, size, chunk) for size, chunk in zip(values.shape, chunks, strict=True)])
    for start, mask in zip(grid, itertools.cycle(masks)):
        if mask is not None:
            place = tuple(slice(at, at + chunk) for at, chunk in zip(start, chunks, strict=True))
            whole, part = np.zeros(chunks, values.dtype), values[place]
            whole[tuple(map(slice, part.shape))] = expected[place] = part
            data.write_direct_chunk(start, pack(whole.tobytes(), filters, values.dtype.itemsize, mask), mask)
    return expected


@dataclass
class Layout:
    """How a data set is written.

    Args:
        kind: "chunked" by h5py; "packed" here, with ``filters`` and ``masks``; "contiguous", "compact" or "never".
        options: Arguments of ``create_dataset``.
        missing: Chunks of rows that are not written.
    """

    kind: str
    dtype: Any
    chunks: tuple[int, ...]
    fill: int
    filters: Sequence[int] = ()
    masks: Sequence[int | None] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    missing: Collection[int] = ()

    def write(self, file: Any, name: str, values: Any) -> Any:
        """Write values; returns those that the data set has, by h5py if that knows the filters."""
        if self.kind == "packed":
            found = write_packed(file, name, values, self.chunks, self.filters, fill=self.fill, masks=self.masks)
            return file[name][...] if GZIP in self.filters else found
        options = {"fillvalue": np.asarray(self.fill, self.dtype), **self.options}
        if self.kind == "compact":
            del options["fillvalue"]
            options["dcpl"] = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            options["dcpl"].set_layout(h5py.h5d.COMPACT)
        data = file.create_dataset(name, values.shape, self.dtype, **options)
        for at in range(0, len(values) if self.kind != "never" else 0, self.chunks[0]):
            if at // self.chunks[0] not in self.missing:
                data[at : at + self.chunks[0]] = values[at : at + self.chunks[0]]
        return data[...]


@st.composite
def layouts(draw: Any, shape: Sequence[int]) -> Layout:
    """Layouts of a data set."""
    kind = draw(st.sampled_from(["chunked", "packed", "contiguous", "compact", "never"]))
    chunks = tuple(draw(st.integers(1, size)) for size in shape)
    layout = Layout(kind, np.dtype(draw(st.sampled_from(DTYPES))), chunks, draw(st.sampled_from([0, 1])))
    if kind == "packed":
        compressor = draw(st.sampled_from([GZIP, BLOSC, LZ4, ZSTD]))
        layout.filters = [number for number in (SHUFFLE, compressor) if draw(st.booleans())]
        if draw(st.booleans()):
            layout.filters.insert(draw(st.integers(0, len(layout.filters))), FLETCHER32)
        masks = st.sampled_from([0, 0, None, *range(1, 2 ** len(layout.filters))])
        layout.masks = draw(st.lists(masks, min_size=1, max_size=4))
    if kind == "chunked":
        layout.missing = draw(st.sets(st.integers(0, 9), max_size=3))
        layout.options = {
            "chunks": chunks,
            "maxshape": (None, *shape[1:]),
            "compression": draw(st.sampled_from([None, "gzip", "lzf", 9])),
            "shuffle": draw(st.booleans()),
            "fletcher32": draw(st.booleans()),
        }
    return layout
