"""The protocols of sources and decoders, and the parts of a batch. Imports no torch and no numpy at run time."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from aiofeed.kernel.core.formatting import shown

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

EncodedT_co = TypeVar("EncodedT_co", covariant=True)
EncodedT_contra = TypeVar("EncodedT_contra", contravariant=True)
SampleT_co = TypeVar("SampleT_co", covariant=True)

PublicT = TypeVar("PublicT")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def public_in(module: str) -> Callable[[PublicT], PublicT]:
    """Decorate a class or function so that tracebacks and ``repr`` show its public name, in ``module``.

    Its messages about arguments do not show the secrets of URLs.
    """

    def mark(value: PublicT) -> PublicT:
        if not isinstance(value, type):
            value = hides_secrets(value)  # type: ignore[type-var]
        elif not issubclass(value, BaseException) and not getattr(value, "_is_protocol", False):
            for name in vars(value).keys() & {"__init__", "__new__"}:
                checked = hides_secrets(getattr(value, name))
                setattr(value, name, checked if name == "__init__" else staticmethod(checked))
        value.__module__ = module
        return value

    return mark


def public(value: PublicT) -> PublicT:
    """``public_in`` of ``aiofeed``."""
    return public_in("aiofeed")(value)


def hides_secrets(function: FunctionT) -> FunctionT:
    """Decorate a function that gets arguments of the user: its errors show URLs without passwords and signatures."""

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except Exception as error:
            hide_secrets(error)
            raise

    return checked  # type: ignore[return-value]


def hide_secrets(error: BaseException | None) -> None:
    """Hide passwords and signatures of URLs in the texts of an error and of those behind it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        args = tuple(shown(text) if isinstance(text, str) else text for text in error.args)
        BaseException.args.__set__(error, args)  # type: ignore[attr-defined]  # not by assignment, as in a frozen class
        error = error.__cause__ or error.__context__


Transform: TypeAlias = Callable[[Any], Any]
"""The type of ``transform=``: maps a batch to a batch."""

Collate: TypeAlias = Callable[[list[Any]], Any]
"""The type of ``collate_fn``: maps a list of samples to a batch."""


@public
@runtime_checkable
class Source(Protocol[EncodedT_co]):
    """Provides the encoded bytes of samples. Any object with these three methods is a source.

    Example:
        ```python
        import aiofeed


        class Numbers(aiofeed.Source):
            def __len__(self):
                return 100

            def key(self, index):
                return f"number {index}"

            async def read(self, index):  # or a request to a database
                return str(index).encode()


        feeder = aiofeed.Feeder(Numbers(), decode=int, batch_size=10)
        ```

    Optional members:

    ``target(index)``
        Returns the label; a sample is then ``(decoded, target)``. Called in a decode thread.
    ``async read_many(indices) -> list``
        Reads several samples at once. An entry may be an ``Exception``, which fails that sample only. If it exists, it
        replaces ``read``, which is called only if ``read_many`` raises or a sample is read again.
    ``async read_planned(indices, plan, places) -> list``
        For samples that depend on random numbers: replaces ``read_many`` where the ``BatchPlan`` is known, which has
        ``indices`` at ``places``.
    ``async open()`` / ``async aclose()``
        Called once before the first read and once after the last, on the engine's loop.
    ``answers_at_once`` and ``read_now(indices) -> list``
        While ``answers_at_once`` is true, ``read_now`` may read small samples in the thread that decodes them; it then
        replaces ``read`` and ``read_many``.
    ``fingerprint() -> str``
        Identifies the data when a saved state is loaded.
    ``shard_starts``
        The index of the first sample of each shard, and the number of samples, for ``shuffle="window"``.
    ``looks_ahead`` and ``nbytes(index) -> int``
        If ``looks_ahead`` is true, samples of one shard that are in the order soon are read by one ``read_many`` before
        their batches begin; ``nbytes`` returns the encoded bytes of a sample. Needs ``shard_starts``.
    ``reads_whole_shards``
        Whether reading any samples of a shard reads all of it: the look-ahead then waits for all that are needed soon,
        and with ``shuffle="window"`` each rank has shards of its own. ``shards_at_once``, which may be absent, is how
        many are read at the same time, if that is more than two for each decode thread.
    ``version(index) -> str``
        Changes with the bytes of the sample. With the ``key`` it names the sample in an ``EncodedCache``. Called in
        threads, before each read.

    A subclass that overrides one of ``read``, ``read_many`` and ``read_now`` overrides all that its base class has, and
    ``version`` if its arguments change what is read.

    All coroutines run on the engine's own event loop, never on the caller's.
    """

    def __len__(self) -> int:
        """Return the number of samples."""

    def key(self, index: int, /) -> str:
        """Return the name of a sample for error messages, such as its path or URL."""

    async def read(self, index: int, /) -> EncodedT_co:
        """Read an encoded sample: ``bytes``, or a tuple or dict of bytes for a sample of several files."""


