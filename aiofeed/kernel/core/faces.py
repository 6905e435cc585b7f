"""The faces of the kernel: every member that it uses of a source, a cache, a decoder or a device, with its default.

What a user passes is adapted once, by ``adapt_source`` and its like; behind them each member exists and has a type. An
add-on derives from the classes here and overrides members, as attributes, properties or methods. The face of orders and
plans is ``Lister`` and ``Plan`` in ``kernel/sampling/lister.py``. Only this module asks objects for members by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar, runtime_checkable

from aiofeed.kernel.core.types import BatchPlan, Gathered, Row, Traits, takes_keyword

if TYPE_CHECKING:
    from builtins import property as default

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from aiofeed.kernel.core.statistics import StorageStatistics
else:

    class default:  # noqa: N801 - a decorator
        """Decorates a method that returns the default of a member; an attribute of an object or a subclass replaces it.

        To type checkers it is a ``property``.
        """

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self.function = function
            self.__doc__ = function.__doc__

        def __get__(self, instance: Any, owner: type) -> Any:
            return self if instance is None else self.function(instance)


def face_members(face: type) -> frozenset[str]:
    """Return the names of the members that a face declares."""
    return frozenset(name for name in (*vars(face), *vars(face).get("__annotations__", ())) if name[0] != "_")


def _bind(adapted: object, given: Any, names: Collection[str]) -> None:
    """Set those members of an adapted object that the user's object has."""
    for name in names:
        if (member := getattr(given, name, None)) is not None:
            setattr(adapted, name, member)


Exclusion: TypeAlias = "tuple[tuple[str, ...], tuple[str, ...], type[Exception], str]"
"""A row of the table of what excludes what: options, what excludes each of them, the type of the error, why and what to
do instead. Options are facts about the arguments of a feeder; ``{option}`` in the text is the option."""


# Members of the faces that programs use, too.
_FOR_USERS = frozenset({"key", "read", "target", "lengths", "fingerprint", "storage_statistics"})


class Declares:
    """Facts about an object that a feeder gets, and what excludes them."""

    excluded: ClassVar[Sequence[Exclusion]] = ()

    def facts(self, arguments: Any) -> Mapping[str, str]:
        """Return the facts that hold for the object with the ``Arguments`` of a feeder, and how messages show each."""
        return {}

    def __dir__(self) -> list[str]:
        """Return the names for completion: without the members of the face that are for the kernel."""
        faces = [each for each in type(self).__mro__ if each is Declares or Declares in each.__bases__]
        return sorted({*super().__dir__()} - {name for face in faces for name in face_members(face) - _FOR_USERS})


