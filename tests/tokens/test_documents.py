"""``Documents``: the documents of token files of every format, on disk and at URLs, and what plans make of them."""

from __future__ import annotations

import gzip
import importlib.util
import json
import pickle
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiofeed
from aiofeed import Documents, Feeder, Pack
from aiofeed.tokens import at_urls, bounds
from tests.support.fault_server import FaultServer, start_obstore
from tests.support.token_files import write_header, write_megatron, write_raw

EOT = 7
RANDOM = np.random.default_rng(0)
TEXTS = [RANDOM.integers(10, 1000, size) for size in RANDOM.integers(0, 30, 60)]
"""Documents without separators, some of them empty."""


def ended(texts: Sequence[Any]) -> list[list[int]]:
    return [[*text.tolist(), EOT] for text in texts]


def begun(texts: Sequence[Any]) -> list[list[int]]:
    return [[EOT, *text.tolist()] for text in texts]


def joined(texts: Sequence[list[int]]) -> list[int]:
    return sum(texts, [])


def raw(folder: Path) -> Any:
    """Two files; the second one begins within a document, which ends with the first file."""
    write_raw(folder / "x-0.bin", joined(ended(TEXTS[:20]))[:-1])
    write_raw(folder / "x-1.bin", joined(ended(TEXTS[20:])))
    texts = [text for text in (*ended(TEXTS[:19]), TEXTS[19].tolist(), *ended(TEXTS[20:])) if text]
    return "x-*.bin", {"separator": EOT}, texts


def llm_c(folder: Path) -> Any:
    """Separators begin documents."""
    write_header(folder / "x-0.bin", joined(begun(TEXTS[:20])))
    write_header(folder / "x-1.bin", joined(begun(TEXTS[20:])))
    return "x-*.bin", {"separator": EOT}, begun(TEXTS)


def rest_of_llm_c(folder: Path) -> Any:
    """A file that begins within a document."""
    write_header(folder / "x.bin", [11, 12, *joined(begun(TEXTS))])
    return "x.bin", {"separator": EOT, "at_start": True}, [[11, 12], *begun(TEXTS)]


def megatron(folder: Path) -> Any:
    write_megatron(folder / "x.bin", TEXTS)
    return "x.bin", {}, [text.tolist() for text in TEXTS if len(text)]


