"""The native library reads groups of small files like ``read_file``, or leaves them to it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from aiofeed import Files, ImageFolder
from aiofeed.kernel.sources import file_io
from aiofeed.kernel.sources.file_io import (
    CAPACITY,
    LIBRARY,
    SMALL,
    SPARE,
    GroupReader,
    ReadRules,
    group_reader,
    read_file,
    read_group,
)
from tests.support.paths import ROOT
from tests.support.rewriting import rewritten

needs_library = pytest.mark.skipif(group_reader() is None, reason="the library was not built (hatch_build.py)")


@pytest.fixture
def reader() -> GroupReader:
    return GroupReader()


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(file_io, "LIBRARY", Path("/nowhere"))
    group_reader.cache_clear()
    yield
    group_reader.cache_clear()


def read(reader: GroupReader, paths: list[Path] | list[str], rules: ReadRules = ReadRules()) -> list[bytes | None]:  # noqa: B008 - frozen
    found = read_group(reader, [os.fspath(path) for path in paths], rules)
    assert found is not None
    return list(found)


def write_files(folder: Path, sizes: list[int]) -> list[Path]:
    paths = [folder / f"{number:05}" for number in range(len(sizes))]
    for path, size in zip(paths, sizes, strict=True):
        path.write_bytes(os.urandom(size))
    return paths


@needs_library
def test_paths_of_other_types(tmp_path: Path) -> None:
    """The library reads paths that Python opens, and leaves groups with other names to Python."""
    paths = write_files(tmp_path, [100] * 8)
    expected = [path.read_bytes() for path in paths]
    files = Files(paths)
    for kind in (os.fspath, Path, os.fsencode):
        files.paths = [kind(path) for path in paths]  # type: ignore[misc]
        for _ in range(2):
            assert files.read_now(range(8)) == expected
    assert read(GroupReader(), ["\ud800", *map(str, paths)]) == [None] * 9


@needs_library
def test_small_files_are_read_whole_and_in_order(reader: GroupReader, tmp_path: Path) -> None:
    """The contents are right for all sizes up to the largest, and for more bytes than a buffer has."""
    sizes = [1, 2, 4095, 4096, 4097, SMALL - 1, SMALL] * 10
    assert sum(sizes) > 2 * CAPACITY
    paths = write_files(tmp_path, sizes)
    assert read(reader, paths) == [path.read_bytes() for path in paths]
    assert read(reader, paths[:1]) == [paths[0].read_bytes()]
    assert read(reader, []) == []


@needs_library
def test_files_at_the_end_of_the_buffer(reader: GroupReader, tmp_path: Path) -> None:
    """Files that end exactly at the end of the buffer, or a byte before it, are read."""
    for last in (SMALL - 1, SMALL):
        folder = tmp_path / str(last)
        folder.mkdir()
        paths = write_files(folder, [SMALL] * 7 + [last, 5, SMALL])
        assert read(reader, paths) == [path.read_bytes() for path in paths]


@needs_library
def test_other_files_are_left_to_python(reader: GroupReader, tmp_path: Path) -> None:
    """Missing, empty, large and irregular files give None, and their neighbours are read."""
    good, large, empty = write_files(tmp_path, [10, SMALL + 1, 0])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    odd = [large, empty, pipe, tmp_path / "missing", tmp_path, Path("/dev/zero"), Path("/dev/null"), Path()]
    mixed = [path for one in odd for path in (good, one)]
    assert read(reader, mixed) == [good.read_bytes(), None] * len(odd)
    assert read(reader, [os.fspath(good), ""]) == [good.read_bytes(), None]


@needs_library
def test_a_name_with_a_nul_in_it_is_not_two_names(reader: GroupReader, tmp_path: Path) -> None:
    """Python reads the group and returns an error for the bad name."""
    good = write_files(tmp_path, [10] * 4)
    assert read(reader, [*map(str, good), f"{good[0]}\0{good[1]}"]) == [None] * 5
    source = Files([*good, f"{good[0]}\0{good[1]}"])
    assert source.read_now(range(4)) == source.read_now(range(4)) == [path.read_bytes() for path in good]
    *read_files, error = source.read_now(range(5))
    assert read_files == [path.read_bytes() for path in good]
    assert isinstance(error, OSError)
    assert "null" in str(error)


@needs_library
def test_names_of_all_kinds(reader: GroupReader, tmp_path: Path) -> None:
    """Names may have other alphabets, blanks and bytes that are no text."""
    paths = [tmp_path / name for name in ("ü", "日本", "a b\n", os.fsdecode(b"\xff\xfe"))]
    for number, path in enumerate(paths):
        path.write_bytes(b"%d" % number)
    assert read(reader, paths) == [b"0", b"1", b"2", b"3"]


@needs_library
def test_rules_are_applied(reader: GroupReader, tmp_path: Path) -> None:
    """max_bytes and follow_symlinks apply; groups below a root, where folders may be links, are left to Python."""
    [ten] = write_files(tmp_path, [10])
    link = tmp_path / "link"
    link.symlink_to(ten)
    data = ten.read_bytes()
    assert read(reader, [ten], ReadRules(max_bytes=10)) == [data]
    assert read(reader, [ten], ReadRules(max_bytes=9)) == [None]
    assert read(reader, [ten, link]) == [data, data]
    assert read(reader, [ten, link], ReadRules(follow_symlinks=False)) == [data, None]
    assert read_group(reader, [str(ten)], ReadRules(follow_symlinks=False, root=str(tmp_path))) is None


@needs_library
def test_files_under_a_writer_are_consistent_or_left(reader: GroupReader, tmp_path: Path) -> None:
    """While a writer rewrites a file, a read gives bytes of one version, or None."""
    path = tmp_path / "busy"
    states = (b"a" * SMALL, b"b" * (SMALL // 2))
    with rewritten(path, states):
        found = [data for _ in range(300) for data in read(reader, [path] * 4)]
    # A file of a paused writer looks like a short file. The two versions are never mixed.
    assert all(len(set(data)) == 1 for data in found if data is not None)


@needs_library
def test_no_descriptor_stays_open(reader: GroupReader, tmp_path: Path) -> None:
    """Files that are read, left or do not fit into the buffer are closed."""
    paths = [*write_files(tmp_path, [SMALL, 0, 5, SMALL + 1] * 20), tmp_path, tmp_path / "missing"]
    read(reader, paths)
    before = psutil.Process().num_fds()
    for _ in range(20):
        read(reader, paths)
    assert psutil.Process().num_fds() <= before


@needs_library
def test_threads_share_a_reader(reader: GroupReader, tmp_path: Path) -> None:
    """Each thread gets its files, and the reader keeps at most one buffer per concurrent call."""
    paths = write_files(tmp_path, [SMALL, 10, 3000] * 20)
    wanted = [path.read_bytes() for path in paths]
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(20):
            first = (number * 7 + turn) % 30
            if read(reader, paths[first : first + 20]) != wanted[first : first + 20]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 1 <= len(reader._spare) <= 8 < SPARE


@needs_library
def test_contents_do_not_change_with_the_next_call(reader: GroupReader, tmp_path: Path) -> None:
    """Contents are copies of the buffer."""
    one, other = write_files(tmp_path, [100, 100])
    [first] = read(reader, [one])
    read(reader, [other])
    assert first == one.read_bytes()


@needs_library
def test_files_uses_the_library_for_groups_of_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files uses the library once it knows that files are small, and stops when they become large."""
    asked: list[int] = []
    plain = GroupReader.read

    def noted(self: GroupReader, paths: list[str], flags: int, max_bytes: int) -> list[bytes | None]:
        asked.append(len(paths))
        return plain(self, paths, flags, max_bytes)

    monkeypatch.setattr(GroupReader, "read", noted)
    small, large = write_files(tmp_path, [100] * 20), tmp_path / "large"
    large.mkdir()
    source = Files([*small, *write_files(large, [3 * SMALL] * 20)])
    wanted = [Path(path).read_bytes() for path in source.paths]
    assert source.read_now(range(20)) == wanted[:20]
    assert asked == []
    assert source.read_now(range(20)) == wanted[:20]
    assert asked == [20]
    assert source.read_now(range(3)) == wanted[:3]
    assert asked == [20]
    while len(asked) < 10:
        known = len(asked)
        assert source.read_now(range(20, 40)) == wanted[20:]
        if len(asked) == known:
            break
    assert len(asked) < 10


