"""Damaged chunks: an error that names the file and the chunk, or exactly the samples that need it are left out."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiofeed
from aiofeed.errors import ReadError
from tests.support.hdf5_files import BLOSC, FLETCHER32, GZIP, LZ4, SHUFFLE, ZSTD, pack

zarr = pytest.importorskip("zarr", minversion="3")
numcodecs = pytest.importorskip("numcodecs")
h5py = pytest.importorskip("h5py")
imagecodecs = pytest.importorskip("imagecodecs")

ROWS, CHUNK = 16, 4
VALUES = np.arange(ROWS * 64, dtype="<i4").reshape(ROWS, 64)
WINDOW = range(-1, 1)
# The second chunk has the rows 4 to 7, which the windows that end at 4 to 8 need.
WHOLE = [1, 2, 3, 9, 10, 11, 12, 13, 14, 15]

Spoil = Callable[[bytes], bytes]


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    """One bit in the middle, which only a checksum notices, or decompression."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def zarr_array(folder: Path, spoil: Spoil, **options: Any) -> str:
    """An array whose second chunk is spoiled."""
    path = folder / "a.zarr" / "x"
    options = {"zarr_format": 3, "chunks": (CHUNK, 64), **options}
    zarr.create_array(path, shape=VALUES.shape, dtype=VALUES.dtype, **options)[...] = VALUES
    name = "c/1/0" if options["zarr_format"] == 3 else "1.0"
    if "shards" in options:
        name = "c/0/0"
    (path / name).write_bytes(spoil((path / name).read_bytes()))
    return str(path)


def hdf5_array(folder: Path, spoil: Spoil, filters: list[int]) -> str:
    """An array whose second chunk is spoiled."""
    with h5py.File(folder / "a.h5", "w") as file:
        known = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        known.set_chunk((CHUNK, 64))
        for number in filters:
            known.set_filter(number, h5py.h5z.FLAG_OPTIONAL, (4,))
        space, kind = h5py.h5s.create_simple(VALUES.shape), h5py.h5t.py_create(VALUES.dtype)
        data = h5py.h5d.create(file.id, b"x", kind, space, known)
        for at in range(0, ROWS, CHUNK):
            packed = pack(VALUES[at : at + CHUNK].tobytes(), filters, 4)
            data.write_direct_chunk((at, 0), spoil(packed) if at == CHUNK else packed)
    return f"{folder / 'a.h5'}::x"


def second_of_shard(data: bytes) -> bytes:
    """Spoil the second chunk of a shard, which the index at the end names."""
    index = np.frombuffer(data[-4 - 16 * 4 : -4], "<u8").reshape(4, 2)
    start, size = index[1].tolist()
    return data[:start] + bytes([data[start] ^ 255]) * size + data[start + size :]


V2: dict[str, Any] = {
    "blosc": numcodecs.Blosc(), "bz2": numcodecs.BZ2(), "gzip": numcodecs.GZip(), "lz4": numcodecs.LZ4(),
    "lzma": numcodecs.LZMA(), "none": None, "zlib": numcodecs.Zlib(), "zstd": numcodecs.Zstd(),
    "raw lzma": numcodecs.LZMA(3, filters=[{"id": 33}]),
}  # fmt: skip
V3: dict[str, Any] = {
    "blosc": zarr.codecs.BloscCodec(), "gzip": zarr.codecs.GzipCodec(), "zstd": zarr.codecs.ZstdCodec(), "none": None,
    "crc32c": zarr.codecs.Crc32cCodec(),
}  # fmt: skip
HDF5 = {
    "blosc": [BLOSC], "fletcher32": [FLETCHER32], "gzip": [GZIP], "gzip, shuffle": [SHUFFLE, GZIP], "lz4": [LZ4],
    "none": [], "zstd": [ZSTD], "zstd, fletcher32": [ZSTD, FLETCHER32],
}  # fmt: skip
DAMAGED: dict[str, Callable[[Path], str]] = {
    **{
        f"Zarr 2, {name}": lambda folder, codec=codec: zarr_array(folder, half, zarr_format=2, compressors=codec)
        for name, codec in V2.items()
    },
    **{
        f"Zarr 3, {name}": lambda folder, codec=codec: zarr_array(folder, half, compressors=codec)
        for name, codec in V3.items()
    },
    **{
        f"HDF5, {name}": lambda folder, filters=filters: hdf5_array(folder, half, filters)
        for name, filters in HDF5.items()
    },
    "Zarr 2, empty": lambda folder: zarr_array(folder, lambda data: b"", zarr_format=2),
    "Zarr 3, more": lambda folder: zarr_array(folder, lambda data: data * 2, compressors=None),
    "Zarr 3, crc32c, a bit": lambda folder: zarr_array(folder, flipped, compressors=V3["crc32c"]),
    "Zarr 3, shard": lambda folder: zarr_array(folder, second_of_shard, shards=(ROWS, 64)),
    "HDF5, gzip, a bit": lambda folder: hdf5_array(folder, flipped, [GZIP]),
    "HDF5, fletcher32, a bit": lambda folder: hdf5_array(folder, flipped, [SHUFFLE, FLETCHER32]),
}


