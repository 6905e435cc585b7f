"""`Files`, `ImageFolder` and `FromDataset`."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import UserDict
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from aiofeed import Feeder, Files, FolderPairs, FromDataset, ImageFolder, Source
from aiofeed.errors import ReadError
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.engine.fetch.collate import CollateBatchBuilder
from aiofeed.kernel.engine.fetch.fetcher import UNREAD
from aiofeed.kernel.engine.fetch.source import SourceFetcher
from aiofeed.kernel.runtime.buffers import HostBufferPool
from aiofeed.kernel.runtime.time_limits import JobControl


def read_all(source: Files) -> list[bytes | OSError]:
    return asyncio.run(source.read_many(range(len(source))))


def test_files_are_read_whole(tmp_path: Path) -> None:
    """The contents equal those of the files, empty and large ones included."""
    contents = [b"", b"a", b"x" * 4096, os.urandom(300_000)]
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
    source = Files(sorted(tmp_path.iterdir()))
    assert isinstance(source, Source)
    assert read_all(source) == contents
    assert asyncio.run(source.read(3)) == contents[3]
    assert source.key(2) == str(tmp_path / "2")


def test_the_group_size_does_not_change_the_contents(tmp_path: Path) -> None:
    """Fast storage is read in large groups and slow storage file by file, with the same contents."""
    for number in range(100):
        (tmp_path / f"{number:03}").write_bytes(b"%d" % number)
    source = Files(sorted(tmp_path.iterdir()))
    for seconds in (0.0, 1e-6, 1e-3, 10.0):
        source._seconds_per_file = seconds
        assert read_all(source) == [b"%d" % number for number in range(100)]


def test_read_many_returns_errors_by_file(tmp_path: Path) -> None:
    """A missing file and a directory fail their own samples only."""
    (tmp_path / "good").write_bytes(b"good")
    source = Files([tmp_path / "good", tmp_path / "missing", tmp_path, tmp_path / "good"])
    first, missing, directory, last = read_all(source)
    assert first == last == b"good"
    assert isinstance(missing, FileNotFoundError)
    assert isinstance(directory, IsADirectoryError)
    with pytest.raises(FileNotFoundError):
        asyncio.run(source.read(1))


def test_targets_are_indexed_like_the_files() -> None:
    """target(index) is the label of the file; without targets there is no such method."""
    assert Files(["a", "b"], targets=["x", "y"]).target(1) == "y"
    assert Files(["a", "b"]).target is None


def test_files_refuses_other_arguments() -> None:
    """A single path, a wrong number of targets and entries that are no paths are refused."""
    with pytest.raises(TypeError, match=r"single path 'a\.jpg'"):
        Files("a.jpg")
    with pytest.raises(ValueError, match="2 paths, but 1 target"):
        Files(["a", "b"], targets=[1])
    with pytest.raises(TypeError):
        Files([1, 2])  # type: ignore[list-item]


def test_image_folder_has_torchvisions_order(tmp_path: Path) -> None:
    """Classes and files within them are sorted like torchvision's, and other files are ignored."""
    for name in ["b/2.jpg", "b/10.PNG", "a/z/1.jpeg", "a/y.webp", "a/notes.txt", "b/sub.jpg/inner.bmp"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    folder = ImageFolder(tmp_path)
    assert folder.classes == ["a", "b"]
    assert folder.class_to_idx == {"a": 0, "b": 1}
    names = [os.path.relpath(path, tmp_path) for path in folder.paths]
    assert names == ["a/y.webp", "a/z/1.jpeg", "b/10.PNG", "b/2.jpg", "b/sub.jpg/inner.bmp"]
    assert folder.targets == [0, 0, 1, 1, 1]
    assert [folder.target(i) for i in range(len(folder))] == folder.targets


def test_follow_symlinks_of_image_folder(tmp_path: Path) -> None:
    """Linked files and folders are included or not; a link to a parent does not loop."""
    real = tmp_path / "real"
    real.mkdir()
    (real / "1.jpg").touch()
    cat = tmp_path / "root" / "cat"
    cat.mkdir(parents=True)
    (cat / "0.jpg").touch()
    (cat / "linked.jpg").symlink_to(real / "1.jpg")
    (cat / "folder").symlink_to(real)
    (cat / "loop").symlink_to(tmp_path / "root")
    (tmp_path / "root" / "dog").symlink_to(real)
    assert len(ImageFolder(tmp_path / "root", follow_symlinks=False)) == 1
    followed = ImageFolder(tmp_path / "root")
    assert followed.classes == ["cat", "dog"]
    names = [os.path.relpath(path, tmp_path / "root") for path in followed.paths]
    assert names[:2] == ["cat/0.jpg", "cat/linked.jpg"]
    assert "cat/folder/1.jpg" in names
    assert "dog/1.jpg" in names
    assert len(names) < 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, "does not exist.* exists and has no 'root'"),
        (lambda root: root.mkdir(), "no sub-folders"),
        (lambda root: (root.mkdir(), (root / "a.jpg").touch()), "1 image but no sub-folders.*aiofeed.Files"),
        (lambda root: (root / "cat").mkdir(parents=True), "class 'cat'.*has no image"),
        (lambda root: root.touch(), "not a folder"),
    ],
)
def test_a_folder_without_images_is_refused(tmp_path: Path, make, message: str) -> None:
    """The error names the folder and what it lacks."""
    root = tmp_path / "root"
    make(root)
    with pytest.raises((FileNotFoundError, NotADirectoryError), match=message) as caught:
        ImageFolder(root)
    assert str(root) in str(caught.value)