def olmo(folder: Path) -> Any:
    """Raw tokens with the name of NumPy files, and the lines of dolma beside them."""
    for number, part in enumerate((TEXTS[:20], TEXTS[20:])):
        write_raw(folder / f"part-{number}.npy", joined(ended(part)), "uint32")
        ends = np.cumsum([len(text) + 1 for text in part]).tolist()
        lines = [f'{start},{end},id-{end},"a, b.jsonl",{end}' for start, end in zip([0, *ends], ends, strict=False)]
        (folder / f"part-{number}.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return "part-*.npy", {"dtype": "uint32"}, ended(TEXTS)


def parquet(folder: Path) -> Any:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    for number, part in enumerate((TEXTS[:20], TEXTS[20:])):
        table = pa.table({"ids": pa.array([text.tolist() for text in part], pa.list_(pa.int32()))})
        pyarrow.parquet.write_table(table, folder / f"x-{number}.parquet", row_group_size=7)
    return "x-*.parquet", {"column": "ids"}, [text.tolist() for text in TEXTS if len(text)]


FORMATS: dict[str, Callable[[Path], Any]] = {
    each.__name__: each for each in (raw, llm_c, rest_of_llm_c, megatron, olmo, parquet)
}


def opened(folder: Path, name: str, options: Any, server: FaultServer | None = None) -> Documents:
    if server is None:
        return Documents(f"{folder}/{name}", **options)
    server.objects = {f"bucket/{path.name}": path.read_bytes() for path in folder.iterdir()}
    return Documents(f"s3://bucket/{name}", options=server.options, **options)


@pytest.fixture(scope="module", autouse=True)
def storage_started() -> None:
    """Start obstore's threads, if it is installed: they keep their descriptors."""
    if importlib.util.find_spec("obstore"):
        start_obstore()


@pytest.fixture(params=["disk", "URLs"])
def server(request: pytest.FixtureRequest) -> FaultServer | None:
    """A server of objects, or none."""
    return request.getfixturevalue("object_server") if request.param == "URLs" else None


@pytest.mark.usefixtures("arrow_started")
@pytest.mark.parametrize("kind", FORMATS)
def test_documents_are_those_that_were_written(
    kind: str, tmp_path: Path, server: FaultServer | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each format, on disk and at URLs: their tokens, lengths and parts, also in another process."""
    monkeypatch.setattr(bounds, "SCAN_TOKENS", 64)
    name, options, texts = FORMATS[kind](tmp_path)
    source = opened(tmp_path, name, options, server)
    assert source.lengths("tokens").tolist() == list(map(len, texts))
    for each in (source, pickle.loads(pickle.dumps(source))):
        with Feeder(each[::-1], batch_size=3, collate_fn=list) as feeder:
            found = [sample for batch in feeder for sample in batch]
        assert [sample.tolist() for sample in found] == texts[::-1]
        assert {sample.dtype for sample in found} == {np.dtype(np.int64)}
    assert source[-1].tolist() == texts[-1]
    assert source.key(0).endswith(f"[0:{len(texts[0])}]")


@pytest.mark.usefixtures("arrow_started")
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("plan", [{}, {"split": False, "on_oversize": "truncate", "separator": 3, "pad": 4}])
def test_packed_documents_are_those_of_a_list(
    kind: str, plan: Any, tmp_path: Path, server: FaultServer | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches, order and resume on other ranks equal those of a Dataset with the same documents."""
    monkeypatch.setattr(at_urls, "RANGE_BYTES", 64)
    name, options, texts = FORMATS[kind](tmp_path)
    source = opened(tmp_path, name, options, server)
    lists: Any = [np.array(text) for text in texts]
    made: dict[str, Any] = {"batch_size": Pack([*map(len, texts)], context=16, rows=2, **plan), "shuffle": True}
    of_source = {**made, "batch_size": Pack(context=16, rows=2, **plan)}
    with Feeder(source, **of_source) as feeder, Feeder(lists, **made) as expected:
        for _ in range(2):
            assert list(map(plain, feeder)) == list(map(plain, expected))
        halves = [list(map(plain, islice(each, 4))) for each in (feeder, expected)]
        assert halves[0] == halves[1]
        state = json.loads(json.dumps(feeder.state_dict()))
        wanted = [*map(plain, rest(lists, made, expected.state_dict()))]
    assert [*map(plain, rest(source, of_source, state))] == wanted


def rest(source: Any, options: Any, state: Any) -> list[Any]:
    """The batches of two ranks after a state, rank by rank."""
    found = []
    for rank in (0, 1):
        with Feeder(source, shard=(rank, 2), **options) as feeder:
            feeder.load_state_dict(state)
            found += list(feeder)
    return found


def plain(batch: Any) -> dict[str, Any]:
    return {name: each.tolist() if hasattr(each, "tolist") else each for name, each in batch.items()}


@pytest.mark.parametrize("shuffle", [True, "window", "keyed"])
def test_documents_are_padded(shuffle: Any, tmp_path: Path, server: FaultServer | None) -> None:
    """Budgets and buckets need no lengths, and each document comes once."""
    name, options, texts = raw(tmp_path)
    source = opened(tmp_path, name, options, server)
    sizes: list[Any] = [aiofeed.TokenBudget(max_tokens=64), aiofeed.Buckets(boundaries=[9], batch_sizes=[4, 2])]
    for size in sizes if shuffle is True else [4]:
        with Feeder(source, batch_size=size, shuffle=shuffle, collate_fn=aiofeed.pad_collate()) as feeder:
            for _ in range(2):
                rows = [(row, mask) for batch in feeder for row, mask in zip(*batch, strict=True)]
                assert sorted(row[mask.bool()].tolist() for row, mask in rows) == sorted(texts)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (None, r"nothing says where the documents of .*x\.npy end: .*x\.csv\.gz.* Pass separator="),
        ("0,5\n5,11", r"x\.csv\.gz does not describe the 10 tokens"),
        ("0,5\n6,10", r"x\.csv\.gz does not describe the 10 tokens"),
        ("1,10", r"x\.csv\.gz does not describe the 10 tokens"),
        ("a,b", r"x\.csv\.gz"),
    ],
)
def test_a_description_that_does_not_fit(
    lines: str | None, message: str, tmp_path: Path, server: FaultServer | None
) -> None:
    """What is missing or wrong is an error that names the file, when the source is made."""
    write_raw(tmp_path / "x.npy", range(10))
    if lines is not None:
        (tmp_path / "x.csv.gz").write_bytes(gzip.compress(lines.encode()))
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, "x.npy", {"dtype": "uint16"}, server)


def test_wrong_arguments(tmp_path: Path) -> None:
    """A separator that is in no file, or no token, is an error."""
    write_raw(tmp_path / "x.bin", range(10))
    with pytest.raises(ValueError, match=r"separator=77: .*x\.bin and the other files have no such token"):
        Documents(tmp_path / "x.bin", 77)
    with pytest.raises(TypeError, match=r"Documents\(separator=...\)"):
        Documents(tmp_path / "x.bin", "eos")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"y-\*\.bin does not exist"):
        Documents(f"{tmp_path}/y-*.bin", 0)


def test_files_of_several_dtypes(tmp_path: Path) -> None:
    """They cannot be gathered together; the batches are the same."""
    paths = [
        write_raw(tmp_path / "a.bin", [1, 2, 0, 3, 0]),
        write_header(tmp_path / "b.bin", [4, 0], "uint32", magic=20240801),
    ]
    paths[1].write_bytes(paths[1].read_bytes()[:4] + (7).to_bytes(4, "little") + paths[1].read_bytes()[8:])
    with Feeder(Documents(paths, 0), batch_size=Pack(context=7, rows=1)) as feeder:
        [batch] = feeder
    assert batch["tokens"].tolist() == [[1, 2, 0, 3, 0, 4, 0]]