class BaseSource(Declares):
    """A source with all members that the kernel uses. ``Source`` describes those that a user may write.

    A member whose default is ``None`` is a function that a source need not have.
    """

    def __len__(self) -> int:
        """Return the number of samples."""
        raise NotImplementedError(f"{type(self).__name__} needs a method __len__()")

    def key(self, index: int, /) -> str:
        """Return the name of a sample in errors."""
        raise NotImplementedError(f"{type(self).__name__} needs a method key(index)")

    def named(self, index: int, /) -> str | int:
        """Return what ``keys=True`` gives for a sample: its key, or its index if samples have no names."""
        return self.key(index)

    async def read(self, index: int, /) -> Any:
        """Read an encoded sample."""
        raise NotImplementedError(f"{type(self).__name__} needs a method async read(index)")

    # --- what it is ---

    @default
    def traits(self) -> Traits:
        """What kind of source it is."""
        return Traits()

    @default
    def given(self) -> Any:
        """The object that the user passed, of which this is the source."""
        return self

    rows: NDArray[np.int64] | None = None
    """The indices in ``given`` of its samples; ``None``: all."""

    @default
    def keys_are_paths(self) -> bool:
        """Whether each sample is a local file, whose path is its key and may be opened in place of ``read``."""
        return False

    threads: int = 0
    """How many threads may make its items at the same time, if they are objects of Python; otherwise 0."""

    def fingerprint(self) -> str | None:
        """Return a text that identifies the data; ``None``: a hash of type, length and keys does."""
        return None

    def content_parts(self) -> Sequence[Any]:
        """Return the ``Content`` of the files or objects it reads; empty if unknown."""
        return ()

    # --- reading ---

    async def open(self) -> None:
        """Run before the first read, on the engine's loop."""

    async def aclose(self) -> None:
        """Run after the last read, on the engine's loop."""

    read_many: Callable[[Sequence[int]], Awaitable[Sequence[Any]]] | None = None
    """Reads several samples at once, in place of ``read``."""

    read_planned: Callable[..., Awaitable[Sequence[Any]]] | None = None
    """Reads samples that depend on their ``BatchPlan``: ``(indices, plan, places)``."""

    read_now: Callable[[Sequence[int]], Sequence[Any]] | None = None
    """Reads samples in the calling thread."""

    @default
    def answers_at_once(self) -> bool:
        """Whether decode threads should call ``read_now`` now."""
        return False

    def uncopied_reader(self) -> Callable[[int], Awaitable[Any]] | None:
        """Return a function that reads a sample as ``Uncopied``, if the source has one."""
        return None

    target: Callable[[int], Any] | None = None
    """Returns the target of a sample. Called in decode threads."""

    version: Callable[[int], str] | None = None
    """Returns a text that changes with the bytes of a sample."""

    def storage_statistics(self) -> StorageStatistics | None:
        """Return the requests so far; ``None`` if it makes none."""
        return None

    feeder: Any = None
    """The ``Feeder`` that reads and decodes its samples, if another one does that."""

    # --- shards ---

    @default
    def shard_starts(self) -> Sequence[int] | NDArray[np.int64] | None:
        """The index of the first sample of each shard, and the number of samples."""
        return None

    @default
    def looks_ahead(self) -> bool:
        """Whether samples of a shard should be read together before their batches begin."""
        return False

    nbytes: Callable[[int], int] | None = None
    """Returns the encoded bytes of a sample. Needed with ``looks_ahead``."""

    reads_whole_shards: bool = False
    """Whether any samples of a shard cost reading all of it."""

    shards_at_once: int = 0
    """How many shards are read at the same time, if more than two for each decode thread."""

    @default
    def new_gathered(self) -> Callable[..., Gathered] | None:
        """Makes the ``Gathered`` of a batch: ``(indices, memory, plan)``."""
        return None

    gather_ahead: Callable[..., Awaitable[None]] | None = None
    """Writes samples of a shard into several ``Gathered``: ``(indices, targets, run, shard)``."""

    gather_several: Callable[..., Awaitable[None]] | None = None
    """``gather_ahead`` of several shards, in place of it: ``({shard: targets}, run)``."""

    shards_per_read: int = 1
    """How many shards ``gather_several`` gets at most."""

    @default
    def gathered_bytes(self) -> float:
        """Encoded bytes of a sample, as far as they are known, for ``new_gathered``."""
        return 0

    # --- samples and batches ---

    @default
    def decoder(self) -> Callable[..., Any] | None:
        """Decodes its samples, if the source does that and ``decode=`` makes no sense."""
        return None

    collate: Callable[[list[Any]], Any] | None = None
    """Makes its batches in place of ``collate_fn=``."""

    @default
    def in_memory(self) -> bool:
        """Whether batches are gathered from memory so fast that no thread is needed."""
        return False

    gathered: Callable[..., Sequence[NDArray[Any]]] | None = None
    """Gathers rows of data in memory for a batch: ``(indices, memory)``."""

    @default
    def sample_bytes(self) -> int:
        """Bytes of a sample that ``gathered`` returns."""
        return 0

    form_batch: Callable[[list[Any]], Any] | None = None
    """Makes the batch of the tensors of what ``gathered`` returns; ``None``: the list is the batch."""

    first_tokens: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None
    """Returns the place of the first token of samples that are kept on the device."""

    def lengths(self, unit: str, /) -> NDArray[np.int64] | None:
        """Return the length of each sample, int64 [samples], in tokens, frames or rows; ``None``: only decoding tells.

        ``unit`` names the part of a sample that is measured, such as a column; empty: the first one that has a length.
        """
        return None

    def structure(self) -> Mapping[Any, Sequence[int] | None] | None:
        """Return the columns of samples that are dicts, the places of tuples, with shapes as far as these are known.

        ``None``: samples have no parts, or only decoding tells.
        """
        return None

    source_names: Sequence[str] = ()
    """The names of the sources of a mixture, if it adds them to samples."""

    # --- how a feeder takes it ---

    def adopted(self) -> BaseSource:
        """Return the source that a feeder reads, in place of this one."""
        return self

    def as_samples(self) -> BaseSource:
        """Return the source with samples one by one, for options that need them, in place of batches in memory."""
        return self

    def in_batches(self) -> BaseSource:
        """Return the source with ``collate``, for batches that are gathered."""
        return self

    def for_neighbours(self) -> BaseSource:
        """Return the source for an order in which neighbours come together."""
        return self

    def for_memory(self, nbytes: int, /) -> BaseSource:
        """Return the source for an epoch that may keep the data in memory, if they take less than ``nbytes`` there."""
        return self

    def load(self, places: int, /) -> bool:
        """Read the data that stay in memory, if an epoch of this rank reads them at so many places that it needs all.

        Called before the first epoch, and before later ones. Returns whether ``gathered`` can be called.
        """
        return True

    def in_pieces(self) -> BaseSource:
        """Return the source for batches of parts of samples: reads may return a ``Gathered`` that has ``located`` them.

        No ``decode=`` is given.
        """
        return self

    joined: Callable[[Sequence[Any]], Any] | None = None
    """Returns one source of its samples and, behind them, those of others that have this member; wrappers have not."""

    def order(self, seed: int, *, shuffle: bool, excluded: NDArray[np.int64] | None = None) -> Any:
        """Return the ``Lister`` of a source that is ``ordered``, without samples that are excluded."""
        raise NotImplementedError

    draws: bool = True
    """Whether an ``ordered`` source must decide which samples come, and no option of the feeder can."""

    def new_order(self, schedule: Any, shard: Any, plan: Any, /) -> Any:
        """Return the ``FeedOrder`` of a source without indices."""
        raise NotImplementedError

    @default
    def gathers_on_device(self) -> bool:
        """Whether ``cache="device"`` keeps the data themselves where batches are wanted, and gathers them there."""
        return False

    def check_room(self, backend: Any, /) -> None:
        """Raise ``CacheError`` if the data cannot be kept on a device."""


