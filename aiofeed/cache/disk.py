"""``DiskCache``: samples in a file that the processes of a host share."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from aiofeed.cache.layout import RECORDS, ItemLayout, Layout, NotCacheableError, Parts, other_structure, unpack_record
from aiofeed.cache.sample_codec import deserialized, new_codec, serialized
from aiofeed.cache.store import EMPTY, RECORD, SampleStore
from aiofeed.common.fingerprint import dataset_identity, identity
from aiofeed.kernel.core.errors import CacheError
from aiofeed.kernel.core.faces import BaseCache, BaseSource, Exclusion
from aiofeed.kernel.core.types import public
from aiofeed.kernel.core.validation import check_bool, check_positive_int, counted, explain_arguments
from aiofeed.kernel.sampling.state import uncompared
from aiofeed.kernel.sources.file_io import check_path
from aiofeed.kernel.sources.subset import Subset, fingerprint_of, names_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiofeed.cache.cached_fetcher import CachedFetcher
    from aiofeed.cache.disk_format import CacheFile, Description
    from aiofeed.kernel.engine.fetch.choose import InnerFetcher
    from aiofeed.kernel.feeder.arguments import FeederConfig

log: logging.Logger = logging.getLogger("aiofeed.cache")
# The decoder's identity in a file of a Dataset's items.
NO_DECODER = "none, the items of a Dataset"
# The same in a file of encoded samples.
ENCODED = "none, encoded samples"
# The digests of the code of a decoder of aiofeed, which in another release writes the same samples.
_OWN_CODE = re.compile(r"^(aiofeed\.\S+) ([0-9a-f]{12} )+")


@public
@explain_arguments()
@dataclass(frozen=True)
class DiskCache(BaseCache):
    """Cache samples in a file: ``cache=DiskCache("train.cache")``.

    Example:
        ```python
        import aiofeed

        photos = aiofeed.ImageFolder("photos")
        decode = aiofeed.DecodeImage(size=224)
        feeder = aiofeed.Feeder(photos, decode=decode, batch_size=4, cache=aiofeed.DiskCache("train.cache"))
        for epoch in feeder.epochs(2):  # decodes in the first epoch of the first run only
            for images, labels in feeder:
                print(epoch, images.shape)
        ```

    All processes that use the file fill it during the first epoch, for example the ranks of a host; a sample that one
    has written is not decoded by the others. A later run continues with the file, also after a crash. The space of
    samples of equal size is allocated when it is created; samples of any other shape and structure are appended. Each
    process verifies a sample's checksum before it first uses the sample; a sample that does not match, after a crash or
    on a damaged disk, is decoded and written again. Nothing in the file is unpickled.

    A file of other data, of a decoder with other settings or of another version raises ``CacheError`` and is never
    changed. Data are identified by the source's fingerprint (its own, or type, length and keys) and by a sample of the
    contents of files, as saved states are: see docs/ranks.md. The file of an earlier version, which has no such sample,
    is used if the names agree, and a log line says so.

    With ``encoded=True`` the file has the bytes that the source reads, which are decoded and augmented in every epoch:
    for objects and shards at URLs, and with any decoder. Each sample is stored with its key and
    ``source.version(index)``, if the source has this method; when these differ, the sample is read again. So files and
    shards that change are noticed; objects that are replaced under their key are *not*. If the disk is full or the file
    is damaged while it is in use, samples come from the source, and a log line says so.

    Of a ``Dataset`` the file contains items: plain tensors, arrays, numbers, strings, bytes and ``None``, nested. Each
    item is requested once, by one of the processes. The ``Dataset`` is identified by its length and
    ``FromDataset(fingerprint=...)``. Without a fingerprint its type, the code of ``__getitem__`` and its ``repr``
    identify it, and the first item used from an existing file is requested again: a log line warns if it differs.

    Use a local disk: processes lock the file with ``flock``. Linux and macOS.

    Args:
        path: Path of the file; its folder must exist.
        max_bytes: Largest size of a new file; the samples that are met first are cached. ``None``: room for all.
            Samples of equal size take it for themselves, if not all of them fit.
        encoded: Cache encoded samples.
    """

    path: str | os.PathLike[str]
    max_bytes: int | None = None
    encoded: bool = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.path, str | os.PathLike):
            raise TypeError(f"{name} takes the path of a file, got {self.path!r}")
        object.__setattr__(self, "path", check_path(os.fspath(self.path)))
        if self.max_bytes is not None:
            object.__setattr__(self, "max_bytes", check_positive_int(f"{name}(max_bytes=...)", self.max_bytes))
        check_bool(f"{name}(encoded=...)", self.encoded)
        try:
            import fcntl  # noqa: F401 - to find out whether it exists
        except ImportError:
            raise ValueError(f'{name} needs POSIX file locks, which Windows lacks: use cache="host"') from None

    # fmt: off
    excluded: ClassVar[Sequence[Exclusion]] = (
        (("EncodedCache",), ("a Dataset",), TypeError,
         "it keeps the bytes that a source reads, and the items of a Dataset are decoded: pass cache=DiskCache(path), "
         "or a source of bytes such as aiofeed.Files(paths) with decode="),
    )
    # fmt: on

    def facts(self, arguments: Any) -> Mapping[str, str]:
        """Return whether it keeps encoded samples."""
        return {"EncodedCache": f"cache={arguments.cache!r}"} if self.encoded else {}

    def check_decoder(self, decode: Callable[..., Any] | None) -> None:
        """Raise ``TypeError`` if a decoder cannot be cached, or not be told from one with other settings."""
        new_codec(decode)
        if decode is not None:
            identity(decode)

    def wrap(self, source: BaseSource) -> BaseSource | None:
        """Return the source with this cache of its encoded samples; ``None`` if the cache keeps decoded samples.

        Raises:
            CacheError: The file cannot be used.
        """
        if not self.encoded:
            return None
        if isinstance(source, Subset):  # all parts use the same samples
            return Subset(self.wrap(source.whole) or source.whole, source.rows)
        from aiofeed.cache.encoded_source import CachedSource

        length = len(source)  # each sample has its own version
        return CachedSource(source, DiskStore(length, self, names_of(source, length), ENCODED), str(self.path))

    def open_store(self, config: FeederConfig) -> DiskStore:
        """Return an empty store for the decoded samples of a feeder."""
        source, decode = config.source, config.decode
        self.check_decoder(decode)
        if source.traits.items:
            named = source.fingerprint()
            identified = named or dataset_identity(source.given)
            return DiskStore(config.length, self, identified, claims=True, compare=named is None)
        decoder = NO_DECODER if decode is None else identity(decode)
        return DiskStore(config.length, self, fingerprint_of(source, config.length), decoder)

    def verify(self) -> tuple[int, ...]:
        """Verify all checksums. Returns the indices of damaged samples, which will be decoded again.

        Raises:
            CacheError: The file does not exist, is not a cache, has a damaged header or is too short.
        """
        from aiofeed.cache.disk_format import open_file

        file = open_file(str(self.path), create=False)
        try:
            if file is None or file.describe() is None:
                raise CacheError(f"there is no cache at {self.path!r}")
            file.open_rows()
            written = np.flatnonzero(file.table()["row"]).tolist()
            return tuple(index for index in written if file.valid_slot(index) is None)
        except OSError as error:
            raise _unusable(str(self.path), error) from error


@public
@explain_arguments()
@dataclass(frozen=True)
class EncodedCache(DiskCache):
    """Cache encoded samples, as a source reads them: ``EncodedCache(path, n)`` is ``DiskCache(path, n, encoded=True)``.

    Example:
        ```python
        import aiofeed

        photos = aiofeed.ImageFolder("photos")  # or at a URL, where the cache pays
        cache = aiofeed.EncodedCache("photos.cache", max_bytes=100 << 30)
        feeder = aiofeed.Feeder(photos, decode=aiofeed.DecodeImage(size=224), batch_size=4, cache=cache)
        ```

    Args:
        path: Path of the file, on a local disk; its folder must exist and be writable.
        max_bytes: Largest size of a new file.
    """

    max_bytes: int = field()
    encoded: bool = field(default=True, init=False, repr=False)


def _unusable(path: str, error: OSError) -> CacheError:
    return CacheError(f"the cache {path!r} cannot be used: {error}")


def _usable_layout(layout: Layout) -> Layout | None:
    """Return the layout of a file; ``None`` until an item was encoded, if the form is not enough to restore it."""
    return deserialized(layout) if isinstance(layout, ItemLayout) else layout


class DiskStore(SampleStore):
    """A file, and which of its rows and records this process has written or verified.

    Args:
        samples: Length of the source.
        cache: The user's settings.
        source: Fingerprint of the source.
        decoder: Identity of the decoder; ``NO_DECODER`` for samples that a ``Dataset`` or the source has decoded.
        claims: Whether processes claim the samples that they make: those of a ``Dataset``, which may be slow or random.
        compare: Whether the fingerprint may be the same for other data, so that one sample is compared.
    """

    def __init__(
        self,
        samples: int,
        cache: DiskCache,
        source: str,
        decoder: str = NO_DECODER,
        *,
        claims: bool = False,
        compare: bool = False,
    ) -> None:
        self._cache = cache
        self._source = source
        self._decoder = decoder
        self.claims: bool = claims  # a claim takes two system calls
        self._of_items = decoder == NO_DECODER
        self._compare = compare
        super().__init__(samples)

    def _reset(self) -> None:
        super()._reset()
        self._file: CacheFile | None = None
        self._damaged: set[int] = set()
        self._damage_logged = False
        self._writable = True
        # Items that threads of this process are making. While the file is empty there is one at most, whose claim ends
        # when the file has the items that this store holds.
        self._claimed: dict[int, tuple[CacheFile, int | None]] = {}
        self._empty_file: CacheFile | None = None
        self._unconfirmed = False

    def _after_fork(self) -> None:
        # A file lock belongs to an open file, which parent and child share: the child opens the file itself.
        self._reset()

    def new_fetcher(self, inner: InnerFetcher, decode: Callable[..., Any] | None) -> CachedFetcher:
        """Return the fetcher that uses this store."""
        from aiofeed.cache.cached_fetcher import CachedFetcher

        return CachedFetcher(inner, new_codec(decode), self)

    @property
    def path(self) -> str:
        """Path of the file."""
        return str(self._cache.path)

    def open(self, layout: Layout | None) -> None:
        """Open the file, if it exists, and take over its layout."""
        super().open(layout)
        if self._file is None:
            self._open_existing()
            self._unconfirmed = self._file is not None and self._compare

    def _open_existing(self) -> None:
        from aiofeed.cache.disk_format import open_file

        with self._lock:
            file = open_file(self.path, create=False) if self._file is None else None
            described = None if file is None else file.describe()
            if file is not None and described is not None:
                self._use(file, described, file.layout)
                self.layout: Layout | None = _usable_layout(file.layout)
                self.layout_decided = True

    def set_layout(self, layout: Layout) -> Layout:
        """Do as ``SampleStore.set_layout``; raise ``NotCacheableError`` also if a file cannot name the layout."""
        layout = serialized(layout) if isinstance(layout, ItemLayout) else layout
        if self._file is not None and self._file.layout != layout:
            raise NotCacheableError(f"the file has {self._file.layout}, this one is {layout}")
        return super().set_layout(layout)

    def _room(self) -> int:
        # The header takes a page, the table 16 bytes for each sample, and a record up to 128 more than its sample.
        most = self._cache.max_bytes
        return 1 << 62 if most is None else most - 4096 - -(-16 * self.samples // 4096) * 4096 - 128

    def _allocate(self, layout: Layout) -> Layout | None:
        from aiofeed.cache.disk_format import open_file

        path = self.path
        if not self.samples:
            raise CacheError(f"there is nothing to cache: {counted(self.samples, 'sample')} of {layout.nbytes} bytes")
        file = self._empty_file or open_file(path, create=True)
        assert file is not None
        try:
            with file.locked():
                if file.removed:
                    self._empty_file = None
                    return self._allocate(layout)
                described = file.describe()
                if described is None:
                    if not file.writable:
                        raise CacheError(f"the cache {path!r} is empty and may not be written to")
                    described = file.create(
                        self.samples,
                        self._source,
                        self._decoder,
                        layout,
                        self._cache.max_bytes,
                        [*self._claimed, *self._pending] if self.claims else [],
                    )
        except OSError as error:
            raise _unusable(path, error) from error
        finally:
            file.release(None)
        # Another process may have begun with other samples, unless the layout was known before the first.
        self._use(file, described, layout if self.layout is None else file.layout)
        return layout if layout == file.layout else _usable_layout(file.layout)

    def _use(self, file: CacheFile, described: Description, layout: Layout) -> None:
        """Use a file if it belongs to this data and this decoder."""
        of_items = self._of_items if file.layout is RECORDS else isinstance(file.layout, ItemLayout)
        compared: list[tuple[str, Any, Any]] = [
            ("samples", described["samples"], self.samples),
            ("decoder", _OWN_CODE.sub(r"\1 ", described["decoder"]), _OWN_CODE.sub(r"\1 ", self._decoder)),
            ("items of a Dataset", of_items, self._of_items),
            ("layout of a sample", file.layout, layout),
            ("fingerprint of the source", described["source"], self._source),
        ]
        missing = uncompared(described["source"], self._source)
        if missing:
            del compared[-1]
        differ = [f"{what}: {there} in the file, {here} here" for what, there, here in compared if there != here]
        if differ:
            only_source = len(differ) == 1 and described["source"] != self._source and self._of_items
            hint = f". If the items are the same, pass FromDataset(dataset, fingerprint={described['source']!r})"
            raise self._other_content(differ, hint if only_source else "")
        if missing:
            log.warning("the cache %s is used, and %s", file.path, missing)
        if file.layout is not RECORDS and file.capacity < file.samples:
            log.info("the cache %s has room for %d of %d samples", file.path, file.capacity, file.samples)
        self._arena = file.open_rows()
        self._file, self._empty_file = file, None
        self._writable = file.writable

    def _other_content(self, differ: Sequence[str], hint: str = "") -> CacheError:
        return CacheError(
            f"the cache {self.path!r} was filled from other data: {'; '.join(differ)}. Delete the file, or give "
            f"DiskCache another path{hint}"
        )

    def unverified(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return samples whose entry says that they are written and whose checksum was not verified."""
        if self._file is None:
            return indices[:0]
        unknown = indices[self.slots[indices] < 0].tolist()
        file, damaged = self._file, self._damaged
        return np.array(
            [index for index in unknown if index not in damaged and file.slot_of(index) is not None], np.int64
        )

    def find(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which samples are cached, after verifying those that others have written."""
        if self._file is None:
            self._open_existing()
        if self.layout is None:
            return np.zeros(len(indices), np.bool_)
        try:
            for index in self.unverified(indices).tolist():
                self._verify(index)
        except TimeoutError:
            pass  # a process that holds the lock may be stopped: samples that are not verified are decoded again
        except OSError as error:
            raise _unusable(self.path, error) from error
        return self.has(indices)

    def _verify(self, index: int) -> None:
        assert self._file is not None
        found = self._file.valid_slot(index)
        if found is None:
            # It may be in the middle of a write: verify it again while nobody writes.
            with self._lock, self._file.locked():
                found = self._file.valid_slot(index)
        if found is None:
            self._damaged.add(index)
            if not self._damage_logged:
                self._damage_logged = True
                log.warning(
                    "the cache %s has damaged samples, first sample %d: they are decoded again", self.path, index
                )
        else:
            record = self._file.record(found) if found >= RECORD else None
            try:
                if record is not None:
                    unpack_record(record)
                self.slots[index] = found
            except LookupError:
                pass  # the class of its namedtuple is known once such an item is made
            except Exception:  # noqa: BLE001 - any program may have written it
                self._damaged.add(index)

    def copy_rows(self, indices: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Copy cached samples into ``out``; ``CacheError`` if the file was truncated."""
        assert self._file is not None
        self._file.check_size()
        super().copy_rows(indices, out)

    def parts(self, index: int) -> Parts:
        """Return the arrays of a row; ``CacheError`` if the file was truncated."""
        assert self._file is not None
        self._file.check_size()
        return super().parts(index)

    def _record(self, slot: int) -> NDArray[np.uint8]:
        assert self._file is not None
        return self._file.record(slot)

    def _store(self, index: int, data: NDArray[np.uint8], units: int) -> None:
        file = self._file
        if file is None or not self._writable:
            return
        try:
            with self._lock, file.locked():
                if file.slot_of(index) is not None and index not in self._damaged:
                    return  # another process has written it; it is verified before it is used
                # If there is room for all, sample i is row i: a process that dies in a write wastes no row.
                fixed = index if file.capacity == file.samples else None
                slot = file.next_record(units) if units else file.next_row() if fixed is None else fixed
                if slot is None:
                    return
                file.write(index, slot, data)
                self._damaged.discard(index)
            self.slots[index] = slot
        except OSError as error:
            with self._lock:
                was_writable, self._writable = self._writable, False
            if was_writable:
                log.warning("the cache %s is not written to any more: %s", file.path, str(error))

    def forget(self, index: int) -> None:
        """Have a sample written again, unless another process has done that since this one has verified it."""
        with self._lock:
            if self._file is not None and self._file.slot_of(index) == self.slots[index]:
                self._damaged.add(index)
            self.slots[index] = EMPTY

    def claim(self, index: int) -> bool:
        """Return whether the calling thread may make an item now; False if another thread or process is making it."""
        from aiofeed.cache.disk_format import open_file

        with self._lock:
            if index in self._claimed or (self._file is None and self._claimed):
                return False
            file, entry = self._file, index if self._file is not None else None
            if file is None:
                file = self._empty_file = self._empty_file or open_file(self.path, create=True)
                assert file is not None
            if not file.claim(entry):
                return False
            if entry is None and file.describe() is not None:
                # Another process has written the header meanwhile: there are entries to claim.
                file.release(None)
                self._empty_file = None
                return False
            self._claimed[index] = (file, entry)
            return True

    def choose_layout(self, *, last: bool = False) -> None:
        """Do as ``SampleStore.choose_layout``; no other process makes pending samples before they are written."""
        pending = self._pending if self.claims and not self.layout_decided else {}
        super().choose_layout(last=last)
        if (file := self._file) is not None:
            for index in pending.keys() - self._claimed.keys():
                file.release(index)

    def release(self, index: int) -> None:
        """End a claim."""
        with self._lock:
            file, entry = self._claimed.pop(index)
            if entry is not None or self.layout_decided or not self._pending:
                file.release(entry)
            if entry is None and file.has_entries:
                file.release(index)

    def sample_to_compare(self, indices: NDArray[np.int64]) -> int | None:
        """Return the first cached one of these samples, once, if an earlier run filled a file of unnamed data."""
        if not self._unconfirmed or self.layout is None:
            return None
        self._unconfirmed = False
        cached = indices[self.find(indices)]
        return int(cached[0]) if len(cached) else None

    def compare(self, index: int, key: str, found: Parts | NotCacheableError) -> None:
        """Warn if the source gives another sample than the file has."""
        if isinstance(found, NotCacheableError):
            raise self._other_content([f"layout of a sample: {self.layout} in the file; here {found}"]) from None
        cached, layout = self.get(index)
        if any(new.tobytes() != old.tobytes() for new, old in zip(found, cached, strict=True)):
            if layout is RECORDS and (other := other_structure(cached[0], found[0])):
                raise self._other_content([f"structure of {key}: {other}"])
            log.warning(
                "the cache %s has another %s than the Dataset returns now. Either its data or settings have changed: "
                "then delete the file. Or its items are random: then those of the first run are used. "
                "FromDataset(dataset, fingerprint=...) identifies a Dataset",
                self.path,
                key,
            )