@dataclass(frozen=True)
class Traits:
    """The kind of a source, its attribute ``traits``. A source of encoded samples needs none.

    Args:
        decode: Whether samples are decoded by ``decode=``: it is needed, optional, or makes no sense.
        items: Whether samples are objects of Python, made by a ``Dataset``.
        rows: Whether a batch is gathered from columns or files, not collated from samples.
        in_memory: Whether batches are views of tensors in memory.
        indexed: Whether samples have indices; those of a stream have none.
        ordered: Whether the source decides which samples come.
    """

    decode: Literal["needed", "optional", "none"] = "needed"
    items: bool = False
    rows: bool = False
    in_memory: bool = False
    indexed: bool = True
    ordered: bool = False


class Uncopied(NamedTuple):
    """An encoded sample in the memory of a client library; the decode job makes ``bytes`` of it."""

    data: memoryview


Located: TypeAlias = "tuple[NDArray[Any], NDArray[np.int64], np.dtype[Any]]"
"""An array, where in it parts of samples begin, and the dtype that they have in a batch."""


class Gathered(Sequence[Any], ABC):
    """All samples of a batch that a source gathers, part by part, in arrays: a sequence of samples.

    A source with ``looks_ahead`` whose attribute ``new_gathered(indices, memory, plan)`` is not ``None`` makes them,
    and writes samples of one shard into those of several batches, by ``async gather_ahead(indices, targets, run,
    shard)``: ``targets`` has, for each batch, its ``Gathered`` and the places of the next samples of ``indices`` in it,
    in ascending order; ``run`` calls a function in a decode thread, which returns how many samples it wrote. If it
    raises, the batches are read again. A source with ``gather_several`` gets up to ``shards_per_read`` shards together.

    Attributes:
        nbytes: Encoded bytes that were read.
        seconds: What decoding them took.
        cpu_seconds: What of that was processor time.
        apart: Whether the engine gets samples one by one, for the user's ``collate_fn=``.
        errors: By place, the error of each sample that could not be read; they are in the sequence, too.
        shards: If samples need several shards, or others than those that ``shard_starts`` says: places of samples, and
            the number of a shard that each of them needs.
    """

    nbytes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    apart: bool = False
    errors: Mapping[int, Exception] = MappingProxyType({})
    shards: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._count

    def __getitem__(self, at: Any) -> Any:
        return list(self)[at]

    def batch(self, lease: Any) -> tuple[Any, int]:
        """Return the batch, of ``HostTensor`` in memory of a lease, and its bytes; unless a decoder makes the batch."""
        raise NotImplementedError

    def located(self, pieces: NDArray[np.int64], /) -> Mapping[Any, Located] | None:
        """Return by column where parts of samples are; ``None``: samples are taken one by one.

        ``pieces``: see ``BatchPlan``; ``None`` if one of their samples has another length.
        """
        return None


@public
@runtime_checkable
class Decoder(Protocol[EncodedT_contra, SampleT_co]):
    """Any callable that maps the result of ``Source.read`` to a sample: tensor, array, dict, tuple.

    Example:
        ```python
        import numpy as np

        import aiofeed


        def decode(data, *, rng):  # data: what the source reads; rng: this sample's torch.Generator
            return np.bincount(np.frombuffer(data, np.uint8), minlength=256)


        feeder = aiofeed.Feeder(aiofeed.ImageFolder("photos"), decode=decode, batch_size=4)
        ```

    Several decode threads call it at the same time, so it must not keep state between calls. If it has a keyword
    ``rng``, it gets the sample's own ``torch.Generator``, derived from (seed, epoch, position) and valid during the
    call. If its attribute ``takes_target`` is true and the source has targets, it gets the sample's as the keyword
    ``target``, and returns the sample with it.
    """

    def __call__(self, data: EncodedT_contra, /) -> SampleT_co:
        """Decode one sample."""


