"""Epochs of ``Arrays``: order, ranks, resume, parts, mixtures, caches, processes and devices."""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import pickle
from collections import Counter
from itertools import islice
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiofeed
from aiofeed.arrays.chunked import ChunkedArray
from aiofeed.errors import ReadError, StateError
from tests.support.arrays import samples_of

zarr = pytest.importorskip("zarr", minversion="3")
h5py = pytest.importorskip("h5py")

ROWS, CHUNK, BATCH = 240, 6, 8
X = np.random.default_rng(0).normal(size=(ROWS, 5, 7)).astype("f4")
ORDERS: list[Any] = [False, True, "keyed", "window", "window:3"]


@pytest.fixture
def arrays(tmp_path: Path) -> dict[str, Any]:
    """A field in HDF5, one in Zarr, of two files each, and the rows."""
    for part, rows in enumerate((slice(0, 100), slice(100, ROWS))):
        with h5py.File(tmp_path / f"{part}.h5", "w") as file:
            file.create_dataset("x", data=X[rows], chunks=(CHUNK, 5, 7), compression="gzip", shuffle=True)
        zarr.create_array(tmp_path / f"{part}.zarr", data=-X[rows], chunks=(CHUNK, 5, 7))
    return {
        "x": str(tmp_path / "*.h5::x"),
        "y": str(tmp_path / "{0,1}.zarr"),
        "row": np.arange(ROWS, dtype=np.int32),
        "at": np.arange(35).reshape(5, 7)[None].repeat(ROWS, 0),
    }


WINDOW = {"x": range(-2, 1), "y": 1}
FIRST, LAST = 2, ROWS - 1


def new(arrays: dict[str, Any], **options: Any) -> aiofeed.Arrays:
    return aiofeed.Arrays(arrays, **{"window": WINDOW, **options})


def random_tiles(arrays: dict[str, Any]) -> aiofeed.Arrays:
    return new(arrays, tile={1: 3, 2: 2}, stride="random")


def rows_of(batches: Any) -> list[int]:
    """The rows of samples, whose values are correct."""
    found = []
    for sample in samples_of(batches):
        row, (lat, lon) = int(sample["row"]), np.unravel_index(int(sample["at"][0, 0]), (5, 7))
        tile = (slice(lat, lat + sample["at"].shape[0]), slice(lon, lon + sample["at"].shape[1]))
        assert np.array_equal(sample["x"], X[row - 2 : row + 1, *tile])
        assert np.array_equal(sample["y"], -X[row + 1, *tile])
        found.append(row)
    return found


def equal(batches: Any, others: Any) -> bool:
    batches, others = list(batches), list(others)
    return len(batches) == len(others) and all(
        [*one] == [*other] and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(batches, others, strict=True)
    )


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """How often each chunk is decoded, by its array."""
    found: Counter[Any] = Counter()
    decode = ChunkedArray.decode

    def count(self: ChunkedArray, data: Any, chunk: Any) -> Any:
        found[self.name, chunk] += 1
        return decode(self, data, chunk)

    monkeypatch.setattr(ChunkedArray, "decode", count)
    return found


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", ORDERS)
def test_each_chunk_is_decoded_once(arrays: dict[str, Any], decoded: Counter[Any], shuffle: Any) -> None:
    """In whatever order: the look-ahead has room for all."""
    with aiofeed.Feeder(new(arrays), batch_size=BATCH, shuffle=shuffle) as feeder:
        rows = rows_of(feeder)
    assert sorted(rows) == list(range(FIRST, LAST))
    assert (rows == sorted(rows)) == (shuffle is False)
    assert len(decoded) == 2 * (17 + 24)
    assert set(decoded.values()) <= {1, 2}  # 2: the next epoch has begun


