"""Copies of chunks into samples: steps, lists of offsets, many small chunks, and data that are copied from memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import aiofeed
from aiofeed.arrays.chunked import ChunkedArray
from aiofeed.errors import ReadError
from aiofeed.kernel.runtime import buffers
from tests.support.arrays import Asked, check_epoch, numbers, samples_of
from tests.support.examples import examples

h5py = pytest.importorskip("h5py")
zarr = pytest.importorskip("zarr", minversion="3")

pytestmark = [
    pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR"),
]

OFFSETS: list[Any] = [
    range(0, 12, 2),
    range(0, 12, 5),
    range(11, -1, -1),
    range(9, -1, -3),
    [0, 4, 8],
    [8, 4, 0],
    [0, 1, 2, 7, 8, 11],
    [3, 0, 7, 7, 1],
    [5, 5],
    [2, 1, 0, 11],
]


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("chunk", [1, 3, 40])
def test_offsets_with_gaps(offsets: Any, chunk: int, tmp_path: Path) -> None:
    """Steps up and down, lists in any order and with repetitions, in chunks that are shorter and longer than a step."""
    values = numbers((40, 3, 4), "<f4")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(chunk, 2, 4))
    check_epoch(
        Asked({0: 40, 1: 3, 2: 4}, (0,), {"x": {0: offsets}}),
        {"x": f"{tmp_path}/x.h5::x"},
        {"x": values},
        shuffle="window:2" if chunk > 1 else False,
        batch_size=9,
    )


@settings(max_examples=examples(30))
@given(st.data())
def test_offsets_of_joined_files(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Whose chunks differ, and whose last chunks are shorter than the step."""
    folder = tmp_path_factory.mktemp("joined")
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    whole = numbers((sum(lengths), 5), "<i4")
    files = []
    for at, part in enumerate(np.split(whole, np.cumsum(lengths)[:-1])):
        files.append(f"{folder}/{at}.h5::x")
        chunks = data.draw(st.tuples(st.integers(1, len(part)), st.integers(1, 5)))
        with h5py.File(folder / f"{at}.h5", "w") as file:
            file.create_dataset("x", data=part, chunks=chunks)
    step = data.draw(st.integers(-6, 6).filter(bool))
    offsets = range(0, step * data.draw(st.integers(1, 5)), step)
    asked = Asked({0: len(whole), 1: 5}, (0,), {"x": {0: offsets}}, pad=0.0)
    check_epoch(asked, {"x": files}, {"x": whole}, shuffle=data.draw(st.sampled_from([False, True, "window:2"])))


