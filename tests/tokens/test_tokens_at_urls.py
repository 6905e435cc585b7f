"""``Tokens`` at URLs: the windows, order, states and errors of files, read as ranges of objects."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiofeed import EncodedCache, Feeder, Mixture, Tokens
from aiofeed.errors import ReadError, StateError
from aiofeed.tokens import at_urls
from tests.support.fault_server import Fault, FaultServer, Request
from tests.support.token_files import write_megatron, write_raw
from tests.tokens.test_tokens import FORMATS, NUMBERS, lists, save_npy, windows

BLOCK = 8


@pytest.fixture
def server(object_server: FaultServer) -> FaultServer:
    """A server with raw tokens in two objects, ``a-0.bin`` and ``a-1.bin``."""
    object_server.objects = {
        "bucket/a-0.bin": NUMBERS[:300].astype(np.uint16).tobytes(),
        "bucket/a-1.bin": NUMBERS[300:].astype(np.uint16).tobytes(),
    }
    return object_server


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of ten windows, so that an object has several."""
    monkeypatch.setattr(at_urls, "RANGE_BYTES", 10 * BLOCK * 2)


def remote(server: FaultServer, name: str = "a-*.bin", **options: Any) -> Tokens:
    return Tokens(f"s3://bucket/{name}", BLOCK, options=server.options, **options)


def local(server: FaultServer, folder: Path, **options: Any) -> Tokens:
    """The objects as files of the same names."""
    for key, data in server.objects.items():
        (folder / key.removeprefix("bucket/")).write_bytes(data)
    return Tokens(sorted(folder.glob("a-*.bin")), BLOCK, **options)


def put(server: FaultServer, path: Path) -> str:
    """Serve a file, with the index beside it if there is one; return its name."""
    for each in path.parent.glob(f"{path.stem}.*"):
        server.objects[f"bucket/{each.name}"] = each.read_bytes()
    return path.name


ORDERS: list[dict[str, Any]] = [{}, {"shuffle": True}, {"shuffle": "keyed"}, {"shuffle": True, "drop_last": True}]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("options", [{}, {"targets": True, "stride": 3}])
def test_batches_equal_those_of_files(
    order: dict[str, Any], options: dict[str, Any], server: FaultServer, tmp_path: Path
) -> None:
    """Every epoch has the batches of the same files on disk."""
    with Feeder(remote(server, **options), batch_size=7, **order) as feeder:
        expected: Feeder[Any] = Feeder(local(server, tmp_path, **options), batch_size=7, **order)
        for _ in range(2):
            assert lists(feeder) == lists(expected)


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, server: FaultServer, tmp_path: Path) -> None:
    """Every format is found by the object, and Megatron's by the index beside it."""
    source = remote(server, put(server, FORMATS[name](tmp_path)), stride=5)
    with Feeder(source, batch_size=5) as feeder:
        assert sum(lists(feeder), []) == windows(stride=5)


@pytest.mark.parametrize("dtype", [">u2", ">i4"])
def test_raw_tokens_of_the_other_byte_order(dtype: str, server: FaultServer, tmp_path: Path) -> None:
    """A dtype with a byte order is that of the object, alone and beside a file of its own dtype."""
    server.objects["bucket/b.bin"] = NUMBERS.astype(dtype).tobytes()
    path = save_npy(tmp_path / "c.npy", NUMBERS.astype(np.int64))
    with Feeder(remote(server, "b.bin", dtype=dtype, vocab=60_000), batch_size=5) as feeder:
        assert sum(lists(feeder), []) == windows()
    source = Tokens(["s3://bucket/b.bin", path], BLOCK, dtype=dtype, options=server.options)
    with Feeder(source, batch_size=5) as feeder:
        assert sum(lists(feeder), []) == windows() * 2


def test_objects_of_several_dtypes(server: FaultServer, tmp_path: Path) -> None:
    """Objects of different dtypes, and files among them, give windows of int64."""
    server.objects["bucket/c.npy"] = save_npy(tmp_path / "c.npy", NUMBERS.astype(np.int32)).read_bytes()
    path = write_raw(tmp_path / "d[1].bin", NUMBERS[:80])
    source = Tokens(["s3://bucket/a-0.bin", "s3://bucket/c.npy", path], BLOCK, options=server.options)
    with Feeder(source, batch_size=5) as feeder:
        assert sum(lists(feeder), []) == windows(NUMBERS[:300]) + windows() + windows(NUMBERS[:80])
    assert [source.key(at) for at in (1, 37, len(source) - 1)] == [
        "s3://bucket/a-0.bin[8:16]", "s3://bucket/c.npy[0:8]", f"{path}[72:80]"
    ]  # fmt: skip
    assert source[-1].tolist() == NUMBERS[72:80].tolist()