# The first argument of these members is an index or a list of indices; of those below, an array of indices, too.
BY_INDEX: frozenset[str] = frozenset({"key", "read", "target", "version", "nbytes", "read_many", "read_now"})
BY_INDICES: frozenset[str] = frozenset({"read_planned", "new_gathered", "gather_ahead", "gathered", "first_tokens"})
# Members by which the kernel knows its own sources; an object of the user that has the names means something else.
# fmt: off
_INTERNAL = frozenset({
    "traits", "given", "rows", "threads", "decoder", "collate", "in_memory", "gathered", "first_tokens", "sample_bytes",
    "form_batch", "feeder", "source_names", "lengths", "structure", "adopted", "as_samples", "in_batches",
    "for_neighbours", "in_pieces", "joined", "order", "draws", "new_order", "gathers_on_device", "check_room",
    "for_memory", "load", "keys_are_paths",
})
# fmt: on


SourceT = TypeVar("SourceT", bound=type[BaseSource])


def passes_on(kind: SourceT) -> SourceT:
    """Decorate the class of a wrapper: members that it does not define are those of the source ``self.whole``.

    A method ``_passed(self, name, member)`` changes a member for the wrapper; a class may do without.
    """
    for name in (face_members(BaseSource) | face_members(Declares)) - {*vars(kind), "adopted", "for_memory", "joined"}:
        setattr(kind, name, default(partial(_passed, name)))
    return kind


def _passed(name: str, wrapper: Any) -> Any:
    member = getattr(wrapper.whole, name)
    return wrapper._passed(name, member) if hasattr(type(wrapper), "_passed") else member