def test_a_long_step_reads_no_chunk_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step of four chunks, each fourth chunk is decoded."""
    zarr.create_array(tmp_path / "x", data=np.arange(64), chunks=(2,))
    source = aiofeed.Arrays({"x": str(tmp_path / "x")}, window=range(0, 33, 8))[:1]
    decoded = []
    decode = ChunkedArray.decode
    monkeypatch.setattr(ChunkedArray, "decode", lambda self, data, at: decoded.append(at) or decode(self, data, at))
    with aiofeed.Feeder(source, batch_size=1) as feeder:
        assert next(iter(feeder))["x"].tolist() == [[0, 8, 16, 24, 32]]
    assert {at for (at,) in decoded} == {0, 4, 8, 12, 16}


@pytest.mark.parametrize(("batch_size", "shuffle"), [(1, True), (7, "window"), (300, False)])
@pytest.mark.parametrize("layout", ["chunks", "sparse", "csr"])
def test_many_small_chunks(batch_size: int, shuffle: Any, layout: str, tmp_path: Path) -> None:
    """Each sample is complete and comes once, however many chunks one job decodes."""
    values = np.zeros((300, 7), np.float32)
    values[np.arange(300), np.arange(300) % 7] = np.arange(300) + 1
    fields: dict[str, Any] = {"row": np.arange(300)}
    with h5py.File(tmp_path / "x.h5", "w") as file:
        if layout == "chunks":
            file.create_dataset("x", data=values, chunks=(2, 3), compression="gzip", shuffle=True)
        else:
            group = file.create_group("x")
            group.attrs.update({"encoding-type": "csr_matrix", "shape": [300, 7]})
            group.create_dataset("data", data=values[values > 0], chunks=(5,))
            group.create_dataset("indices", data=np.arange(300, dtype=np.int32) % 7, chunks=(3,))
            group.create_dataset("indptr", data=np.arange(301))
    source = aiofeed.Arrays({**fields, "x": f"{tmp_path}/x.h5::x"}, sparse="csr" if layout == "csr" else "dense")
    seen = []
    with aiofeed.Feeder(source, batch_size=batch_size, shuffle=shuffle) as feeder:
        for batch in feeder:
            x = batch["x"].to_dense() if layout == "csr" else batch["x"]
            assert torch.equal(x, torch.from_numpy(values[batch["row"].numpy()]))
            seen += batch["row"].tolist()
    assert sorted(seen) == list(range(300))


@pytest.mark.parametrize("bad", [[3], [0, 1, 2], [5, 9]])
def test_an_error_is_that_of_its_chunk_only(bad: list[int], tmp_path: Path) -> None:
    """Other chunks of the same job are decoded, and the message names the file and the chunk."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = file.create_dataset("x", data=numbers((40, 5)), chunks=(4, 5), compression="gzip")
        places = [data.id.get_chunk_info(at).byte_offset for at in bad]
    with open(tmp_path / "x.h5", "r+b") as damaged:
        for place in places:
            damaged.seek(place)
            damaged.write(b"damaged")
    source = aiofeed.Arrays({"x": f"{tmp_path}/x.h5::x", "row": np.arange(40)})
    with aiofeed.Feeder(source, batch_size=40, on_error=aiofeed.FailurePolicy("skip", max_failures=1.0)) as feeder:
        rows = [int(sample["row"]) for sample in samples_of(feeder)]
        failures = str(feeder.failures)
    assert rows == [row for row in range(40) if row // 4 not in bad]
    assert all(f"x.h5::x, chunk {at}.0" in failures for at in bad)


# --- data that are copied from memory ---------------------------------------------------------------------------------


@pytest.fixture(params=["h5", "big-endian", "numpy"])
def volume(request: Any, tmp_path: Path) -> tuple[Any, Any]:
    """A volume without chunks, and its values."""
    values = np.arange(12 * 300 * 400, dtype=">u4" if request.param == "big-endian" else "<u4").reshape(12, 300, 400)
    if request.param == "numpy":
        return values, values
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("x", data=values)
    return f"{tmp_path}/v.h5::x", values


@pytest.mark.parametrize(("window", "shuffle"), [(range(4), False), (range(6, -1, -2), "window"), ([0, 1, 4, 5], True)])
def test_tiles_of_data_without_chunks(volume: tuple[Any, Any], window: Any, shuffle: Any) -> None:
    """No part of the data is read as a whole; the samples are those of NumPy."""
    given, values = volume
    source = aiofeed.Arrays({"x": given}, window=window, tile={1: 8, 2: 8}, stride="random")
    assert source._fields["x"].is_mapped
    with aiofeed.Feeder(
        source[[3, 0, 3, 1] if shuffle is False else range(4)], batch_size=3, shuffle=shuffle
    ) as feeder:
        samples = list(samples_of(feeder))
    assert len(samples) == 4
    for sample in samples:
        x = sample["x"].astype(np.int64)
        at = np.unravel_index(int(x.min()), values.shape)
        first = np.array(window) + at[0] - min(window)
        assert np.array_equal(x, values[first][:, at[1] : at[1] + 8, at[2] : at[2] + 8])


def test_a_volume_that_was_written_again(tmp_path: Path) -> None:
    """Is an error of each sample, which names the file."""
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((12, 300, 400), np.uint32))
    source = aiofeed.Arrays({"x": f"{tmp_path}/v.h5::x"}, window=range(6), tile={1: 8, 2: 8}, stride="random")
    with open(tmp_path / "v.h5", "r+b") as file:
        file.truncate(5000)
    with aiofeed.Feeder(source, batch_size=3) as feeder, pytest.raises(ReadError, match=r"v\.h5"):
        next(iter(feeder))


def test_memory_of_samples_is_used_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the second epoch on, no memory is mapped for the samples of a window, however many batches have them."""
    mapped = []
    anonymous = buffers.anonymous
    monkeypatch.setattr(buffers, "anonymous", lambda size: mapped.append(size) or anonymous(size))
    zarr.create_array(tmp_path / "x", data=np.zeros((320, 128, 128), np.float32), chunks=(8, 128, 128))
    source, counts = aiofeed.Arrays({"x": str(tmp_path / "x")}), []
    with aiofeed.Feeder(source, batch_size=4, shuffle="window") as feeder:
        for _ in range(6):
            for _ in feeder:
                pass
            counts.append(len(mapped))
    assert counts[-1] - counts[2] <= 20  # of 80 batches an epoch