def test_documents_of_megatron(server: FaultServer, tmp_path: Path) -> None:
    """The first token of each document comes from the index, at a URL and on disk."""
    path = write_megatron(tmp_path / "train.bin", np.split(NUMBERS, [7, 7, 400]))
    for source in (Tokens(path, BLOCK), remote(server, put(server, path))):
        [documents] = source.documents
        assert documents is not None
        assert documents.tolist() == [0, 7, 7, 400, 500]
    assert remote(server).documents == [None, None]


@pytest.mark.usefixtures("small_ranges")
def test_the_windows_of_a_range_are_read_together(server: FaultServer) -> None:
    """A shuffled epoch requests each of 7 ranges once, and parts of the first ones before."""
    source = remote(server)
    assert list(source.shard_starts) == [0, 10, 20, 30, 37, 47, 57, 62]
    with Feeder(source, batch_size=4, shuffle="window:2") as feeder:
        before = server.count
        for _ in range(2):
            seen = sum(lists(feeder), [])
            assert sorted(seen) == sorted(windows(NUMBERS[:300]) + windows(NUMBERS[300:]))
            assert seen != sorted(seen)
        assert server.count - before <= 3 * 9  # the third epoch has begun


@pytest.mark.parametrize("order", [{}, {"shuffle": "window"}, {"shuffle": "window:2"}, {"shuffle": True}])
@pytest.mark.parametrize("block", [512, 2048])
def test_an_epoch_reads_hardly_more_than_the_objects(
    order: dict[str, Any], block: int, object_server: FaultServer
) -> None:
    """Whatever the order, ranges whose windows are wanted soon are read once, also at the start of an epoch."""
    size = 12 << 20
    object_server.objects = {f"bucket/a-{number}.bin": bytes(size) for number in range(2)}
    source = Tokens(["s3://bucket/a-0.bin", "s3://bucket/a-1.bin"], block, options=object_server.options)
    with Feeder(source, batch_size=64, **order) as feeder:
        object_server.requests.clear()
        assert sum(map(len, feeder)) == len(source)
        bounds = [request.headers["range"].removeprefix("bytes=").split("-") for request in object_server.requests]
    # The first batches are read by themselves, so that they come soon.
    assert sum(int(last) - int(first) + 1 for first, last in bounds) < 1.4 * 2 * size
    assert len(bounds) < 200


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_windows_at_any_address(dtype: str) -> None:
    """Windows are gathered from ranges wherever these are in memory, of which numpy's arrays may begin at any byte."""
    random, itemsize = np.random.default_rng(0), np.dtype(dtype).itemsize
    gathered, expected = at_urls.GatheredWindows(5, np.dtype(dtype), range(12)), np.empty((12, 5), dtype)
    for shift in range(4):
        memory = random.integers(256, size=shift + 40 * itemsize, dtype=np.uint8)
        part, starts, places = memory[shift:].view(dtype), random.integers(35, size=3), np.arange(3) * 4 + shift
        gathered.add(places, part.ctypes.data + starts * itemsize, [part])
        expected[places] = [part[start : start + 5] for start in starts]
    assert (gathered.windows() == expected).all()
    assert (gathered.windows(np.arange(12) == 7) == expected[7:8]).all()
    assert gathered.windows(np.zeros(12, bool)).shape == (0, 5)
    assert list(gathered) == [row.tobytes() for row in expected]


@pytest.mark.parametrize("position", [0, 1, 5, 10])
def test_a_state_goes_between_urls_and_copies(position: int, server: FaultServer, tmp_path: Path) -> None:
    """A state resumes exactly, also with a pickled copy of the source, which sends no requests when it is made."""
    options: dict[str, Any] = {"batch_size": 6, "shuffle": True}
    whole = lists(Feeder(local(server, tmp_path), **options))
    source = remote(server)
    with Feeder(source, **options) as feeder:
        assert [batch.tolist() for batch in islice(feeder, position)] == whole[:position]
        state = json.loads(json.dumps(feeder.state_dict()))
    before = server.count
    copied = pickle.loads(pickle.dumps(source))
    assert server.count == before
    with Feeder(copied, **options) as feeder:
        feeder.load_state_dict(state)
        assert lists(feeder) == whole[position:]


@pytest.mark.parametrize("changed", [{"stride": 9}, {"name": "a-0.bin"}])
def test_the_state_of_other_windows_is_refused(changed: dict[str, Any], server: FaultServer) -> None:
    """A state belongs to the same objects and stride."""
    state = Feeder(remote(server), batch_size=4).state_dict()
    with pytest.raises(StateError):
        Feeder(remote(server, **changed), batch_size=4).load_state_dict(state)


