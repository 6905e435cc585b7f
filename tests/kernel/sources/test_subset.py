"""``source[indices]`` and ``source.split``: a part gives the samples that a sampler of the same indices gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, random_split

import aiofeed
from aiofeed import DiskCache, EncodedCache, Feeder, Files, FromDataset, Mixture, Table, TarShards, Tensors, Tokens
from aiofeed.errors import DeviceCopyError, StateError
from aiofeed.kernel.feeder.session import _new_memory
from aiofeed.kernel.sources.subset import Subset
from tests.support.fault_server import FaultServer
from tests.support.shard_files import members_of, numbered, write_tar
from tests.support.simulated_device import SimulatedDevice
from tests.support.tables import arrow_table, parquet
from tests.support.token_files import write_raw

ROWS = 100
PICKED = [7, 93, 8, 8, 50, 0, -1]
ASCENDING = [2, 3, 5, 31, 32, 60, 99]


def first_byte(data: Any) -> torch.Tensor:
    """The first byte and the length of a sample."""
    return torch.tensor([*data[:1], len(data)] if data else [0, 0])


def files(folder: Path) -> Files:
    for number in range(ROWS):
        (folder / f"{number:03}").write_bytes(bytes([number]))
    return Files(sorted(folder.iterdir()), [3 * number for number in range(ROWS)])


def shards(folder: Path) -> TarShards:
    for number in range(4):
        write_tar(folder / f"{number}.tar", members_of(numbered(25 * number, 25)))
    return TarShards(folder / "*.tar", "jpg")


class Squares:
    """A Dataset without ``__getitems__``."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return index * index


SOURCES: dict[str, tuple[Callable[[Path], Any], Callable[..., Any] | None]] = {
    "files": (files, first_byte),
    "shards": (shards, first_byte),
    "table": (lambda _: Table(arrow_table()), None),
    "parquet": (lambda folder: Table(parquet(folder)), None),
    "tokens": (lambda folder: Tokens(write_raw(folder / "x.bin", range(1000)), 10), None),
    "column": (
        lambda folder: Tokens(sorted(parquet(folder, others=True).parent.glob("*.parquet")), 2, column="tokens"),
        None,
    ),
    "tensors": (lambda _: Tensors(torch.arange(ROWS), np.arange(ROWS) * 2), None),
    "dataset": (lambda _: FromDataset(Squares()), None),
    "items": (lambda _: FromDataset(TensorDataset(torch.arange(ROWS))), None),
}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes of shards go into a folder of the test."""
    monkeypatch.setenv("AIOFEED_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(params=SOURCES)
def new(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], tuple[Any, Any]]:
    """Makes a source and its decoder. A fixture must not refer to the source, whose files would stay open."""
    make, decode = SOURCES[request.param]
    return lambda: (make(tmp_path), decode)


def epoch(source: Any, decode: Any = None, **options: Any) -> str:
    """The batches of an epoch, as text."""
    with Feeder(source, decode=decode, batch_size=3, **options) as feeder:
        return str(list(feeder))


def wrapped(indices: Any, length: int = ROWS) -> list[int]:
    return [index % length for index in indices]


# --- samples


@pytest.mark.parametrize("indices", [PICKED, ASCENDING], ids=["any", "ascending"])
def test_a_part_has_the_samples_of_a_sampler(new: Any, indices: list[int]) -> None:
    """Each kind of source: the same batches, and the names of the same samples."""
    source, decode = new()
    part = source[indices]
    assert len(part) == len(indices)
    rows = wrapped(indices, len(source))
    assert [part.key(number) for number in range(len(part))] == [source.key(row) for row in rows]
    assert epoch(part, decode) == epoch(source, decode, sampler=rows)


def test_parts_of_parts(new: Any) -> None:
    """The indices of a part of a part count through the part."""
    source, decode = new()
    rows = wrapped([-12, -11], len(source))
    assert epoch(source[::-1][10:20][[1, 0]], decode) == epoch(source, decode, sampler=rows)


@pytest.mark.parametrize("device", [None, "simulated"])
@pytest.mark.parametrize("name", ["tensors", "tokens", "table"])
def test_rows_are_gathered_as_those_of_the_whole(name: str, device: Any, tmp_path: Path) -> None:
    """Without a device no thread is started: batches are views of a window, as for the whole source."""
    source = SOURCES[name][0](tmp_path)
    options: dict[str, Any] = {"device": None if device is None else SimulatedDevice()}
    if name == "tokens":
        options["cache"] = "device"
    assert epoch(source[PICKED], **options) == epoch(source, sampler=wrapped(PICKED), **options)
    for each in (source, source[PICKED]):
        with Feeder(each, batch_size=3) as feeder:
            assert _new_memory(feeder._config) is not None


def test_only_the_part_of_tensors_is_copied_to_a_device() -> None:
    """The other rows need no device memory."""
    data = Tensors(torch.zeros(1000, 1000))
    device = SimulatedDevice(memory_bytes=1 << 20)
    with Feeder(data, batch_size=5, device=device) as feeder, pytest.raises(DeviceCopyError, match="does not fit"):
        next(iter(feeder))
    with Feeder(data[:10], batch_size=5, device=device) as feeder:
        assert len(list(feeder)) == 2


@pytest.mark.parametrize(
    ("indices", "rows"),
    [
        (slice(90, None, 4), [90, 94, 98]),
        (range(3), [0, 1, 2]),
        ((4, 2), [4, 2]),
        (np.array([1, -1]), [1, 99]),
        (torch.tensor([5, 6]), [5, 6]),
        (np.arange(ROWS) >= 98, [98, 99]),
        ([index == 4 for index in range(ROWS)], [4]),
        (torch.arange(ROWS) == 5, [5]),
        ([], []),
    ],
)
def test_indices(indices: Any, rows: list[int]) -> None:
    """Slices, and lists, tuples, arrays and tensors of ints or of one bool per sample."""
    part = FromDataset(Squares())[indices]
    assert [part.items([number])[0] for number in range(len(part))] == [row * row for row in rows]


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        (
            3,
            TypeError,
            r"Tensors\[3\]: a Feeder reads .* Tensors\[3:4\] is a source of this sample",
        ),
        ("3", TypeError, r"Tensors\[\.\.\.\] takes a slice, a list of ints or a mask of bools, got '3'"),
        ([0.5], TypeError, "takes a slice, a list of ints or a mask of bools, got .0.5."),
        ([[0]], TypeError, "takes a slice, a list of ints or a mask"),
        ([0, ROWS], IndexError, "the indices are 0 to 100, for 100 samples"),
        ([-ROWS - 1], IndexError, "the indices are -101 to -101, for 100 samples"),
        ([True], IndexError, "the mask has 1 bool, and the source 100 samples"),
    ],
)
def test_wrong_indices(indices: Any, error: type[Exception], message: str) -> None:
    """The message says what is allowed, and what to do with one sample."""
    with pytest.raises(error, match=message):
        Tensors(torch.arange(ROWS))[indices]


def test_tokens_give_a_window_by_an_int(tmp_path: Path) -> None:
    """As a Dataset does."""
    tokens = SOURCES["tokens"][0](tmp_path)
    assert tokens[-1].tolist() == list(range(990, 1000))
    assert len(tokens[:3]) == 3


def test_lists_of_values_are_those_of_the_part(tmp_path: Path) -> None:
    """Targets are; classes are those of the folder; the paths of all files are those of the whole."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(name.encode())
    part = aiofeed.ImageFolder(tmp_path)[1:]
    assert (part.targets, part.classes, part.class_to_idx) == ([1], ["a", "b"], {"a": 0, "b": 1})
    assert not hasattr(part, "paths")
    assert isinstance(part, Subset)
    assert part.whole.paths == [str(tmp_path / name / "x.png") for name in ("a", "b")]


