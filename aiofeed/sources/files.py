"""Files on a file system, read through aiofiles with one hop per group of files rather than three per file."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from aiofiles.ospath import wrap  # type: ignore[attr-defined]

from aiofeed.core.types import public
from aiofeed.core.validation import check_positive_int
from aiofeed.sources.dataset import MapDataset
from aiofeed.sources.file_io import (
    MAX_BYTES,
    ReadRules,
    beneath,
    read_file,
    read_group,
    read_settled,
    refuse_links,
    settled_by,
)
from aiofeed.sources.native_files import SMALL, GroupReader, group_reader

# A hop through an executor costs some 60 us; a group of files that takes 5 ms makes that small, and a slow file
# holds up its own group only.
GROUP_S = 0.005
# Never so many that one group is most of a batch's reading.
GROUP_MOST = 64

# Fewer files are not worth a call of the library.
GROUP_LEAST = 4

# A file that takes less was in the page cache, whatever else the machine was doing meanwhile.
AT_ONCE_S = 0.0005


@public
class Files:
    """One sample per file; regular files only, each read whole.

    Args:
        paths: the files, in order; ``str`` or ``os.PathLike``.
        targets: one label per file, in their order; a sample is then ``(decoded, target)``. Columns of a pandas
            ``DataFrame`` may be given, ``Files(frame["path"], frame["label"])``: their index does not count.
        root: the folder that ``paths`` are relative to. For lists that come from elsewhere: a path that is absolute or
            has ``..`` in it is refused.
        follow_symlinks: whether a file may be a symbolic link. If not, reading one is an error; with a ``root`` so is
            a linked folder anywhere below it, and both are refused when the source is made (one ``lstat`` per file).
        max_bytes: of one file; a larger one is an error before any of it is read.

    Raises:
        TypeError: ``paths`` is a single path, or an entry is no path, or ``targets`` is a dict.
        ValueError: ``targets`` has another length, or a path leaves ``root``.
    """

    target: Callable[[int], Any]
    root: str | None

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        targets: Sequence[Any] | MapDataset[Any] | None = None,
        *,
        root: str | os.PathLike[str] | None = None,
        follow_symlinks: bool = True,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        if isinstance(paths, str | bytes | os.PathLike):
            raise TypeError(f"Files takes a list of paths, got the single path {paths!r}; ImageFolder reads a folder")
        if not isinstance(follow_symlinks, bool):
            raise TypeError(f"follow_symlinks must be True or False, got {follow_symlinks!r}")
        self.root = None if root is None else os.fspath(root)
        self._rules = ReadRules(check_positive_int("max_bytes", max_bytes), follow_symlinks, self.root)
        self.paths = [_path(path, position) for position, path in enumerate(paths)]
        if self.root is not None:
            self.paths = [beneath(self.root, path) for path in self.paths]
            if not follow_symlinks:
                known: dict[str, bool] = {}
                for path in self.paths:
                    refuse_links(self.root, path, known)
        self.targets = targets = None if targets is None else _by_position(targets)
        if targets is not None:
            if len(targets) != len(self.paths):
                raise ValueError(f"{len(self.paths)} paths, but {len(targets)} targets")
            if not hasattr(type(self), "target"):  # a subclass may say it in its own way
                self.target = targets.__getitem__
        self._seconds_per_file = 0.0
        self._bytes_per_file = 0.0

    def __len__(self) -> int:
        """The number of files."""
        return len(self.paths)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} files)"

    def key(self, index: int, /) -> str:
        """The path that is opened: as it was given, below ``root`` where there is one."""
        return self.paths[index]

    async def read(self, index: int, /) -> bytes:
        """The whole file."""
        [data] = await self.read_many([index])
        if isinstance(data, OSError):
            raise data
        return data

    async def read_many(self, indices: Sequence[int], /) -> list[bytes | OSError]:
        """The files' contents; for one that cannot be read, the error in its place.

        Files are read in groups, one executor job each, as large as storage is fast: on slow storage every file is
        on its way by itself.
        """
        size = self._group_size(len(indices))
        if size >= len(indices):
            return await self._read_group(indices)
        groups = [indices[start : start + size] for start in range(0, len(indices), size)]
        parts = await asyncio.gather(*[self._read_group(group) for group in groups])
        return [data for part in parts for data in part]

    def _group_size(self, most: int) -> int:
        if self._seconds_per_file == 0.0:
            return min(most, 8)
        return max(1, min(most, GROUP_MOST, int(GROUP_S / self._seconds_per_file)))

    async def _read_group(self, indices: Sequence[int]) -> list[bytes | OSError]:
        paths = [self.paths[index] for index in indices]
        contents, seconds = await _read_files(paths, self._rules, self._group_reader(len(paths)))
        self._observe(contents, seconds)
        return contents

    def _group_reader(self, files: int) -> GroupReader | None:
        """The library, where it can be had and gains something."""
        if files < GROUP_LEAST or not 0.0 < self._bytes_per_file <= SMALL:
            return None
        return group_reader()

    def _observe(self, contents: list[bytes | OSError], seconds: float) -> None:
        # Moving averages: storage that turns slow or fast is followed within a few groups.
        per_file = seconds / len(contents)
        self._seconds_per_file += (per_file - self._seconds_per_file) * (0.2 if self._seconds_per_file else 1.0)
        nbytes = sum([len(data) for data in contents if isinstance(data, bytes)]) / len(contents)
        self._bytes_per_file += (nbytes - self._bytes_per_file) * (0.2 if self._bytes_per_file else 1.0)

    @property
    def answers_at_once(self) -> bool:
        """Whether files come as from the page cache: then whoever decodes them may as well read them."""
        return 0.0 < self._seconds_per_file < AT_ONCE_S

    def read_now(self, indices: Sequence[int], /) -> list[bytes | OSError]:
        """What ``read_many`` gives, read in the calling thread."""
        paths = [self.paths[index] for index in indices]
        contents, seconds = _read_files_blocking(paths, self._rules, self._group_reader(len(paths)))
        self._observe(contents, seconds)
        return contents


def _by_position(targets: Any) -> Sequence[Any]:
    """``targets`` as something that is asked by position."""
    if isinstance(targets, Mapping):
        raise TypeError(
            "targets are one label per file, in the order of the paths, got a dict: [labels[p] for p in paths]"
        )
    # What pandas has is asked by its index, which after sample() or a filter is another order, or lacks numbers.
    values: Sequence[Any] = targets.to_numpy() if hasattr(targets, "iloc") else targets
    return values


def _path(value: object, position: int) -> str:
    if type(value) is str:
        return value
    # One that is bytes would be a key that nothing can be joined to.
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str):
        raise TypeError(f"Files takes paths, str or os.PathLike; number {position} is {value!r}")
    return path


def _read_files_blocking(
    paths: Sequence[str], rules: ReadRules, reader: GroupReader | None
) -> tuple[list[bytes | OSError], float]:
    started = time.perf_counter()
    contents: list[bytes | OSError] = []
    found = None if reader is None else read_group(reader, paths, rules)
    since = settled_by(time.time())
    for at, path in enumerate(paths):
        if found is not None and (data := found[at]) is not None:
            contents.append(data)
            continue
        try:
            data = read_settled(path, rules, since) if since > 0.0 else None
            if data is None:
                since = 0.0  # nor are the others, most likely
                data = read_file(path, rules)
            contents.append(data)
        except OSError as error:
            # Its traceback refers to this frame, and so to the bytes of all the other files.
            contents.append(error.with_traceback(None))
    return contents, time.perf_counter() - started


_read_files: Callable[
    [Sequence[str], ReadRules, GroupReader | None], Awaitable[tuple[list[bytes | OSError], float]]
] = wrap(_read_files_blocking)