def test_a_mixture_of_urls_and_files(server: FaultServer, tmp_path: Path) -> None:
    """Tokens at URLs mix with those in files."""
    disk, web = Tokens(write_raw(tmp_path / "b.bin", NUMBERS), BLOCK), remote(server)
    for sources in ({"disk": disk, "web": web}, {"web": web, "disk": disk}):
        feeder: Feeder[Any] = Feeder(Mixture(sources, until=120), batch_size=8, seed=3)
        with feeder:
            seen = sum(lists(feeder), [])
            assert len(seen) == 120
            assert all(window in windows() + windows(NUMBERS[300:]) for window in seen)
            assert feeder.statistics().by_source == {"disk": 60, "web": 60}


def test_an_encoded_cache_keeps_windows(server: FaultServer, tmp_path: Path) -> None:
    """With an ``EncodedCache`` the second epoch and a second run read no tokens from the server."""
    cache = EncodedCache(tmp_path / "cache", max_bytes=1 << 20)
    expected = lists(Feeder(local(server, tmp_path), batch_size=6, shuffle=True))
    for run in range(2):
        with Feeder(remote(server), batch_size=6, shuffle=True, cache=cache) as feeder:
            before = server.count
            assert lists(feeder) == expected
            assert (server.count == before) == (run == 1)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_an_object_that_changes_is_noticed(server: FaultServer) -> None:
    """Windows of an object that was replaced since the source was made are errors that say so."""
    source = remote(server)
    server.objects["bucket/a-1.bin"] = bytes(400)
    with Feeder(source, batch_size=37) as feeder:
        batches = iter(feeder)
        assert next(batches).tolist() == windows(NUMBERS[:300])
        with pytest.raises(ReadError, match=r"a-1\.bin\[0:8\].*has changed"):
            next(batches)


def test_faults_are_sent_again(server: FaultServer) -> None:
    """A server that answers 503 to every third request costs no window."""
    server.schedule = lambda request: Fault(status=503) if request.number % 3 == 2 else None
    with Feeder(remote(server), batch_size=6) as feeder:
        assert sum(lists(feeder), []) == windows(NUMBERS[:300]) + windows(NUMBERS[300:])