class AdaptedSource(BaseSource):
    """An object with the methods of ``Source`` and any of its optional members.

    Args:
        given: The object.
    """

    def __init__(self, given: Any) -> None:
        self.given: Any = given
        # On the type: an object may delegate unknown attributes to another one.
        if isinstance(traits := getattr(type(given), "traits", None), Traits):
            self.traits: Traits = traits
        _bind(self, given, face_members(BaseSource) - _INTERNAL - {"answers_at_once", "open", "aclose"})
        for name in ("target", "fingerprint", "open", "aclose"):
            if not callable(member := getattr(given, name, None)) and member is not None:
                raise TypeError(f"{type(given).__name__}.{name} must be a method, got {member!r}")
        if self.looks_ahead and (self.nbytes is None or self.shard_starts is None):
            raise TypeError(f"{type(given).__name__}.looks_ahead needs nbytes(index) and shard_starts beside it")

    def __reduce__(self) -> tuple[Any, ...]:
        return AdaptedSource, (self.given,)

    def __len__(self) -> int:
        return len(self.given)

    def __repr__(self) -> str:
        return repr(self.given)

    async def open(self) -> None:
        """Call the object's ``open``, if it has one."""
        await self._called("open")

    async def aclose(self) -> None:
        """Call the object's ``aclose``, if it has one."""
        await self._called("aclose")

    async def _called(self, name: str) -> None:
        if (method := getattr(self.given, name, None)) is not None:
            if not isawaitable(result := method()):
                raise TypeError(f"{type(self.given).__name__}.{name} must be an async method")
            await result

    @property
    def answers_at_once(self) -> bool:
        """What the object says now."""
        return bool(getattr(self.given, "answers_at_once", False))


def adapt_shards(source: BaseSource, given: object) -> BaseSource:
    """Return the source of a Dataset with the shards that the Dataset has."""
    _bind(source, given, ("shard_starts", "reads_whole_shards"))
    return source


def knows_content(source: BaseSource) -> bool:
    """Return whether a source, or the one that it wraps, has ``content_parts`` of its own."""
    return getattr(source.content_parts, "__func__", None) is not BaseSource.content_parts


def adapt_source(given: Any) -> BaseSource | None:
    """Return the source that an object is, or that it is made by its methods; ``None`` if it has none of them.

    Raises:
        TypeError: It lacks one of the three methods.
    """
    if isinstance(given, BaseSource):
        return given
    if isinstance(given, type):
        raise TypeError(f"a source is an object, got the class {given.__name__}; pass an instance")
    if not (callable(getattr(given, "read", None)) or callable(getattr(given, "read_many", None))):
        return None
    if missing := [name for name in ("__len__", "key", "read") if not hasattr(given, name)]:
        raise TypeError(f"a source needs __len__, key and async read; {type(given).__name__} lacks {missing}")
    return AdaptedSource(given)


# --- decoders ---


@dataclass(frozen=True)
class BoundDecoder:
    """All members that the kernel uses of a decoder, which stays the callable that the user passes.

    Args:
        call: The decoder.
        row: The memory of one sample, if it writes into rows of a batch, see ``RowDecoder``; otherwise ``None``.
        decode_into: Decodes a sample into its row.
        decode_many_into: Decodes several samples into their rows, if it can.
        takes_rng: Whether it is called with the keyword ``rng``.
        takes_seed: Whether the rows that it writes depend on random numbers.
        takes_target: Whether it is called with the keyword ``target``.
        backend: Which library decodes images, of those decoders that leave the choice.
        time_axis: The dimension of what it returns that is its length.
        lengths: Returns the lengths of what it makes of the samples of a source, without decoding, if it can.
    """

    call: Callable[..., Any]
    row: Row | None
    decode_into: Callable[..., None] | None
    decode_many_into: Callable[..., Sequence[Exception | None]] | None
    takes_rng: bool
    takes_seed: bool
    takes_target: bool
    backend: Any
    time_axis: int
    lengths: Callable[[BaseSource], NDArray[np.int64]] | None

    @property
    def keywords(self) -> list[str]:
        """The keywords with which it is called."""
        return ["rng"] * self.takes_rng + ["target"] * self.takes_target