def rows_of(feeder: Any) -> list[int]:
    """The rows of samples, which are correct."""
    found = []
    for batch in feeder:
        for x in batch["x"].numpy():
            row = int(x[-1, 0]) // 64
            assert np.array_equal(x, VALUES[row - 1 : row + 1])
            found.append(row)
    return found


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_chunk(name: str, tmp_path: Path) -> None:
    """It is named, with its file; a policy leaves out the samples that need it, or takes others in their places."""
    path = DAMAGED[name](tmp_path)
    source = aiofeed.Arrays({"x": path}, window=WINDOW)
    with aiofeed.Feeder(source, batch_size=3) as feeder, pytest.raises(ReadError) as error:
        list(feeder)
    file = path.partition("::")[0]
    assert file in str(error.value)
    assert "chunk 1.0" in str(error.value)
    for shuffle in (False, True, "window"):
        policy = aiofeed.FailurePolicy("skip", max_failures=5)
        with aiofeed.Feeder(source, batch_size=8, shuffle=shuffle, on_error=policy) as feeder:
            rows = rows_of(feeder)
            assert sorted(rows) == WHOLE
            assert feeder.statistics().failures == 5
    policy = aiofeed.FailurePolicy("replace", max_failures=50)
    with aiofeed.Feeder(source, batch_size=5, on_error=policy) as feeder:
        rows = rows_of(feeder)
        assert len(rows) == 15
        assert set(rows) == set(WHOLE)


def test_a_damaged_index_of_a_shard(tmp_path: Path) -> None:
    """All samples of the shard fail, and the shard's file is named."""

    def spoil(data: bytes) -> bytes:
        return data[:-20] + b"\1" + data[-19:]

    source = aiofeed.Arrays({"x": zarr_array(tmp_path, spoil, shards=(8, 64))})
    with (
        aiofeed.Feeder(source, batch_size=8) as feeder,
        pytest.raises(ReadError, match=r"a\.zarr/x, chunk 0\.0.*checksum"),
    ):
        list(feeder)
    with aiofeed.Feeder(source, batch_size=9, on_error=aiofeed.FailurePolicy("skip", max_failures=8)) as feeder:
        assert [int(row) // 64 for batch in feeder for row in batch["x"][:, 0]] == list(range(8, 16))


@pytest.mark.parametrize("kind", ["contiguous", "chunks"])
def test_a_file_that_is_cut_after_it_was_opened(kind: str, tmp_path: Path) -> None:
    """Its samples fail, and the file is named."""
    path, values = tmp_path / "f.h5", np.arange(40_000)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=(100,) if kind == "chunks" else None)
    source = aiofeed.Arrays({"x": f"{path}::x"}, window=range(100), sample=0)
    path.write_bytes(half(path.read_bytes()))
    with aiofeed.Feeder(source, batch_size=80) as feeder, pytest.raises(ReadError, match=r"f\.h5"):
        list(feeder)


def test_a_chunk_that_is_gone_has_the_fill_value(tmp_path: Path) -> None:
    """As zarr reads it."""
    path = zarr_array(tmp_path, half, fill_value=7)
    Path(path, "c/1/0").unlink()
    with aiofeed.Feeder(aiofeed.Arrays({"x": path}), batch_size=ROWS) as feeder:
        [batch] = feeder
    assert np.array_equal(batch["x"].numpy(), zarr.open_array(path, mode="r")[...])
    assert (batch["x"][4:8] == 7).all()


# --- bombs ------------------------------------------------------------------------------------------------------------


def gzip_bomb(_: bytes) -> bytes:
    return bytes(numcodecs.GZip(9).encode(bytes(64 << 20)))