# --- split


def test_split_is_the_permutation_of_torch() -> None:
    """Sorted pieces of `torch.randperm`: the same on every machine, another for another seed, and all samples once."""
    source = FromDataset(Squares(), threads=2)
    parts = source.split({"train": 0.9, "validation": 0.1}, seed=5)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(5)).numpy()
    np.testing.assert_array_equal(parts["train"].rows, np.sort(order[:90]))
    np.testing.assert_array_equal(parts["validation"].rows, np.sort(order[90:]))
    assert (
        parts["validation"].rows.tolist() != source.split({"train": 0.9, "validation": 0.1})["validation"].rows.tolist()
    )
    assert parts["train"].threads == 2


@pytest.mark.parametrize(
    ("parts", "lengths"),
    [
        ({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, [33, 34, 33]),
        ({"a": 60, "b": 40}, [60, 40]),
        ({"a": 0.995, "b": 0.005}, None),
        ({"a": 1.0}, [100]),
    ],
)
def test_lengths_of_a_split(parts: dict[str, float], lengths: list[int] | None) -> None:
    """Fractions are rounded, numbers of samples are not; no part is empty."""
    if lengths is None:
        with pytest.raises(ValueError, match="with 100 samples a part would be empty"):
            FromDataset(Squares()).split(parts)
    else:
        assert [len(part) for part in FromDataset(Squares()).split(parts).values()] == lengths


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        (
            [0.9, 0.1],
            TypeError,
            r'split takes fractions by name, \{"train": 0.9, "validation": 0.1\}, got \[0.9, 0.1\]',
        ),
        ({}, TypeError, "split takes fractions by name"),
        ({"a": True}, TypeError, "split takes fractions by name"),
        ({"a": "all"}, TypeError, "split takes fractions by name"),
        ({"a": 0.5, "b": 0.4}, ValueError, "fractions must be above 0 and sum to 1; these sum to 0.9"),
        ({"a": 1.5, "b": -0.5}, ValueError, "fractions must be above 0"),
        ({"a": float("nan")}, ValueError, "fractions must be above 0"),
        ({"a": 50, "b": 49}, ValueError, "numbers of samples must be above 0 and sum to 100; these sum to 99"),
    ],
)
def test_wrong_splits(parts: Any, error: type[Exception], message: str) -> None:
    """The message shows the parts, what they sum to and what they should."""
    with pytest.raises(error, match=message):
        FromDataset(Squares()).split(parts)