@pytest.mark.parametrize("library", [pytest.param(True, marks=needs_library), False])
@pytest.mark.parametrize("follow", [True, False])
def test_sources_are_the_same_with_and_without_the_library(
    library: bool, follow: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Contents and errors are the same, also if files are removed or cut between two epochs."""
    if not library:
        request.getfixturevalue("without_library")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for path in write_files(tmp_path / name, [10, 2000, SMALL, SMALL + 1, 0, 70_000]):
            path.rename(path.with_suffix(".jpg"))
    source = ImageFolder(tmp_path, follow_symlinks=follow)
    wanted = [Path(path).read_bytes() for path in source.paths]
    for _ in range(3):
        assert source.read_now(range(12)) == wanted
    os.unlink(source.paths[0])
    os.truncate(source.paths[1], 7)
    found = source.read_now(range(12))
    assert isinstance(found[0], FileNotFoundError)
    assert found[0].filename == source.paths[0]
    assert found[1:] == [wanted[1][:7], *wanted[2:]]


@needs_library
@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"not a library"), lambda path: path.mkdir()])
def test_a_library_that_does_not_load_is_logged_once(
    damage: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Files are read without it, and one log line has the reason."""
    broken = tmp_path / "_native_files.so"
    damage(broken)
    monkeypatch.setattr(file_io, "LIBRARY", broken)
    monkeypatch.setattr(GroupReader.__init__, "__defaults__", (broken,))
    group_reader.cache_clear()
    try:
        source = Files(write_files(tmp_path, [10] * 5))
        for _ in range(3):
            assert source.read_now(range(5)) == [read_file(path) for path in source.paths]
        [record] = [record for record in caplog.records if "cannot be used" in record.getMessage()]
        assert "_native_files.so" in record.getMessage()
    finally:
        group_reader.cache_clear()


@needs_library
def test_a_library_of_another_release_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library built for another interface is refused."""
    monkeypatch.setattr(file_io, "_VERSION", -1)
    with pytest.raises(OSError, match="another release"):
        GroupReader()


@needs_library
def test_the_library_is_built_from_its_source(tmp_path: Path) -> None:
    """The build makes it without the other library, and leaves it out on request."""
    for name in ("hatch_build.py", "aiofeed/kernel/sources/native_files.c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    built = tmp_path / LIBRARY.relative_to(ROOT)

    def build(**variables: str) -> subprocess.CompletedProcess[str]:
        where = {"PATH": "/usr/bin:/bin", "AIOFEED_BUILD_NATIVE_JPEG": "0", **variables}
        command = [sys.executable, "hatch_build.py"]
        return subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True, check=False)

    done = build()
    assert str(LIBRARY.relative_to(ROOT)) in done.stdout
    assert "AIOFEED_BUILD_NATIVE_JPEG=0" in done.stderr
    [data] = read(GroupReader(built), [ROOT / "pyproject.toml"])
    assert data == (ROOT / "pyproject.toml").read_bytes()
    done = build(AIOFEED_BUILD_NATIVE_FILES="0")
    assert "AIOFEED_BUILD_NATIVE_FILES=0" in done.stderr
    assert done.returncode == 1
    assert not built.exists()


def test_the_build_hook_loads_by_path() -> None:
    """A builder loads it under a name that is not in `sys.modules`."""
    spec = importlib.util.spec_from_file_location("hatch_build_by_path", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert str(LIBRARY.relative_to(ROOT)) in [library.path for library in module.LIBRARIES]