class RandomDecoder(Protocol[EncodedT_contra, SampleT_co]):
    """A ``Decoder`` that requires a generator."""

    def __call__(self, data: EncodedT_contra, /, *, rng: torch.Generator) -> SampleT_co:
        """Decode one sample."""


@dataclass(frozen=True)
class Row:
    """The memory layout of one sample in a batch, for decoding in place.

    Args:
        shape: The shape of the memory in C order, e.g. (224, 224, 3).
        dtype: numpy's name of the element type, e.g. "uint8".
        axes: The permutation of the memory's axes that gives the user's tensor, e.g. (2, 0, 1) for [3, 224, 224].
        parts: Whether the parts along the first axis are separate tensors of the batch, each contiguous. Excludes
            ``axes`` and a cache.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[int, ...] | None = None
    parts: bool = False


@runtime_checkable
class RowDecoder(Protocol):
    """A decoder that writes its sample into a row of the batch's memory.

    ``seed`` is the sample's own 64-bit number if ``takes_seed`` is true, else ``None``.

    An optional method ``decode_many_into(data, out, seeds)`` decodes N samples into N rows and returns an exception or
    ``None`` for each; ``seeds`` is ``None`` unless ``takes_seed`` is true. It is then called once per chunk, unless
    samples have a time limit. If it raises, samples are decoded one by one. A subclass that overrides ``decode_into``
    must override ``decode_many_into``, too.
    """

    @property
    def row(self) -> Row:
        """The memory layout of one sample."""

    @property
    def takes_seed(self) -> bool:
        """Whether the sample depends on random numbers."""

    def decode_into(self, data: Any, out: NDArray[Any], seed: int | None = None) -> None:
        """Decode ``data`` into ``out``, an array of ``row.shape`` and ``row.dtype``."""


def takes_keyword(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter ``name`` that can be passed by name; False if its signature cannot be read."""
    try:
        parameter = inspect.signature(function).parameters.get(name)
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)


class HostTensor:
    """The host memory of a future tensor, as a numpy array, so that it can be filled without torch.

    Not a dataclass, because dataclasses are nodes of a batch and this is a leaf.

    Args:
        memory: The C-contiguous array, [N, *row].
        axes: The permutation of all dimensions that gives the user's tensor; ``None`` for none.
        torch_dtype: The name of a torch dtype that numpy lacks (``"bfloat16"``), of the size of the memory's dtype.
        pinned: Whether the memory is page-locked, so that copies to a device are asynchronous.
    """

    __slots__ = ("axes", "memory", "pinned", "torch_dtype")

    def __init__(
        self,
        memory: NDArray[Any],
        axes: tuple[int, ...] | None = None,
        torch_dtype: str | None = None,
        pinned: bool = False,
    ) -> None:
        self.memory: NDArray[Any] = memory
        self.axes: tuple[int, ...] | None = axes
        self.torch_dtype: str | None = torch_dtype
        self.pinned: bool = pinned


class DeferredTensor(ABC):
    """A tensor of a batch that is assembled on the device."""

    @abstractmethod
    def arrive(self, copy: Callable[[HostTensor], Any]) -> Any:
        """Make the tensor on the side stream; ``copy`` queues copies there and holds host memory until they end."""


class EpochOrder(Protocol):
    """The order of one epoch."""

    @property
    def length(self) -> int:
        """The number of positions."""

    def index_at(self, position: int) -> int | Awaitable[int]:
        """Return the index at a position, or an awaitable for it; positions from ``length`` on start again at 0."""


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The samples of one batch.

    Args:
        number: The position of this batch among the batches of this rank in the epoch, from 0.
        indices: The index of each sample in the source.
        positions: The position of each sample in the global order of the epoch.
        epoch_seed: Derived from (seed, epoch); with a position it seeds that sample's random numbers.
        replacements: What takes the places of samples that fail: those after them in the order of the epoch.
        pieces: The parts of samples that the batch has, int64 [pieces, 5], by ascending place: (position of the sample
            in ``indices``, place in the batch, start, stop, length of the sample). ``None``: all of each sample.
    """

    number: int
    indices: Sequence[int]
    positions: Sequence[int]
    epoch_seed: int
    replacements: EpochOrder | None = None
    pieces: NDArray[Any] | None = None
