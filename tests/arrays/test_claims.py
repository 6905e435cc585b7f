"""Metadata that claim more than a file has: the size of what is claimed costs neither time nor memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiofeed
from aiofeed.arrays.fields import MOST_SHARDS
from aiofeed.kernel.runtime.buffers import HostBufferPool

h5py = pytest.importorskip("h5py")
pytest.importorskip("zarr", minversion="3")


def zarr2(folder: Path, shape: list[int], chunks: list[int], **more: Any) -> str:
    """The metadata of an array without chunks."""
    document = {"zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": "<f8", "compressor": None}
    folder.joinpath("a.zarr").mkdir()
    document |= {"fill_value": 0, "order": "C", "filters": None, **more}
    folder.joinpath("a.zarr", ".zarray").write_text(json.dumps(document))
    return str(folder / "a.zarr")


def zarr3(folder: Path, shape: list[int], chunks: list[int], **sharding: Any) -> str:
    """The same in version 3, also with shards."""
    codecs: list[Any] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if sharding:
        inner = {"chunk_shape": chunks, "codecs": codecs, "index_codecs": codecs, "index_location": "end"}
        codecs, chunks = [{"name": "sharding_indexed", "configuration": inner}], sharding["shards"]
    document: dict[str, Any] = {"zarr_format": 3, "node_type": "array", "shape": shape, "data_type": "float64"}
    document["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": chunks}}
    document["chunk_key_encoding"] = {"name": "default", "configuration": {"separator": "/"}}
    document |= {"fill_value": 0, "codecs": codecs, "attributes": {}}
    folder.joinpath("a.zarr").mkdir()
    folder.joinpath("a.zarr", "zarr.json").write_text(json.dumps(document))
    return str(folder / "a.zarr")


def hdf5(folder: Path, shape: list[int], chunks: Any = None, dtype: Any = "f8") -> str:
    """A data set without chunks, or contiguous and never written."""
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", tuple(shape), dtype, chunks=chunks and tuple(chunks))
    return f"{folder}/a.h5::x"


OPENED: dict[str, tuple[Callable[[Path], str], dict[str, Any]]] = {
    "Zarr 2": (lambda folder: zarr2(folder, [1 << 40, 4], [1 << 20, 4]), {}),
    "Zarr 3": (lambda folder: zarr3(folder, [1 << 40], [1]), {}),
    "Zarr, shards": (lambda folder: zarr3(folder, [1 << 40], [1 << 10], shards=[1 << 30]), {}),
    "Zarr, a million chunks": (lambda folder: zarr2(folder, [10**12], [10**6]), {}),
    "Zarr, tiles": (lambda folder: zarr2(folder, [1 << 20, 1 << 20], [1, 16]), {"tile": {1: 2}}),
    "Zarr, all axes": (lambda folder: zarr2(folder, [1 << 18] * 3, [1] * 3), {"sample": (0, 1, 2)}),
    "HDF5": (lambda folder: hdf5(folder, [1 << 40, 4], [1 << 20, 4]), {}),
    "HDF5, small chunks": (lambda folder: hdf5(folder, [1 << 50], [1]), {}),
    "HDF5, a grid": (lambda folder: hdf5(folder, [1 << 24, 1 << 24], [1, 1]), {"tile": {1: 1}}),
    "HDF5, contiguous": (lambda folder: hdf5(folder, [1 << 50]), {}),
}


@pytest.mark.parametrize("name", OPENED)
def test_arrays_that_claim_many_samples(name: str, tmp_path: Path) -> None:
    """They are opened in the memory of the shards, of which there are few, and their samples have the fill value."""
    make, arguments = OPENED[name]
    path = make(tmp_path)
    aiofeed.Arrays({"x": np.zeros(4)})  # imports what is needed
    tracemalloc.start()
    source = aiofeed.Arrays({"x": path}, **arguments)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(source) >= 10**12 // 2
    assert len(source.shard_starts) <= MOST_SHARDS + 1
    assert peak < 16 * 8 * MOST_SHARDS
    last = len(source) - 1
    chosen = np.array([0, last // 2, last])
    for place, number in zip(*source.new_gathered(chosen, HostBufferPool(0), None).shards, strict=True):
        array, chunk, bounds = source._sources[0].find(int(number))
        first = source.position(int(chosen[place]))[0]
        assert bounds[0][0] <= first < bounds[0][1]
        assert not array.decode(array.read_now(chunk), chunk).any()


REFUSED: dict[str, tuple[Callable[[Path], str], str]] = {
    "Zarr, more than int64": (lambda folder: zarr2(folder, [10**30], [10**6]), r"a\.zarr claims 10{24} chunks"),
    "Zarr, samples": (lambda folder: zarr2(folder, [1 << 60], [1 << 20]), r"a\.zarr claims .* the shape \[1152921"),
    "Zarr 2, axes": (lambda folder: zarr2(folder, [1] * 100_000, [1] * 100_000), "claims 100000 axes"),
    "Zarr 3, axes": (lambda folder: zarr3(folder, [1] * 100_000, [1] * 100_000), "claims 100000 axes"),
    "Zarr, 60 axes": (lambda folder: zarr2(folder, [2] * 60, [1] * 60), r"a\.zarr claims 1152921504606846976 chunks"),
    "HDF5, samples": (lambda folder: hdf5(folder, [1 << 62], [1 << 10]), r"a\.h5::x claims .* the shape"),
    "HDF5, texts": (
        lambda folder: hdf5(folder, [1 << 30], [1 << 10], h5py.string_dtype()), r"a\.h5::.*x claims 64\.0 GiB in memory"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_arrays_that_claim_too_much(name: str, tmp_path: Path) -> None:
    """What no index can number, and texts that would have to be listed, are refused by name."""
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        aiofeed.Arrays({"x": make(tmp_path)})


@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_row_starts_that_claim_too_much(chunk: int, tmp_path: Path) -> None:
    """The rows of a sparse matrix of which no chunk is stored are refused before they are listed."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": [(1 << 40) - 1, 3]})
        group.create_dataset("indptr", (1 << 40,), "i8", chunks=(chunk,))
        group.create_dataset("data", (0,), "f4", maxshape=(None,))
        group.create_dataset("indices", (0,), "i4", maxshape=(None,))
    with pytest.raises(ValueError, match=r"a\.h5::X: its rows do not fit its values: it is damaged"):
        aiofeed.Arrays({"x": f"{tmp_path}/a.h5::X"})


def test_a_sample_of_a_long_axis_is_not_listed(tmp_path: Path) -> None:
    """A window of all positions of an axis is one run, however long it is."""
    source = aiofeed.Arrays({"x": hdf5(tmp_path, [4, 1 << 44], [1, 1 << 16])})
    assert len(source) == 4
    with aiofeed.Feeder(source, batch_size=2) as feeder, pytest.raises(MemoryError, match="no memory for 2814749767"):
        next(iter(feeder))
