"""`TarShards`: names, fields, headers of all kinds, and damaged files."""

from __future__ import annotations

import asyncio
import bz2
import gzip
import io
import pickle
import tarfile
import warnings
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from aiofeed import Source, TarShards
from aiofeed.reports.commands.cli import main
from aiofeed.shards.index import ShardIndex
from tests.support.examples import examples
from tests.support.shard_files import members_of, numbered, tar_of, write_tar


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Two shards with 30 and 20 samples of a jpg and a cls."""
    write_tar(tmp_path / "a-000.tar", members_of(numbered(0, 30)))
    write_tar(tmp_path / "a-001.tar", members_of(numbered(30, 20)))
    return tmp_path


def test_random_access_equals_sequential_content(tars: Path, read_all: Any) -> None:
    """In any order, samples are those that a pass over the shards gives."""
    source = TarShards(f"{tars}/a-{{000..001}}.tar")
    expected = list(numbered(0, 50).values())
    assert isinstance(source, Source)
    assert read_all(source) == expected
    order = [49, 3, 30, 29, 0, 3]
    assert asyncio.run(source.read_many(order)) == [expected[index] for index in order]
    assert asyncio.run(source.read(31)) == expected[31]
    assert source.key(31) == f"{tars}/a-001.tar/d/000031"


def test_data_and_target(tars: Path, read_all: Any) -> None:
    """`data` gives the bytes of a field, `target` an int of another, known without reading."""
    source = TarShards(tars / "a-*.tar", data="png;jpg", target="cls")
    assert read_all(source) == [sample["jpg"] for sample in numbered(0, 50).values()]
    assert [source.target(index) for index in range(50)] == list(range(50))
    named = TarShards(tars / "a-*.tar", data=["cls"], target="cls", to_target=bytes.decode)
    assert read_all(named)[7] == {"cls": b"7"}
    assert named.target(7) == "7"
    assert TarShards(tars / "a-000.tar").target is None


def test_large_and_missing_targets(tmp_path: Path, read_all: Any) -> None:
    """Targets have any length; a sample without one fails, and the others do not."""
    caption = b"caption " * 1000
    members = [("a.jpg", b"1"), ("a.txt", caption), ("b.jpg", b"2"), ("c.txt", b""), ("c.jpg", b"3")]
    write_tar(tmp_path / "x.tar", members)
    source = TarShards(tmp_path / "x.tar", "jpg", "txt", to_target=bytes.decode)
    assert read_all(source) == [b"1", b"2", b"3"]
    assert (source.target(0), source.target(2)) == (caption.decode(), "")
    with pytest.raises(ValueError, match=r"x\.tar: the sample 'b' has no 'txt'"):
        source.target(1)


def test_the_first_alternative_is_preferred(tmp_path: Path, read_all: Any) -> None:
    """Of several fields that a sample has, `data` and `target` are the first in the argument, not in the file."""
    members = [("a.png", b"p"), ("a.jpg", b"j"), ("a.txt", b"1"), ("a.cls", b"2"), ("a.n", b"3"), ("b.n", b"4")]
    write_tar(tmp_path / "x.tar", [*members, ("b.png", b"q")])
    for target, expected in (("cls;txt;n", [2, 4]), ("txt;cls;n", [1, 4])):
        source = TarShards(tmp_path / "x.tar", "jpg;png", target)
        assert read_all(source) == [b"j", b"q"]
        assert [source.target(0), source.target(1)] == expected


def test_grouping_is_that_of_webdataset(tmp_path: Path, read_all: Any) -> None:
    """The key ends at the first dot of the last part; hidden files, metadata and names without dot are left out."""
    members = [
        ("a.b/1.seg.PNG", b"1"),
        ("a.b/1.txt", b"2"),
        ("README", b"x"),
        ("__index__/a.txt", b"x"),
        ("__meta__.json", b"3"),
        ("a.b/.hidden", b"x"),
        ("a.b/1.jpg", b"4"),
        ("c/1.txt", b"5"),
        ("a.b/1.txt", b"6"),
    ]
    write_tar(tmp_path / "x.tar", members)
    source = TarShards(tmp_path / "x.tar")
    wanted = [{"seg.png": b"1", "txt": b"2"}, {"json": b"3"}, {"jpg": b"4"}, {"txt": b"5"}, {"txt": b"6"}]
    assert read_all(source) == wanted
    assert [source.key(index).rpartition("x.tar/")[2] for index in (0, 4)] == ["a.b/1", "a.b/1"]


names = st.text(st.characters(codec="utf-8", exclude_characters="\0/.", exclude_categories=["Cs"]), min_size=1)
paths = st.lists(names.filter(lambda name: not name.startswith("__")), min_size=1, max_size=8).map("/".join)


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    keys=st.lists(paths, unique=True, min_size=1, max_size=8),
    sizes=st.lists(st.integers(0, 1600), min_size=3, max_size=3),
    form=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    records=st.dictionaries(st.sampled_from(["comment", "mtime", "vendor.key"]), names, max_size=2),
)
def test_any_names_sizes_and_headers(
    tmp_path: Path, keys: list[str], sizes: list[int], form: int, records: dict[str, str]
) -> None:
    """Names of any length and script, sizes around a block and further pax records are read as `tarfile` reads them."""
    path = tmp_path / "any.tar"
    with tarfile.open(path, "w", format=form) as tar:
        folder = tarfile.TarInfo("folder.d")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for number, key in enumerate(keys):
            for size, field in zip(sizes, ("jpg", "cls", "x.y"), strict=True):
                info = tarfile.TarInfo(f"{key}.{field}")
                info.size = size
                info.pax_headers = {name: text for name, text in records.items() if name != "mtime"}
                info.mtime = 1.5 if "mtime" in records else 1
                tar.addfile(info, io.BytesIO(bytes([number]) * size))
    found = asyncio.run(TarShards(path).read_many(range(len(keys))))
    with tarfile.open(path) as tar:
        contents = [tar.extractfile(each).read() for each in tar if each.isreg()]  # type: ignore[union-attr]
    assert [data for sample in found for data in sample.values()] == contents
    assert {tuple(sample) for sample in found} == {("jpg", "cls", "x.y")}


def test_other_kinds_of_members(tmp_path: Path, read_all: Any) -> None:
    """Links, folders and FIFOs are left out; sizes to the base 256 and V7 headers are read."""
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for number, kind in enumerate((tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)):
            info = tarfile.TarInfo(f"{number}.jpg")
            info.type, info.linkname = kind, "9.jpg"
            info.size = 700 if kind == tarfile.LNKTYPE else 0  # the size of the file that it links to
            tar.addfile(info)
        info = tarfile.TarInfo("9.jpg")
        info.size = 3
        header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
        header[124:136] = b"\x80" + (3).to_bytes(11, "big")
        header[257:265] = bytes(8)
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        tar.fileobj.write(bytes(header) + b"abc" + bytes(509))
    assert read_all(TarShards(tmp_path / "x.tar")) == [{"jpg": b"abc"}]


def test_sizes_in_pax_headers(tmp_path: Path, read_all: Any) -> None:
    """A size in a pax header replaces that of the next member only; a negative one is an error."""

    def write(size: str) -> Path:
        members = b""
        for name, headers, body in (("a.bin", {"size": size}, b"b" * 600), ("b.jpg", {}, b"j" * 3)):
            info = tarfile.TarInfo(name)
            info.pax_headers = headers
            info.size = 0 if headers else len(body)
            members += info.tobuf(tarfile.PAX_FORMAT) + body + bytes(-len(body) % 512)
        (tmp_path / "x.tar").write_bytes(members + bytes(1024))
        return tmp_path / "x.tar"

    assert read_all(TarShards(write("600"), "jpg"))[1] == b"jjj"
    with pytest.raises(ValueError, match=r"x\.tar: the tar file is damaged: the size of 'a\.bin' is no number"):
        TarShards(write("-600"))


def test_empty_shards(tars: Path, read_all: Any) -> None:
    """A shard without samples adds none; only such shards are an error."""
    write_tar(tars / "empty.tar", [])
    source = TarShards([tars / "empty.tar", tars / "a-001.tar", tars / "empty.tar"])
    assert len(read_all(source)) == len(source) == 20
    with pytest.raises(ValueError, match=r"empty\.tar and all other shards are without samples"):
        TarShards(tars / "empty.tar")
    (tars / "zero.tar").touch()
    with pytest.raises(ValueError, match=r"zero\.tar: the tar file is truncated"):
        TarShards(tars / "zero.tar")


def joined(tars: Path) -> bytes:
    """Three tar files, of which the second has no samples, after each other."""
    return (tars / "a-000.tar").read_bytes() + tar_of([]) + (tars / "a-001.tar").read_bytes()


@pytest.mark.parametrize("place", ["file", "object"])
def test_joined_shards(tars: Path, read_all: Any, place: str, server: Any) -> None:
    """Tar files joined by `cat` have the samples of all of them, in a file and at a URL."""
    url, options = str(tars / "both.tar"), None
    (tars / "both.tar").write_bytes(joined(tars))
    if place == "object":
        server.objects["bucket/both.tar"] = joined(tars)
        url, options = "s3://bucket/both.tar", server.options
    for _ in range(2):  # the second time, the index is that of the cache
        assert read_all(TarShards(url, options=options)) == list(numbered(0, 50).values())
    source = TarShards(url, "jpg", "cls", options=options)
    assert [source.target(index) for index in range(50)] == list(range(50))


def test_an_index_of_the_first_of_joined_shards(tars: Path, read_all: Any, caplog: pytest.LogCaptureFixture) -> None:
    """An index that ends with the first of joined tar files does not fit, and one of all of them does."""
    assert main(["index", str(tars / "a-000.tar")]) == 0
    index = (tars / "a-000.tar.aiofeed").read_bytes()
    (tars / "both.tar").write_bytes(joined(tars))
    fields, described = ShardIndex.from_bytes(index)
    described["size"] = len(joined(tars))
    (tars / "both.tar.aiofeed").write_bytes(fields.to_bytes(**{**described, "version": "another"}))
    assert read_all(TarShards(tars / "both.tar")) == list(numbered(0, 50).values())
    assert "both.tar.aiofeed does not fit its shard, which is indexed anew: other members follow" in caplog.text


@pytest.mark.parametrize("left", [100, 512, 700, 1024, 5000])
def test_a_truncated_last_shard_of_joined_ones_is_named(tars: Path, left: int) -> None:
    """A second tar file that ends in a header, in a member or without its end mark is an error."""
    first = (tars / "a-000.tar").read_bytes()
    (tars / "both.tar").write_bytes(first + (tars / "a-001.tar").read_bytes()[:left])
    with pytest.raises(ValueError, match=r"both\.tar: the tar file is truncated"):
        TarShards(tars / "both.tar")


def test_other_data_behind_a_shard(tars: Path, read_all: Any) -> None:
    """Zeros may follow the end mark, of any number; data that is no tar file is an error with its place."""
    data = (tars / "a-001.tar").read_bytes()
    (tars / "zeros.tar").write_bytes(data + bytes(700))
    assert len(read_all(TarShards(tars / "zeros.tar"))) == 20
    (tars / "both.tar").write_bytes(data + gzip.compress(data))
    with pytest.raises(ValueError, match=rf"both\.tar: .* there is no header at byte {len(data)}"):
        TarShards(tars / "both.tar")


@pytest.mark.parametrize("left", [100, 512, 700, 1024, 5000])
def test_a_truncated_shard_is_named(tars: Path, left: int) -> None:
    """A shard that ends in a header, in a member or between members is an error with its name."""
    data = (tars / "a-000.tar").read_bytes()
    (tars / "cut.tar").write_bytes(data[:left])
    with pytest.raises(ValueError, match=r"cut\.tar: the tar file is truncated"):
        TarShards([tars / "a-001.tar", tars / "cut.tar"])


def test_damaged_and_foreign_files(tars: Path) -> None:
    """A header with a wrong checksum, another file, and compressed tars are errors that say so."""
    data = bytearray((tars / "a-000.tar").read_bytes())
    data[512 + 5] ^= 1
    (tars / "bad.tar").write_bytes(data)
    with pytest.raises(ValueError, match=r"bad\.tar: the tar file is damaged: there is no header at byte 512"):
        TarShards(tars / "bad.tar")
    (tars / "text.tar").write_bytes(b"something else" * 100)
    with pytest.raises(ValueError, match=r"text\.tar: this is not a tar file"):
        TarShards(tars / "text.tar")
    (tars / "text.tar").write_bytes(b"path,label\na.jpg,1\n")
    with pytest.raises(ValueError, match=r"text\.tar: this is not a tar file"):
        TarShards(tars / "text.tar")
    for packed in (gzip.compress(bytes(data)), gzip.compress(bytes(10_240)), bz2.compress(b"")):
        (tars / "packed.tar").write_bytes(packed)
        with pytest.raises(ValueError, match=r"compressed with (gzip|bzip2), which has no random access: decompress"):
            TarShards(tars / "packed.tar")


def test_sparse_members_are_refused(tars: Path) -> None:
    """A sparse member in GNU's or pax form is an error."""
    info = tarfile.TarInfo("a.jpg")
    info.type = b"S"
    (tars / "gnu.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    info = tarfile.TarInfo("a.jpg")
    info.pax_headers = {"GNU.sparse.major": "1"}
    (tars / "pax.tar").write_bytes(info.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    for name in ("gnu", "pax"):
        with pytest.raises(ValueError, match=rf"{name}\.tar: the member at byte \d+ is sparse"):
            TarShards(tars / f"{name}.tar")


def test_two_members_of_a_field(tmp_path: Path) -> None:
    """A sample with the same field twice is an error with its key."""
    write_tar(tmp_path / "x.tar", [("a.jpg", b"1"), ("a.JPG", b"2")])
    with pytest.raises(ValueError, match=r"x\.tar: the sample 'a' has two members 'jpg'"):
        TarShards(tmp_path / "x.tar")


def test_missing_fields(tmp_path: Path, read_all: Any) -> None:
    """A field that no sample has is an error at once; one that a sample lacks fails that sample."""
    write_tar(tmp_path / "x.tar", [("a.jpg", b"1"), ("a.cls", b"2"), ("b.cls", b"3")])
    for argument in ("data", "target"):
        with pytest.raises(ValueError, match=rf"{argument}=\): no sample has 'png'; there are \['cls', 'jpg'\]"):
            TarShards(tmp_path / "x.tar", **{argument: "png"})
    with pytest.raises(ValueError, match="no sample has 'png'"):
        TarShards(tmp_path / "x.tar", ["jpg", "png"])
    first, second = read_all(TarShards(tmp_path / "x.tar", "jpg"))
    assert first == b"1"
    assert str(second) == f"{tmp_path}/x.tar: the sample 'b' has no 'jpg'"
    first, second = read_all(TarShards(tmp_path / "x.tar", ["jpg", "cls"]))
    assert first == {"jpg": b"1", "cls": b"2"}
    assert "has no 'jpg', but ['cls']" in str(second)


def test_arguments_are_checked(tars: Path) -> None:
    """Wrong arguments are errors that name them."""
    with pytest.raises(TypeError, match=r"TarShards\(data=\)"):
        TarShards(tars / "a-000.tar", data=[1])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"TarShards\(data=\)"):
        TarShards(tars / "a-000.tar", data=[])
    with pytest.raises(TypeError, match=r"TarShards\(target=\)"):
        TarShards(tars / "a-000.tar", target=["cls"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"to_target"):
        TarShards(tars / "a-000.tar", target="cls", to_target=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'fields'"):
        TarShards(tars / "a-000.tar", fields=3)  # type: ignore[call-arg]
    with pytest.raises(IndexError):
        TarShards(tars / "a-000.tar").key(-1)


def test_a_source_is_pickled_with_its_index(tars: Path, read_all: Any) -> None:
    """A copy in another process reads the same samples without opening the shards again."""
    source = TarShards(tars / "a-*.tar", "jpg", "cls")
    copy = pickle.loads(pickle.dumps(source))
    assert read_all(copy) == read_all(source)
    assert copy.target(33) == 33
    assert copy.fingerprint() == source.fingerprint()


def test_fingerprint(tars: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The fingerprint is the same in another folder, and another for other samples or fields."""
    moved = tmp_path_factory.mktemp("moved")
    for name in ("a-000.tar", "a-001.tar"):
        (moved / name).write_bytes((tars / name).read_bytes())
    known = TarShards(tars / "a-*.tar").fingerprint()
    assert TarShards(moved / "a-*.tar").fingerprint() == known
    assert TarShards(tars / "a-*.tar", "jpg").fingerprint() != known
    renamed = {key.replace("d/", "e/"): sample for key, sample in numbered(0, 30).items()}
    write_tar(moved / "a-000.tar", members_of(renamed))
    assert TarShards(moved / "a-*.tar").fingerprint() != known


@pytest.mark.integration
def test_shards_of_webdataset(tmp_path: Path, read_all: Any) -> None:
    """Samples of shards that WebDataset writes are those that it reads."""
    webdataset = pytest.importorskip("webdataset")
    for shard in range(2):
        with webdataset.TarWriter(str(tmp_path / f"{shard}.tar")) as writer:
            for number in range(30):
                fields = {"jpg.bin": bytes(number), "cls": number, "json": {"text": "é" * number}, "TXT": "ü"}
                writer.write({"__key__": f"é.{'x' * 4 * number}/{shard}/{number:03}".replace(".", "-"), **fields})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = list(webdataset.WebDataset([str(path) for path in sorted(tmp_path.iterdir())], shardshuffle=False))
    source = TarShards(tmp_path / "*.tar")
    known = [{name: data for name, data in each.items() if not name.startswith("__")} for each in expected]
    assert read_all(source) == known
    assert [source.key(at).partition(".tar/")[2] for at in range(60)] == [each["__key__"] for each in expected]