def test_random_split_of_a_source_names_split(tmp_path: Path) -> None:
    """torch's parts have no items, so that a feeder says what to write."""
    part = random_split(files(tmp_path), [0.9, 0.1])[0]
    with pytest.raises(TypeError, match=r"Subset needs items.*pass source\[indices\], .*random_split source\.split\("):
        Feeder(part, decode=first_byte)


# --- what works on a part


def test_state_of_a_part(new: Any) -> None:
    """A state resumes with the same part, not with another part or the whole source."""
    source, decode = new()
    options = {"decode": decode, "batch_size": 3, "shuffle": True}
    parts = source.split({"a": 0.5, "b": 0.5})
    with Feeder(parts["a"], **options) as feeder:
        batches = iter(feeder)
        next(batches)
        state = json.loads(json.dumps(feeder.state_dict()))
        rest = str(list(batches))
    with Feeder(source.split({"a": 0.5, "b": 0.5})["a"], **options) as feeder:
        feeder.load_state_dict(state)
        assert str(list(feeder)) == rest
    one_other = parts["a"].rows.copy()
    one_other[25] = parts["b"].rows[25]
    for other in (parts["b"], source[one_other], source):
        with Feeder(other, **options) as feeder, pytest.raises(StateError, match=r"source|length"):
            feeder.load_state_dict(state)


def test_state_of_a_part_with_a_fingerprint_of_the_user() -> None:
    """The fingerprint of a Dataset counts, and so do the indices."""
    source = FromDataset(Squares(), fingerprint="v1")
    assert source[:5].fingerprint() == source[:5].fingerprint() != source[1:6].fingerprint()
    assert source[:5].fingerprint() != FromDataset(Squares(), fingerprint="v2")[:5].fingerprint()


@pytest.mark.usefixtures("forked_workers")
def test_worker_processes_and_caches(tmp_path: Path) -> None:
    """A part is pickled to workers, and cached as any source; an `EncodedCache` of the whole has its samples."""
    (tmp_path / "files").mkdir()
    source = files(tmp_path / "files")
    expected = epoch(source[ASCENDING], first_byte)
    assert epoch(source[ASCENDING], first_byte, engine="process:1") == expected
    assert epoch(source[ASCENDING], first_byte, cache=DiskCache(tmp_path / "disk")) == expected
    cache = EncodedCache(tmp_path / "encoded", 1 << 20)
    epoch(source, first_byte, cache=cache)
    with Feeder(source[ASCENDING], decode=first_byte, batch_size=3, cache=cache) as feeder:
        assert str(list(feeder)) == expected
        assert feeder.statistics().storage.cache_misses == 0


def test_setup_gets_the_dataset_and_not_its_part() -> None:
    """`setup=` opens files in the Dataset itself."""
    seen: list[object] = []
    dataset = Squares()
    epoch(FromDataset(dataset, setup=seen.append)[:4])
    assert set(map(id, seen)) == {id(dataset)}


def test_windows_of_a_part_are_those_of_its_shards(tmp_path: Path) -> None:
    """In the order of the source a part has shards; in another it has none, and a window is refused."""
    source = shards(tmp_path)
    part = source[[0, 3, 30, 31, 32, 99]]
    assert part.shard_starts == [0, 2, 5, 6]
    assert epoch(part, first_byte, shuffle="window") == epoch(part, first_byte, shuffle="window")
    with pytest.raises(ValueError, match="window"):
        Feeder(source[::-1], decode=first_byte, batch_size=3, shuffle="window")


@pytest.mark.parametrize("indices", [ASCENDING, PICKED], ids=["ascending", "any"])
def test_parts_at_urls(indices: list[int], object_server: FaultServer) -> None:
    """Files, shards and tokens at URLs, with samples read ahead where the part has shards."""
    server = object_server
    server.objects = {f"bucket/files/{number:03}": bytes([number]) for number in range(ROWS)}
    server.objects["bucket/x.bin"] = np.arange(1000, dtype=np.uint16).tobytes()
    urls = [f"s3://bucket/files/{number:03}" for number in range(ROWS)]
    for source, decode in (
        (Files(urls, options=server.options), first_byte),
        (Tokens("s3://bucket/x.bin", 10, options=server.options), None),
    ):
        assert epoch(source[indices], decode) == epoch(source, decode, sampler=wrapped(indices))


def test_parts_in_a_mixture(tmp_path: Path) -> None:
    """Parts mix as sources do."""
    source = files(tmp_path)
    with Feeder(Mixture({"a": source[:3], "b": source[50:52]}), decode=first_byte, batch_size=5) as feeder:
        [(values, _)] = list(feeder)
    assert sorted(values[:, 0].tolist()) == [0, 1, 2, 50, 51]
    whole = SOURCES["tokens"][0](tmp_path)
    with Feeder(Mixture({"a": whole[:5], "b": whole, "c": whole[[7]]}), batch_size=6 + len(whole)) as feeder:
        [windows] = list(feeder)
    chosen = [*range(5), *range(len(whole)), 7]
    assert sorted(windows.tolist()) == sorted(whole[index].tolist() for index in chosen)