BAD: dict[str, tuple[Callable[[Path], bytes], dict[str, Any], str]] = {
    "odd": (lambda _: bytes(range(91)) * 11, {}, "1001 bytes, which is no whole number of uint16 tokens"),
    "empty": (lambda _: b"", {}, "no tokens"),
    "text": (lambda _: b"Once upon a time\n" * 9, {}, "is text"),
    "short": (lambda _: bytes(14), {}, "has 7 tokens, and a window needs 8"),
    "vocab": (lambda _: np.full(400_000, 7, np.uint16).tobytes(), {"vocab": 7}, "token 0 is 7, and vocab=7"),
    "npy": (lambda folder: save_npy(folder / "a.npy", NUMBERS).read_bytes()[:-2], {}, "no complete .npy file"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_objects(kind: str, server: FaultServer, tmp_path: Path) -> None:
    """A damaged object is an error that names it, when the source is made."""
    make, options, message = BAD[kind]
    server.objects["bucket/bad.bin"] = make(tmp_path)
    with pytest.raises(ValueError, match=rf"s3://bucket/bad\.bin: .*{message}"):
        remote(server, "bad.bin", **options)


def test_missing_objects(server: FaultServer) -> None:
    """An object that does not exist, and a pattern without a match, are named."""
    with pytest.raises(FileNotFoundError, match=r"s3://bucket/absent\.bin"):
        remote(server, "absent.bin")
    with pytest.raises(FileNotFoundError, match=r"no shard matches 's3://bucket/b-\*\.bin'"):
        remote(server, "b-*.bin")
    with pytest.raises(ValueError, match="URL in an iterator: pass a list"):
        Tokens(iter(["s3://bucket/a-0.bin"]), BLOCK)


def test_an_index_that_cannot_be_read_is_an_error(server: FaultServer) -> None:
    """An error of the index beside a ``.bin`` is raised; a denied one means that there is none, as S3 says it."""

    def schedule(request: Request) -> Fault | None:
        return Fault(status=status) if request.key.endswith(".idx") else None

    server.schedule, status = schedule, 403
    braces = "a-{0..1}.bin"
    assert len(remote(server, braces)) == len(remote(server)) == 62
    status = 400
    with pytest.raises(OSError, match=r"a-.\.idx"):
        remote(server, braces)
    assert len(remote(server)) == 62  # the folder was listed, and has none


# --- columns of lists -------------------------------------------------------------------------------------------------


LISTS = [NUMBERS[:7].tolist(), [], *(part.tolist() for part in np.split(NUMBERS[7:], [1, 90, 400])), None]


def write_lists(path: Path, dtype: str = "uint16", rows: Any = None, **options: Any) -> Path:
    """Write lists in the column ``ids``, two rows in a row group or record batch."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = arrow.array(LISTS if rows is None else rows, arrow.list_(getattr(arrow, dtype)()))
    table = arrow.table({"text": ["a"] * len(column), "ids": column})
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=2, **options)
    else:
        with arrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


@pytest.mark.parametrize("kind", ["url", "parquet", "arrow", "without statistics"])
@pytest.mark.parametrize("dtype", ["uint16", "int64"])
def test_lists_in_a_column(kind: str, dtype: str, server: FaultServer, tmp_path: Path) -> None:
    """The lists of all rows are one stream, in which windows cross rows and row groups; empty lists have no token."""
    options = {"write_statistics": False} if kind == "without statistics" else {}
    path = write_lists(tmp_path / f"a.{'arrow' if kind == 'arrow' else 'parquet'}", dtype, **options)
    for stride in (BLOCK, 3):
        if kind == "url":
            source = remote(server, put(server, path), column="ids", stride=stride)
        else:
            source = Tokens(path, BLOCK, column="ids", stride=stride)
        for each in (source, pickle.loads(pickle.dumps(source))):
            with Feeder(each, batch_size=5, shuffle="window:2") as feeder:
                assert sorted(sum(lists(feeder), [])) == sorted(windows(stride=stride))
        assert [source[at].tolist() for at in (0, 12)] == [windows(stride=stride)[at] for at in (0, 12)]
    assert list(source.shard_starts) == [0, 3, 33, 165]


def test_a_row_group_is_read_once_for_all_its_windows(server: FaultServer, tmp_path: Path) -> None:
    """An ordered epoch requests each row group with tokens once."""
    source = remote(server, put(server, write_lists(tmp_path / "a.parquet")), column="ids")
    with Feeder(source, batch_size=4) as feeder:
        before = server.count
        assert sum(lists(feeder), []) == windows()
        assert server.count - before == 3


def test_columns_mix_with_files(server: FaultServer, tmp_path: Path) -> None:
    """A mixture has windows of a column and of raw tokens; a state belongs to the column."""
    column = Tokens(write_lists(tmp_path / "a.parquet"), BLOCK, column="ids", vocab=1 << 16)
    sources = {"column": column, "web": remote(server)}
    with Feeder(Mixture(sources, until=60), batch_size=6) as feeder:
        seen = sum(lists(feeder), [])
    assert all(window in windows() + windows(NUMBERS[300:]) for window in seen)
    other = write_lists(tmp_path / "b.parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(parquet.read_table(other).rename_columns(["text", "more"]), tmp_path / "a.parquet")
    state = Feeder(column, batch_size=4).state_dict()
    with pytest.raises(StateError):
        Feeder(Tokens(tmp_path / "a.parquet", BLOCK, column="more"), batch_size=4).load_state_dict(state)


BAD_LISTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no column": ({}, {"column": "absent"}, r"there is no column 'absent'; there are \['text', 'ids'\]"),
    "text": ({}, {"column": "text"}, "column 'text' has the type string: tokens are lists of uint8"),
    "floats": ({"dtype": "float32"}, {"column": "ids"}, "lists of"),
    "no column named": ({}, {}, "a Parquet file, of which column= names the lists of tokens"),
    "short": ({"rows": [[1, 2], [3]]}, {"column": "ids"}, "has 3 tokens, and a window needs 8"),
    "vocab": ({}, {"column": "ids", "vocab": 7}, "and vocab=7"),
    "null": ({"rows": [[1, None] * 9], "write_statistics": False}, {"column": "ids"}, "null tokens"),
}


@pytest.mark.parametrize("kind", BAD_LISTS)
def test_bad_columns(kind: str, server: FaultServer, tmp_path: Path) -> None:
    """A column without lists of tokens is an error that names the file, when the source is made."""
    written, options, message = BAD_LISTS[kind]
    path = write_lists(tmp_path / "bad.parquet", **written)
    with pytest.raises(ValueError, match=rf"s3://bucket/bad\.parquet: .*{message}"):
        remote(server, put(server, path), **options)


def test_arrow_files_at_urls_are_refused(server: FaultServer, tmp_path: Path) -> None:
    """An Arrow file at a URL, and a file that is neither, is named."""
    name = put(server, write_lists(tmp_path / "a.arrow"))
    with pytest.raises(ValueError, match=r"a\.arrow: this is not a Parquet file; Arrow files are read from disk only"):
        remote(server, name, column="ids")
    with pytest.raises(ValueError, match=r"raw\.bin.*it is no Arrow file"):
        Tokens(write_raw(tmp_path / "raw.bin", NUMBERS), BLOCK, column="ids")