def bind_decoder(decode: Callable[..., Any]) -> BoundDecoder:
    """Return the members of a decoder."""
    decode_into = getattr(decode, "decode_into", None)
    return BoundDecoder(
        decode,
        None if decode_into is None else getattr(decode, "row", None),
        decode_into,
        getattr(decode, "decode_many_into", None),
        takes_keyword(decode, "rng") and bool(getattr(decode, "takes_seed", True)),
        bool(getattr(decode, "takes_seed", False)),
        getattr(decode, "takes_target", False) is True,
        getattr(decode, "backend", None),
        getattr(decode, "time_axis", 0),
        getattr(decode, "lengths", None),
    )


def collate_along(collate_fn: Any, axis: int) -> Any:
    """Return ``collate_fn=`` for samples whose length is that dimension, if it has a method ``along``."""
    along = getattr(collate_fn, "along", None)
    return collate_fn if along is None else along(axis)


class BuildsBatches(ABC):
    """An object of an add-on in place of ``collate_fn=``, which makes the builders of batches itself."""

    @abstractmethod
    def new_builder(self, plan: BatchPlan, lease: Any, /) -> Any:
        """Return the ``BatchBuilder`` of a planned batch, in memory of a lease."""

    def for_source(self, source: BaseSource, /) -> BuildsBatches:
        """Return the object for batches of a source."""
        return self

    def by_row(self, plan: BatchPlan, indices: Sequence[int], keys: list[Any]) -> list[Any]:
        """Return the keys of the samples of a batch, which has these ``indices``, as ``keys=True`` gives them."""
        return keys


# --- caches ---


class CacheStore:
    """The samples of one feeder in a cache. It is pickled for worker processes, without samples."""

    def attach(self, backend: Any, /) -> None:
        """Set the device of the feeder's batches."""

    def free_with(self, owner: object, /) -> None:
        """Free device memory when ``owner`` is dropped."""

    def new_fetcher(self, inner: Any, decode: Callable[..., Any] | None, /) -> Any:
        """Return a ``Fetcher`` that looks samples up in the cache, before ``inner`` fetches them.

        Raises:
            CacheError: The cache cannot be used.
        """
        raise NotImplementedError

    def new_memory(self, config: Any, /) -> Any:
        """Return what makes batches of a cache that has all samples, see ``InlineBatches``; ``None``: threads do."""
        return None


class BaseCache(Declares):
    """The value of ``cache=``. An object with one of the first two methods is one, too."""

    def wrap(self, source: BaseSource) -> Any:
        """Return a source that looks encoded samples up before it reads them; ``None``: ``open_store`` is used."""
        return None

    def open_store(self, config: Any, /) -> CacheStore:
        """Return an empty store for the decoded samples of a feeder, given its ``FeederConfig``.

        Raises:
            TypeError: It cannot keep what the decoder returns.
        """
        raise NotImplementedError

    def check_decoder(self, decode: Callable[..., Any] | None, /) -> None:
        """Raise ``TypeError`` if the cache cannot keep what a decoder returns."""


class _AdaptedStore(CacheStore):
    def __init__(self, given: Any) -> None:
        _bind(self, given, face_members(CacheStore))


class _AdaptedCache(BaseCache):
    def __init__(self, given: Any) -> None:
        _bind(self, given, (face_members(BaseCache) | face_members(Declares)) - {"wrap", "open_store"})
        self._given = given
        self._wrap: Callable[[Any], Any] | None = getattr(given, "wrap", None)

    def open_store(self, config: Any, /) -> CacheStore:
        store = self._given.open_store(config)
        return store if isinstance(store, CacheStore) else _AdaptedStore(store)

    def wrap(self, source: BaseSource) -> Any:
        # A source of the user as the user knows it.
        return self._wrap and self._wrap(source.given if isinstance(source, AdaptedSource) else source)


def adapt_cache(given: Any) -> BaseCache | None:
    """Return the cache that an object is, or that it is made by its methods; ``None`` if it is none."""
    if isinstance(given, BaseCache):
        return given
    known = hasattr(given, "wrap") or hasattr(given, "open_store")
    return _AdaptedCache(given) if known and not isinstance(given, type) else None


# --- devices ---


Stream: TypeAlias = Any
"""A first-in first-out queue of work on a device. Its type is private to the backend."""


