"""Files on a file system, read through aiofiles with one executor job per group instead of three per file."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aiofiles.ospath import wrap  # type: ignore[attr-defined]

from aiofeed import _load_addon
from aiofeed.kernel.core.formatting import shown
from aiofeed.kernel.core.statistics import StorageStatistics
from aiofeed.kernel.core.types import public
from aiofeed.kernel.core.validation import check_bool, check_positive_int, counted, explain_arguments
from aiofeed.kernel.sampling.schedule import common_folder, fingerprint
from aiofeed.kernel.sources.file_io import (
    MAX_BYTES,
    SMALL,
    Content,
    ReadRules,
    evenly,
    group_reader,
    local_path,
    read_file,
    read_group,
)
from aiofeed.kernel.sources.subset import IndexedSource

if TYPE_CHECKING:
    from aiofeed.kernel.sources.dataset import MapDataset

# The target duration of reading a group. An executor job costs about 60 us, and a slow file delays its group only.
GROUP_S = 0.005
# The maximum number of files in a group, so that a batch is read in several groups.
GROUP_MOST = 64
# The minimum number of files for which the native library is faster.
GROUP_LEAST = 4
# A file that takes less time was in the page cache, even on a busy machine.
AT_ONCE_S = 0.0005


@public
@explain_arguments({"decode": "pass it to Feeder", "transform": "pass it to Feeder", "labels": "pass targets="})
class Files(IndexedSource):
    """One sample per regular file, or per object at a URL; or one per tuple of them.

    Example:
        ```python
        from pathlib import Path

        import aiofeed

        paths = sorted(Path("photos").rglob("*.jpg"))
        photos = aiofeed.Files(paths, targets=[path.parent.name == "dog" for path in paths])
        decode = aiofeed.DecodeImage(size=224)
        feeder = aiofeed.Feeder(photos, decode=decode, batch_size=32, shuffle=True)
        ```

    Args:
        paths: The files in order, as ``str`` or ``os.PathLike``; or URLs of s3://, gs://, az://, http(s):// or file://.
            Or tuples of these, all of one length: a sample is then a tuple of bytes, and its key names all its files.
        targets: One label per sample, in the same order; a sample is then ``(decoded, target)``. May be columns of a
            pandas ``DataFrame``, as in ``Files(frame["path"], frame["label"])``; their index is ignored.
        root: The folder that ``paths`` are relative to, for lists from untrusted origins: absolute paths and paths with
            ``..`` are refused.
        follow_symlinks: Whether a file may be a symbolic link. If False, reading a link is an error. With ``root``, so
            is a linked folder below it, and the constructor checks both (one ``lstat`` per file).
        max_bytes: The maximum size of a file; a larger one is an error before any of it is read.
        store: An obstore store in which ``paths`` are keys, or URLs whose bucket is ignored. Default: made of the URLs,
            with the usual environment variables and configuration files.
        options: Arguments of ``obstore.store.from_url``, such as ``{"endpoint": ..., "region": ...}``.

    URLs need ``pip install "aiofeed[objects]"``. ``root`` may be a URL, too.

    Attributes:
        paths: The path of each file; with tuples, of all files of sample 0, then of sample 1, ...

    Raises:
        TypeError: ``paths`` is a single path, an entry is not a path, or ``targets`` is a dict.
        ValueError: ``targets`` has another length, tuples have different lengths, a path leads out of ``root``, or a
            URL cannot be read.
    """

    target: Callable[[int], Any]
    paths: Sequence[str]
    root: str | None
    # The number of files of a sample that is a tuple.
    _width: int | None = None

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str] | Sequence[str | os.PathLike[str]]],
        targets: Sequence[Any] | MapDataset[Any] | None = None,
        *,
        root: str | os.PathLike[str] | None = None,
        follow_symlinks: bool = True,
        max_bytes: int = MAX_BYTES,
        store: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(paths, str | bytes | os.PathLike):
            raise TypeError(f"Files needs a list of paths, got the single path {paths!r}; ImageFolder reads a folder")
        check_bool("follow_symlinks", follow_symlinks)
        self.root = None if root is None else os.fspath(root)
        folder = None if self.root is None else local_path(self.root)
        at_url = store is not None or (self.root is not None and folder is None)
        if folder is not None:
            self.root = folder
        self._rules = ReadRules(check_positive_int("max_bytes", max_bytes), follow_symlinks, self.root)
        # An ``ObjectList``, for paths that are URLs.
        self._objects: Any = None
        paths = paths if isinstance(paths, Sequence) else list(paths)
        if len(paths) and isinstance(paths[0], tuple | list):
            self._width, paths = len(paths[0]), _flattened(paths)
        first: Any = paths[0] if len(paths) else None
        at_url = (isinstance(first, str) and local_path(first) is None) or at_url
        self.paths: Sequence[str]
        located: Any = paths
        if hasattr(located, "is_local"):  # an ObjectList, as the paths of other sources may be
            self.paths, self._objects = located, None if located.is_local else located
        elif at_url:
            self.paths = self._objects = _load_addon("objects_of", "a URL")(paths, self.root, store, options)
        else:
            self.paths = self._local_paths(paths, follow_symlinks, options)
        targets = None if targets is None else _as_sequence(targets)
        self.targets: Sequence[Any] | None = targets
        if targets is not None:
            if len(targets) != len(self):
                paths = counted(len(self), "path" if self._width is None else "sample")
                raise ValueError(f"{paths}, but {counted(len(targets), 'target')}")
            if type(self).target is None:  # a subclass may define its own
                self.target = targets.__getitem__
        self._seconds_per_file = 0.0
        self._bytes_per_file = 0.0

    def _local_paths(self, paths: Sequence[object], follow_symlinks: bool, options: object) -> list[str]:
        if options is not None:
            raise ValueError("options= are for the store of URLs, and these paths are files: leave it out")
        found = [path_of(path, position) for position, path in enumerate(paths)]
        if self.root is not None:
            from aiofeed.kernel.sources.links import beneath, refuse_links

            found = [beneath(self.root, path) for path in found]
            if not follow_symlinks:
                known: dict[str, bool] = {}
                for path in found:
                    refuse_links(self.root, path, known)
        return found

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.paths) // (self._width or 1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({counted(len(self), 'file' if self._width is None else 'sample')})"

    def key(self, index: int, /) -> str:
        """Return the path of the file, joined to ``root`` if that was given; or the URL, without credentials.

        For a tuple of files: their paths, joined by ``" + "``.
        """
        return self.paths[index] if self._width is None else self._joined(index)

    def _joined(self, index: int, root: int = 0) -> str:
        return " + ".join([self.paths[at][root:] for at in self._files([index])])

    def fingerprint(self) -> str | None:
        """Return a hash of the paths of tuples, relative to their common folder; ``None``: keys identify the files."""
        if self._width is None:
            return None
        root = common_folder(self.paths)
        return fingerprint(type(self).__qualname__, len(self), lambda index: self._joined(index, root))

    def content_parts(self) -> list[Content]:
        """Return some of the files, or the sizes of some objects as far as they were listed."""
        if self._objects is not None:
            return self._objects.content_parts()  # type: ignore[no-any-return]
        return [Content(self.paths[at]) for at in evenly(len(self.paths))]

    def version(self, index: int, /) -> str:
        """Absolute path, size and times of each file; the store of an object, whose contents are not checked."""
        return " ".join([self._version(file) for file in self._files([index])])

    def _version(self, file: int) -> str:
        if self._objects is not None:
            return self._objects.store_of(file)  # type: ignore[no-any-return]
        path = os.path.abspath(self.paths[file])
        status = os.stat(path)
        return f"{path} {status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_ctime_ns:x}-{status.st_size:x}"

    def _files(self, indices: Sequence[int]) -> Sequence[int]:
        """Return the positions in ``paths`` of the files of samples."""
        if (width := self._width) is None:
            return indices
        return [index * width + at for index in indices for at in range(width)]

    def _samples(self, contents: list[bytes | OSError]) -> list[Any]:
        """Return the samples of the contents of their files; the first error of each that cannot be read."""
        if (width := self._width) is None:
            return contents
        parts = [contents[start : start + width] for start in range(0, len(contents), width)]
        return [next((part for part in each if isinstance(part, BaseException)), tuple(each)) for each in parts]

    async def read(self, index: int, /) -> Any:
        """Read a whole file, or a tuple of them."""
        [data] = await self.read_many([index])
        if isinstance(data, BaseException):
            raise data
        return data

    async def read_many(self, indices: Sequence[int], /) -> list[Any]:
        """Return the contents of files, or the error of each that cannot be read; for tuples of files, tuples.

        Files are read in groups with one executor job each. The faster the storage is, the larger the groups are; slow
        storage is read with one job per file. Objects at URLs are all read at the same time.
        """
        files = self._files(indices)
        if self._objects is not None:
            return self._samples(await self._objects.read_many(files, self._rules.max_bytes))
        size = self._group_size(len(files))
        if size >= len(files):
            return self._samples(await _in_executor(self._read_group, files))
        groups = [files[start : start + size] for start in range(0, len(files), size)]
        parts = await asyncio.gather(*[_in_executor(self._read_group, group) for group in groups])
        return self._samples([data for part in parts for data in part])

    def uncopied_reader(self) -> Callable[[int], Awaitable[Any]] | None:
        """Return a function that reads an object, as ``Uncopied`` if it is large, for the engine; ``None`` for files.

        The decode job copies an object into memory that the object before it has used. Copying each waiting object
        into fresh memory took 100 us for 100 KB on a virtual machine, reusing memory 4 us.
        """
        if self._objects is None or not self._reads_single_files:
            return None
        return partial(self._objects.read_uncopied, max_bytes=self._rules.max_bytes)

    @property
    def keys_are_paths(self) -> bool:
        """Whether each sample is a local file, whose path is its key."""
        own = type(self).key is Files.key and type(self).read is Files.read
        return own and self._objects is None and self._rules.follow_symlinks and self._reads_single_files

    @property
    def _reads_single_files(self) -> bool:
        return self._width is None and getattr(self.read_many, "__func__", None) is Files.read_many

    def _group_size(self, most: int) -> int:
        if self._seconds_per_file == 0.0:
            return min(most, 8)
        return max(1, min(most, GROUP_MOST, int(GROUP_S / self._seconds_per_file)))

    def _observe(self, contents: list[bytes | OSError], seconds: float) -> None:
        # Moving averages adapt to faster or slower storage within a few groups.
        per_file = seconds / len(contents)
        self._seconds_per_file += (per_file - self._seconds_per_file) * (0.2 if self._seconds_per_file else 1.0)
        nbytes = sum([len(data) for data in contents if isinstance(data, bytes)]) / len(contents)
        self._bytes_per_file += (nbytes - self._bytes_per_file) * (0.2 if self._bytes_per_file else 1.0)

    @property
    def answers_at_once(self) -> bool:
        """Whether files are read as fast as from the page cache, so that decode threads may read them."""
        return 0.0 < self._seconds_per_file < AT_ONCE_S

    def read_now(self, indices: Sequence[int], /) -> list[Any]:
        """``read_many`` in the calling thread."""
        return self._samples(self._read_group(self._files(indices)))

    def _read_group(self, indices: Sequence[int]) -> list[bytes | OSError]:
        started = time.perf_counter()
        contents = self._contents(indices)
        self._observe(contents, time.perf_counter() - started)
        return contents

    def _contents(self, indices: Sequence[int]) -> list[bytes | OSError]:
        """Return the contents of files, or the error of each that cannot be read."""
        paths = [self.paths[index] for index in indices]
        found = None
        if len(paths) >= GROUP_LEAST and 0.0 < self._bytes_per_file <= SMALL and (reader := group_reader()) is not None:
            found = read_group(reader, paths, self._rules)
        contents: list[bytes | OSError] = []
        for at, path in enumerate(paths):
            if found is not None and (data := found[at]) is not None:
                contents.append(data)
                continue
            try:
                contents.append(read_file(path, self._rules))
            except OSError as error:
                # The traceback refers to this frame, and so to the bytes of all other files.
                contents.append(error.with_traceback(None))
        return contents

    def storage_statistics(self) -> StorageStatistics | None:
        """Return the requests for objects at URLs in this process; ``None`` for files."""
        return None if self._objects is None else self._objects.statistics()


def _flattened(samples: Sequence[Any]) -> list[Any]:
    """Return the paths of tuples of one length, one after another."""
    width = len(samples[0])
    for position, sample in enumerate(samples):
        if not isinstance(sample, tuple | list):
            raise TypeError(f"Files needs tuples of paths, as number 0 is; number {position} is {sample!r}")
        if len(sample) != width or not width:
            raise ValueError(
                f"Files needs tuples of one length: number 0 has {counted(width, 'path')}, number {position} "
                f"has {len(sample)}: {sample!r}"
            )
    return [path for sample in samples for path in sample]


def _as_sequence(targets: Any) -> Sequence[Any]:
    """``targets`` as a sequence indexed by position."""
    if isinstance(targets, Mapping):
        raise TypeError(
            "targets must be one label per file in the order of the paths, got a dict: pass [labels[p] for p in paths]"
        )
    # Indexing a pandas object uses its index, which differs from the position after sample() or a filter.
    values: Sequence[Any] = targets.to_numpy() if hasattr(targets, "iloc") else targets
    return values


def path_of(value: object, position: int) -> str:
    """Return the path of an entry of a list: a path, or a ``file://`` URL.

    Raises:
        TypeError, ValueError: It is something else.
    """
    if type(value) is str and "://" not in value:
        return value
    # A path as bytes is refused, because keys are texts.
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str):
        raise TypeError(f"Files needs paths as str or os.PathLike; number {position} is {value!r}")
    if (local := local_path(path)) is None:
        raise ValueError(
            f"{shown(path)!r}, number {position}, is a URL, and number 0 is a file: Files reads either; "
            f"aiofeed.Mixture reads both"
        )
    return local


_in_executor: Callable[..., Awaitable[list[bytes | OSError]]] = wrap(lambda read, indices: read(indices))