def test_the_error_of_a_relative_root_has_the_base_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the deepest existing folder and the missing part."""
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        ImageFolder("data/trian/cats")
    assert f"{str(tmp_path / 'data')!r} exists and has no 'trian'" in str(caught.value)


@pytest.mark.skipif(sys.platform == "win32", reason="a working folder cannot be deleted")
def test_the_error_in_a_deleted_folder_names_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a working folder that was deleted, the folder of the pictures is named, and that there is none to look in."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for make, name in ((lambda: ImageFolder("train"), "train"), (lambda: FolderPairs("images", "masks"), "images")):
        with pytest.raises(FileNotFoundError, match=rf"'{name}' does not exist.* working folder, which was deleted"):
            make()


@pytest.mark.parametrize("wrong", [1, b"a.jpg", None])
def test_an_entry_that_is_no_path_is_refused(wrong: object) -> None:
    """The error has the entry and its position."""
    with pytest.raises(TypeError, match=f"number 1 is {wrong!r}"):
        Files(["a.jpg", wrong])  # type: ignore[list-item]


class Column:
    """Like a pandas Series after sample() or a filter: indexed by its own index."""

    def __init__(self, labels: dict[int, int]) -> None:
        self._labels = labels

    @property
    def iloc(self) -> list[int]:
        return list(self._labels.values())

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> int:
        return self._labels[index]

    def to_numpy(self) -> np.ndarray:
        return np.array(list(self._labels.values()))


@pytest.mark.parametrize("index", [(2, 0, 1), (7, 8, 9)])
def test_pandas_targets_are_indexed_by_position(tmp_path: Path, index: tuple[int, ...]) -> None:
    """Each path gets the label of its row, whatever the index is."""
    paths = [tmp_path / f"{number}" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]))
    column: Any = Column(dict(zip(index, (0, 10, 20), strict=True)))
    [(data, labels)] = Feeder(Files(paths, column), decode=lambda data: data[0], batch_size=3)
    assert data.tolist() == [0, 1, 2]
    assert labels.tolist() == [0, 10, 20]
    with pytest.raises(TypeError, match=r"is indexed by its index.*aiofeed.Files"):
        Feeder(column, batch_size=3)


class Framed:
    """A Dataset that delegates missing attributes to a frame."""

    def __init__(self, frame: Any) -> None:
        self.frame = frame

    def __getattr__(self, name: str) -> Any:
        return getattr(self.frame, name)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return self.frame.iloc[index]


class Rows(MutableMapping[str, torch.Tensor]):
    """Like a TensorDict: a mapping by names, and a Dataset of rows."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        return {"x": index * 10}

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(3))

    def __contains__(self, key: object) -> bool:
        raise NotImplementedError

    def __setitem__(self, key: str, value: Any) -> None:
        raise NotImplementedError

    def __delitem__(self, key: str) -> None:
        raise NotImplementedError


class Sizes(torch.utils.data.Subset):  # type: ignore[type-arg]
    def __getitem__(self, index: Any) -> int:
        return len(Path(self.dataset.paths[self.indices[index]]).read_bytes())  # type: ignore[attr-defined]

    def __getitems__(self, indices: list[int]) -> list[int]:  # type: ignore[override]
        return [self[index] for index in indices]


class Lengths:
    """A Dataset over a part of a source that is no Subset."""

    def __init__(self, dataset: Files, indices: list[int]) -> None:
        self.dataset = dataset
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> int:
        return len(Path(self.dataset.paths[self.indices[index]]).read_bytes())


def test_datasets_that_resemble_refused_objects_are_accepted(tmp_path: Path) -> None:
    """An object with its own __getitem__ is a Dataset, whatever other attributes it has."""
    [batch] = Feeder(Framed(Column({7: 0, 8: 10, 9: 20})), batch_size=3)
    assert batch.tolist() == [0, 10, 20]
    [batch] = Feeder(Rows(), batch_size=3)
    assert batch["x"].tolist() == [0, 10, 20]
    paths = [tmp_path / f"{number}" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes(number))
    for part in (Sizes(Files(paths), [2, 1]), Lengths(Files(paths), [2, 1])):  # type: ignore[arg-type]
        [batch] = Feeder(part, batch_size=2)
        assert batch.tolist() == [2, 1]


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_dict_of_columns_is_refused(kind: Any) -> None:
    """It has no samples 0, 1, ...; the error has its keys."""
    with pytest.raises(TypeError, match=r"asks a source for samples 0, 1.*has the keys \['x', 'y'\]"):
        Feeder(kind(x=torch.zeros(3), y=torch.zeros(3)), batch_size=1)


class Hundreds(ImageFolder):
    def target(self, index: int) -> int:  # type: ignore[override]
        return self.targets[index] * 100