def test_an_order_by_windows_decodes_each_chunk_once_with_little_room(
    arrays: dict[str, Any], decoded: Counter[Any]
) -> None:
    """A chunk is needed twice where two windows meet."""
    limits = aiofeed.Limits(lookahead_bytes=400_000)
    with aiofeed.Feeder(new(arrays)[: LAST - FIRST], batch_size=BATCH, shuffle="window:1", limits=limits) as feeder:
        rows_of(feeder)
    assert sum(decoded.values()) <= 2.5 * len(decoded)


def test_the_mean_window_mixes_chunks(arrays: dict[str, Any]) -> None:
    """Batches have rows of several chunks, and other ones in the next epoch."""
    with aiofeed.Feeder(new(arrays), batch_size=BATCH, shuffle="window:4") as feeder:
        first, second = ([batch["row"] // CHUNK for batch in feeder] for _ in range(2))
    assert np.mean([len(batch.unique()) for batch in first]) > 3
    assert not all(map(torch.equal, first, second))


@pytest.mark.parametrize("shuffle", ORDERS)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks(arrays: dict[str, Any], shuffle: Any, world: int) -> None:
    """They have the samples of one rank, each once, with the same random tiles."""
    source = random_tiles(arrays)[:120]
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 3}
    with aiofeed.Feeder(source, batch_size=1, **options) as feeder:
        whole = list(feeder)
    for rank in range(world):
        with aiofeed.Feeder(source, batch_size=1, shard=(rank, world), **options) as feeder:
            assert equal(feeder, whole[rank::world])
    assert sorted(rows_of(whole)) == list(range(FIRST, FIRST + 120))


@pytest.mark.parametrize(
    ("shuffle", "batches"), [*((order, 11) for order in ORDERS), *itertools.product((True, "window"), (0, 1, 29))]
)
def test_a_resume_is_exact(arrays: dict[str, Any], shuffle: Any, batches: int) -> None:
    """In the second epoch, with random tiles: bit by bit."""
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": shuffle, "seed": 5}
    with aiofeed.Feeder(random_tiles(arrays), **options) as feeder:
        list(feeder)
        whole = list(feeder)
    with aiofeed.Feeder(random_tiles(arrays), **options) as feeder:
        list(feeder)
        done = list(islice(feeder, batches))
        state = json.loads(json.dumps(feeder.state_dict()))
    with aiofeed.Feeder(random_tiles(arrays), **options) as feeder:
        feeder.load_state_dict(state)
        assert equal([*done, *feeder], whole)


def test_a_resume_with_another_batch_size(arrays: dict[str, Any]) -> None:
    """The tiles are those of the samples' places in the epoch."""
    with aiofeed.Feeder(random_tiles(arrays), batch_size=1, shuffle=True) as feeder:
        whole = list(feeder)
    with aiofeed.Feeder(random_tiles(arrays), batch_size=10, shuffle=True) as feeder:
        list(islice(feeder, 4))
        state = feeder.state_dict()
    with aiofeed.Feeder(random_tiles(arrays), batch_size=1, shuffle=True) as feeder:
        feeder.load_state_dict(state)
        assert equal(feeder, whole[40:])


def test_random_tiles_change_with_the_epoch_and_the_seed(arrays: dict[str, Any]) -> None:
    """And cover the array."""
    seen = []
    for seed in (0, 1):
        with aiofeed.Feeder(random_tiles(arrays), batch_size=BATCH, seed=seed) as feeder:
            seen += [torch.cat([batch["at"][:, 0, 0] for batch in feeder]) for _ in range(2)]
    assert len({tuple(each.tolist()) for each in seen}) == 4
    assert {*torch.cat(seen).tolist()} == {7 * lat + lon for lat in range(3) for lon in range(6)}


CHANGED: dict[str, dict[str, Any]] = {
    "window": {"window": {"x": range(-2, 1)}},
    "tile": {"tile": {1: 4}},
    "pad": {"pad": 0},
    "sample": {"sample": (0, 1)},
}


@pytest.mark.parametrize("name", CHANGED)
def test_the_state_of_other_samples_is_refused(name: str, arrays: dict[str, Any]) -> None:
    """A state belongs to the same windows."""
    state = aiofeed.Feeder(new(arrays), batch_size=4).state_dict()
    with pytest.raises(StateError):
        aiofeed.Feeder(new(arrays, **CHANGED[name]), batch_size=4).load_state_dict(state)


# --- parts and mixtures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True, "window"])
def test_parts(arrays: dict[str, Any], decoded: Counter[Any], shuffle: Any) -> None:
    """Slices, lists and splits have their samples, and read their chunks only."""
    source, numbers = new(arrays), np.arange(FIRST, LAST)
    rng = np.random.default_rng(0).permutation(len(numbers))
    parts = {"range": slice(10, 40), "step": slice(5, 200, 7), "list": [70, 5, 236], "random": rng[:50].tolist()}
    for name, chosen in parts.items():
        if shuffle == "window" and name in ("list", "random"):
            continue  # they are not in the order of chunks
        decoded.clear()
        with aiofeed.Feeder(source[chosen], batch_size=BATCH, shuffle=shuffle) as feeder:
            rows = rows_of(feeder)
        assert sorted(rows) == sorted(numbers[chosen].tolist()), name
        if not shuffle:
            assert rows == numbers[chosen].tolist()
        if name == "range":
            assert len(decoded) <= 2 * 7


def test_a_split(arrays: dict[str, Any]) -> None:
    """Its parts have all samples, each once."""
    parts = new(arrays).split({"train": 0.8, "val": 0.2})
    rows = []
    for part in parts.values():
        with aiofeed.Feeder(part, batch_size=BATCH, shuffle="window") as feeder:
            rows += rows_of(feeder)
    assert len(parts["val"]) == pytest.approx(0.2 * (LAST - FIRST), abs=25)
    assert sorted(rows) == list(range(FIRST, LAST))


def test_a_mixture(arrays: dict[str, Any]) -> None:
    """Of random tiles and of the same tiles in another place."""
    tiled = new({**arrays, "x": X, "y": -X}, tile={1: 3, 2: 2}, stride={1: 2, 2: 5})
    mixture = aiofeed.Mixture({"a": random_tiles(arrays), "b": tiled}, until=200)
    with aiofeed.Feeder(mixture, batch_size=BATCH, seed=3) as feeder:
        assert len(rows_of(feeder)) == 200
        assert sum(feeder.statistics().by_source.values()) == 200
        assert min(feeder.statistics().by_source.values()) > 0


# --- everything else of a feeder --------------------------------------------------------------------------------------


def test_a_transform_and_a_decoder(arrays: dict[str, Any], tmp_path: Path) -> None:
    """A decoder gets samples, whose results caches keep."""
    calls = []

    def decode(sample: Any, *_: Any) -> Any:
        calls.append(int(sample["row"]))
        return {"mean": np.float32(sample["x"].mean()), "row": sample["row"]}

    for cache in (None, "host", aiofeed.DiskCache(tmp_path / "cache", max_bytes=1 << 20)):
        calls.clear()
        with aiofeed.Feeder(new(arrays), decode=decode, batch_size=BATCH, shuffle=True, cache=cache) as feeder:
            for _ in range(3):
                for batch in feeder:
                    for mean, row in zip(batch["mean"].tolist(), batch["row"].tolist(), strict=True):
                        assert mean == pytest.approx(X[row - 2 : row + 1].mean(), abs=1e-5)
        assert {*calls} == {*range(FIRST, LAST)}
        if cache is not None:
            assert len(calls) == LAST - FIRST


def test_an_encoded_cache_is_refused_or_works(arrays: dict[str, Any], tmp_path: Path) -> None:
    """Files are on disk already."""
    with pytest.raises((TypeError, ValueError), match=r"EncodedCache|leave it out"):
        aiofeed.Feeder(new(arrays), batch_size=4, cache=aiofeed.EncodedCache(tmp_path / "c", max_bytes=1 << 20))


def test_a_pickled_copy(arrays: dict[str, Any]) -> None:
    """It has the same batches, and the same state."""
    source = random_tiles(arrays)
    copied = pickle.loads(pickle.dumps(source))
    with aiofeed.Feeder(source, batch_size=BATCH) as feeder, aiofeed.Feeder(copied, batch_size=BATCH) as other:
        assert equal(feeder, other)
        other.load_state_dict(feeder.state_dict())


def _read(source: Any, results: Any) -> None:
    with aiofeed.Feeder(source, batch_size=BATCH) as feeder:
        results.put(rows_of(feeder))


@pytest.fixture(scope="module")
def tracker_started() -> None:
    """The process of multiprocessing that stays."""
    resource_tracker.ensure_running()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("tracker_started")
def test_another_process_reads_it(method: str, arrays: dict[str, Any]) -> None:
    """After it was opened here: no handle is shared."""
    context = multiprocessing.get_context(method)
    source, results = new(arrays), context.Queue()
    process = context.Process(target=_read, args=(source, results))
    process.start()
    assert results.get(timeout=60) == list(range(FIRST, LAST))
    process.join()
    results.close()
    with aiofeed.Feeder(source, batch_size=BATCH) as feeder:
        assert rows_of(feeder) == list(range(FIRST, LAST))


def test_a_file_that_is_written_again_is_noticed(arrays: dict[str, Any], tmp_path: Path) -> None:
    """It is not kept open, so HDF5 may write to it; its chunks may lie elsewhere then."""
    source = new(arrays)
    with h5py.File(tmp_path / "0.h5", "r+") as file:
        file.create_dataset("more", data=np.arange(5))
    with aiofeed.Feeder(source, batch_size=BATCH) as feeder, pytest.raises(ReadError, match=r"0\.h5.*has changed"):
        list(feeder)
    with aiofeed.Feeder(new(arrays), batch_size=BATCH) as feeder:
        assert rows_of(feeder) == list(range(FIRST, LAST))


def test_two_iterators(arrays: dict[str, Any]) -> None:
    """Of two feeders of one source, in turns."""
    source = new(arrays)
    with aiofeed.Feeder(source, batch_size=BATCH) as one, aiofeed.Feeder(source, batch_size=BATCH, shuffle=True) as two:
        pairs = list(zip(one, two, strict=True))
    assert rows_of(pair[0] for pair in pairs) == list(range(FIRST, LAST))
    assert sorted(rows_of(pair[1] for pair in pairs)) == list(range(FIRST, LAST))


@pytest.mark.parametrize("how", ["break", "close", "drop", "del"])
def test_an_epoch_that_ends_early(how: str, arrays: dict[str, Any]) -> None:
    """Leaves no thread and no file behind, which the test's fixture looks for; the next epoch is whole."""
    feeder = aiofeed.Feeder(new(arrays), batch_size=BATCH, shuffle=True)
    iterator = iter(feeder)
    next(iterator)
    if how == "break":
        for _ in feeder:
            break
        assert len(rows_of(feeder)) == LAST - FIRST
        feeder.close()
    elif how == "close":
        feeder.close()
    else:
        del iterator, feeder
        gc.collect()


def test_a_batch_that_is_kept_stays(arrays: dict[str, Any]) -> None:
    """Its memory is not used again, and writing into a field changes no other."""
    kept = []
    with aiofeed.Feeder(new(arrays), batch_size=BATCH, shuffle="window") as feeder:
        for _ in range(2):
            for batch in feeder:
                batch["y"].zero_()
                kept.append(batch)
    for batch in kept:
        assert not batch["y"].any()
        for x, row in zip(batch["x"].numpy(), batch["row"].tolist(), strict=True):
            assert np.array_equal(x, X[row - 2 : row + 1])