class Event(Protocol):
    """A marker in a stream. It is complete when all work queued before it is complete."""

    def query(self) -> bool:
        """Return whether the event is complete. Does not block."""

    def synchronize(self) -> Any:
        """Block the calling thread until the event is complete."""


@runtime_checkable
class DeviceBackend(Protocol):
    """The operations of a device that aiofeed uses. ``device=`` accepts any object with these members.

    Optional members: ``memory() -> (free, total) | None``, in bytes, ``None`` if unknown; ``interprocess()``, which
    returns an ``aiofeed.ipc.cuda_ipc.SharedDevice`` for memory shared with other processes.
    """

    name: str
    """The device's name in errors and reports: ``"cuda:0"``."""
    device: torch.device
    """The ``device`` attribute of tensors on this device."""

    def enter_thread(self) -> None:
        """Make the device current in the calling thread. Current device and current stream are thread-local."""

    def side_stream(self) -> Stream:
        """Return the stream for copies, one per device for the whole process: each stream has its own memory pool."""

    def current_stream(self) -> Stream:
        """Return the calling thread's current stream of this device."""

    def use_stream(self, stream: Stream, /) -> AbstractContextManager[None]:
        """Make a stream current in the calling thread; restore the previous one at exit. Can be nested."""

    def copy(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """Queue a copy to the device on the current stream. Keeps the dtype and, for dense tensors, the strides.

        Returns the tensor itself if it is on the device already. The copy reads host memory when it runs: keep that
        memory alive and unchanged until an event recorded after the copy is complete.
        """

    def record(self, stream: Stream, /) -> Event:
        """Return an event after all work queued on a stream so far."""

    def wait(self, stream: Stream, event: Any, /) -> None:
        """Make later work on a stream wait for an event of ``record``. Does not block the host."""

    def record_stream(self, tensor: torch.Tensor, stream: Stream, /) -> None:
        """After the tensor is dropped, keep its memory until the work then queued on a stream is complete.

        Does nothing for tensors that are not on this device.
        """

    def pin(self, nbytes: int, /) -> NDArray[np.uint8]:
        """Return page-locked host memory, uint8 [nbytes], contents undefined.

        It may be unlocked as soon as nothing refers to it: the caller keeps a reference while copies from it run.

        Raises:
            RuntimeError: Memory cannot be pinned.
        """


class BaseDevice(DeviceBackend):
    """A device with all members that the kernel uses: those of ``DeviceBackend``, and the optional ones."""

    @default
    def given(self) -> Any:
        """The object that the user passed."""
        return self

    @default
    def backends(self) -> Sequence[BaseDevice]:
        """The devices among which each batch is split; one device is alone in it."""
        return (self,)

    splits: bool = False
    """Whether each batch is split among several devices."""

    batch_copier: Callable[..., Any] | None = None
    """Makes the ``Copier`` of the device, in place of the class."""

    register: Callable[[NDArray[np.uint8]], None] | None = None
    """Page-locks shared memory, so that copies read it directly; otherwise it is copied to that of ``pin``."""

    unregister: Callable[[NDArray[np.uint8]], None] | None = None
    """Reverts ``register``."""

    def memory(self) -> tuple[int, int] | None:
        """Return the free and the total memory in bytes; ``None`` if unknown."""
        return None

    def interprocess(self) -> Any:
        """Return the ``SharedDevice`` of its memory for other processes; ``None`` if it has none of its own."""
        return None


class AdaptedDevice(BaseDevice):
    """An object with the methods of ``DeviceBackend`` and any of the optional members.

    Args:
        given: The object.
    """

    def __init__(self, given: DeviceBackend) -> None:
        self.given: Any = given
        _bind(self, given, [name for face in (DeviceBackend, BaseDevice) for name in face_members(face)])

    def __repr__(self) -> str:
        return repr(self.given)


def adapt_device(given: object) -> BaseDevice | None:
    """Return the device that an object is, or that it is made by its methods; ``None`` if it lacks one of them."""
    if isinstance(given, BaseDevice):
        return given
    if not isinstance(given, DeviceBackend) or isinstance(given, type):
        return None
    return AdaptedDevice(given)  # type: ignore[abstract]  # its members are those of the object