def test_a_subclass_may_define_target(tmp_path: Path) -> None:
    """The method of a subclass replaces the list of targets."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.jpg").write_bytes(b"1")
    [(_, labels)] = Feeder(Hundreds(tmp_path), decode=len, batch_size=2)
    assert labels.tolist() == [0, 100]


def test_a_subset_of_a_source_is_refused(tmp_path: Path) -> None:
    """A source has no items; the error says how to feed a part of it."""
    part = torch.utils.data.Subset(Files([tmp_path / "a"]), [0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a Subset needs items.*pass source\[indices\].*source\.split\("):
        Feeder(part, batch_size=1)


def test_a_dict_of_targets_is_refused() -> None:
    """Targets are indexed by position."""
    with pytest.raises(TypeError, match=r"targets must be one label per file.*got a dict"):
        Files(["a", "b"], {"a": 0, "b": 1})  # type: ignore[arg-type]


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self):
        return iter(range(3))


def test_getitems_is_used_if_the_dataset_has_it() -> None:
    """Without __getitems__, items are requested one by one."""
    source = FromDataset(TensorDataset(torch.arange(5)))
    assert [item[0].item() for item in source.items([3, 1])] == [3, 1]
    assert source.key(3) == "TensorDataset[3]"

    class Many(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 9

        def __getitems__(self, indices: list[int]) -> list[int]:
            return [index * 2 for index in indices]

    assert FromDataset(Many()).items([4, 2]) == [8, 4]


def test_other_objects_are_no_map_style_datasets() -> None:
    """The error for an IterableDataset names Stream; threads must be a positive int."""
    with pytest.raises(TypeError, match=r"IterableDataset.*aiofeed\.Stream"):
        FromDataset(Stream())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="__getitem__ and __len__"):
        FromDataset(object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="threads"):
        FromDataset([1, 2], threads=0)


def test_read_now_is_read_many_in_the_calling_thread(tmp_path: Path) -> None:
    """read_now has the contents and errors of read_many; its duration decides whether storage answers at once."""
    for number in range(50):
        (tmp_path / f"{number:02}").write_bytes(os.urandom(number * 1000))
    source = Files([*sorted(tmp_path.iterdir()), tmp_path / "missing"])
    assert not source.answers_at_once  # not known yet
    contents = source.read_now(range(51))
    assert contents[:50] == read_all(source)[:50]
    assert isinstance(contents[50], FileNotFoundError)
    source._seconds_per_file = 1e-5
    assert source.answers_at_once
    source._seconds_per_file = 0.01
    assert not source.answers_at_once


def test_reading_in_the_decode_threads_changes_nothing(tmp_path: Path) -> None:
    """An epoch read in decode threads equals one read through the loop, errors and bytes_read included."""
    for number in range(300):
        (tmp_path / f"{number:03}").write_bytes(b"%03d" % number * 100)
    paths = sorted(tmp_path.iterdir())

    class Always(Files):
        answers_at_once = True

    class Never(Files):
        answers_at_once = False

    epochs = []
    for kind in (Always, Never):
        feeder = Feeder(kind(paths), decode=lambda data: torch.tensor(list(data[:3])), batch_size=7)
        list(feeder)
        epochs.append([batch.tolist() for batch in feeder])
        assert feeder.statistics().bytes_read == 300 * 300
        feeder.close()
        missing = Feeder(kind([*paths, "missing"]), decode=len, batch_size=64)
        with pytest.raises(ReadError, match="missing"):
            list(missing)
        with pytest.raises(ReadError, match="missing"):
            list(missing)
    assert epochs[0] == epochs[1]


@pytest.mark.parametrize("inline", [False, True])
def test_read_many_replaces_read_and_read_now_replaces_both(tmp_path: Path, inline: bool) -> None:
    """On the loop ``read_many`` reads, in a decode job ``read_now``, and nothing else is called."""

    class Upper(Files):
        async def read(self, index: int, /) -> bytes:
            raise AssertionError

        async def read_many(self, indices: Sequence[int], /) -> list[bytes | OSError]:
            assert not inline
            return [data.upper() for data in await super().read_many(indices) if isinstance(data, bytes)]

        def read_now(self, indices: Sequence[int], /) -> list[bytes | OSError]:
            assert inline
            return [data.upper() for data in super().read_now(indices) if isinstance(data, bytes)]

    for number in range(10):
        (tmp_path / str(number)).write_bytes(b"letter %d" % number)
    source = Upper(sorted(tmp_path.iterdir()))
    fetcher = SourceFetcher(source, bytes, in_place=False)
    if inline:
        source._seconds_per_file = fetcher._sizer.seconds = 1e-6
    encoded = asyncio.run(fetcher.read(range(10))).samples
    assert (encoded[0] is UNREAD) == inline
    builder = CollateBatchBuilder(10, list, HostBufferPool(0), staged=False)
    fetcher.decode(BatchPlan(0, range(10), range(10), 0), 0, encoded, builder, JobControl(threading.Event()))
    assert builder.finish(()) == [b"LETTER %d" % number for number in range(10)]