def blosc_bomb(data: bytes) -> bytes:
    """A header that claims two GiB."""
    return data[:4] + (0x7FFFFFFF).to_bytes(4, "little") + data[8:]


BOMBS: dict[str, Callable[[Path], str]] = {
    "Zarr 2, gzip": lambda folder: zarr_array(folder, gzip_bomb, zarr_format=2, compressors=V2["gzip"]),
    "Zarr 3, gzip": lambda folder: zarr_array(folder, gzip_bomb, compressors=V3["gzip"]),
    "Zarr 2, raw lzma": lambda folder: zarr_array(
        folder, lambda _: V2["raw lzma"].encode(bytes(64 << 20)), zarr_format=2, compressors=V2["raw lzma"]
    ),
    "Zarr 2, zlib": lambda folder: zarr_array(
        folder, lambda _: numcodecs.Zlib(9).encode(bytes(64 << 20)), zarr_format=2, compressors=V2["zlib"]
    ),
    "Zarr 3, zstd": lambda folder: zarr_array(
        folder, lambda _: imagecodecs.zstd_encode(bytes(64 << 20)), compressors=V3["zstd"]
    ),
    "Zarr 2, bz2": lambda folder: zarr_array(
        folder, lambda _: numcodecs.BZ2().encode(bytes(64 << 20)), zarr_format=2, compressors=V2["bz2"]
    ),
    "Zarr 2, lz4": lambda folder: zarr_array(
        folder, lambda data: (0x7FFFFFF0).to_bytes(4, "little") + data[4:], zarr_format=2, compressors=V2["lz4"]
    ),
    "Zarr 2, blosc": lambda folder: zarr_array(folder, blosc_bomb, zarr_format=2, compressors=V2["blosc"]),
    "Zarr 3, blosc": lambda folder: zarr_array(folder, blosc_bomb, compressors=V3["blosc"]),
    "HDF5, gzip": lambda folder: hdf5_array(folder, lambda _: numcodecs.Zlib(9).encode(bytes(64 << 20)), [GZIP]),
    "HDF5, zstd": lambda folder: hdf5_array(folder, lambda _: imagecodecs.zstd_encode(bytes(64 << 20)), [ZSTD]),
    "HDF5, blosc": lambda folder: hdf5_array(folder, blosc_bomb, [BLOSC]),
    "HDF5, lz4": lambda folder: hdf5_array(folder, lambda data: (1 << 40).to_bytes(8, "big") + data[8:], [LZ4]),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_chunk_that_claims_much_more(name: str, tmp_path: Path) -> None:
    """It fails as a damaged one does, without the memory that it claims."""
    import tracemalloc

    source = aiofeed.Arrays({"x": BOMBS[name](tmp_path)}, window=WINDOW)
    list(aiofeed.Feeder(source[[0]], batch_size=1))  # starts what is imported when it is needed
    with aiofeed.Feeder(source, batch_size=8, on_error=aiofeed.FailurePolicy("skip", max_failures=5)) as feeder:
        tracemalloc.start()
        assert rows_of(feeder) in (WHOLE, list(range(1, ROWS)))  # lz4 goes by the bytes, which are right
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 32 << 20


def test_a_chunk_that_claims_a_tebibyte_is_refused(tmp_path: Path) -> None:
    """By the metadata, although its bytes are few."""
    path = zarr_array(tmp_path, lambda data: data)
    document = json.loads(Path(path, "zarr.json").read_text())
    document["shape"] = document["chunk_grid"]["configuration"]["chunk_shape"] = [1 << 32, 64]
    Path(path, "zarr.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"a\.zarr/x"):
        aiofeed.Arrays({"x": path})


# --- transient errors -------------------------------------------------------------------------------------------------


def test_transient_errors_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk fails at first, by an error of the disk."""
    from aiofeed.arrays.zarr_files import ZarrArray

    path, read, tried = zarr_array(tmp_path, lambda data: data), ZarrArray.read_now, set()

    def read_now(self: Any, chunk: Any) -> Any:
        if chunk not in tried:
            tried.add(chunk)
            raise OSError(errno.EIO, "Input/output error", "disk")
        return read(self, chunk)

    monkeypatch.setattr(ZarrArray, "read_now", read_now)
    source = aiofeed.Arrays({"x": path}, window=WINDOW)
    with aiofeed.Feeder(source, batch_size=8, on_error=aiofeed.FailurePolicy(retries=3)) as feeder:
        assert rows_of(feeder) == list(range(1, ROWS))
    assert len(tried) == 4
