"""The words: what a source, a decoder and a batch are. No torch, no numpy at run time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

EncodedT = TypeVar("EncodedT")
EncodedT_co = TypeVar("EncodedT_co", covariant=True)
EncodedT_contra = TypeVar("EncodedT_contra", contravariant=True)
SampleT_co = TypeVar("SampleT_co", covariant=True)

PublicT = TypeVar("PublicT")


def public(value: PublicT) -> PublicT:
    """Mark a class or function as one of ``aiofeed``'s own names, so that tracebacks and ``repr`` show that name."""
    value.__module__ = "aiofeed"
    return value


Transform: TypeAlias = Callable[[Any], Any]
"""What ``transform=`` is: a batch in, a batch out."""

Collate: TypeAlias = Callable[[list[Any]], Any]
"""What ``collate_fn`` is: a list of samples in, one batch out."""


@public
@runtime_checkable
class Source(Protocol[EncodedT_co]):
    """Where the bytes of a sample come from. Any object with these three is one.

    Optional members, used where present:

    ``target(index)``
        the label; a sample is then ``(decoded, target)``. Called in a decode thread.
    ``async read_many(indices) -> list``
        several samples at once; an entry may be an ``Exception``, which is then that sample's alone. If it exists, it
        replaces ``read``, which is called only where ``read_many`` raises or a sample is read again.
    ``async open()`` / ``async aclose()``
        called once before the first read and once after the last, on the engine's loop.
    ``answers_at_once`` and ``read_now(indices) -> list``
        while the first is true, small samples may be read by the second, in the thread that decodes them; it then
        replaces ``read`` and ``read_many``.
    ``fingerprint() -> str``
        what identifies the data when a saved state is loaded.

    A subclass that overrides one of ``read``, ``read_many`` and ``read_now`` overrides all that its base class has.

    All coroutines run on the engine's own event loop, never on the caller's.
    """

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def key(self, index: int, /) -> str:
        """The name of a sample, as errors quote it: a path, a URL."""
        ...

    async def read(self, index: int, /) -> EncodedT_co:
        """The encoded sample: ``bytes``, or a tuple or dict of bytes for a sample of several files."""
        ...


@public
@runtime_checkable
class Decoder(Protocol[EncodedT_contra, SampleT_co]):
    """Any callable that turns what ``Source.read`` gave into a sample: tensor, array, dict, tuple.

    It is called in decode threads, several at once, so it must not keep state between calls. One that has a
    keyword ``rng`` gets a ``torch.Generator`` of that sample's own, derived from (seed, epoch, position); it is
    lent for the duration of the call.
    """

    def __call__(self, data: EncodedT_contra, /) -> SampleT_co:
        """Decode one sample."""
        ...


class RandomDecoder(Protocol[EncodedT_contra, SampleT_co]):
    """A ``Decoder`` that cannot do without its generator."""

    def __call__(self, data: EncodedT_contra, /, *, rng: torch.Generator) -> SampleT_co:
        """Decode one sample."""
        ...


@dataclass(frozen=True)
class Row:
    """The memory of one sample in a batch: what a decoder fills when it decodes in place.

    Args:
        shape: shape of the memory, C order, e.g. (224, 224, 3).
        dtype: numpy's name of the element type, e.g. "uint8".
        axes: the permutation from memory to what the user sees, e.g. (2, 0, 1) for [3, 224, 224].
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[int, ...] | None = None


@runtime_checkable
class RowDecoder(Protocol):
    """A decoder that writes its sample straight into a row of the batch's slot.

    ``seed`` is the sample's own 64-bit number where ``takes_seed`` is true, else ``None``.

    It may also have ``decode_many_into(data, out, seeds)``, which decodes N samples into N rows and returns, for each,
    an exception or ``None``; ``seeds`` is ``None`` where none are taken. A chunk is then one call, unless there is a
    limit on the time of a sample. Where it raises, samples are decoded one by one. A subclass that overrides
    ``decode_into`` overrides ``decode_many_into``, too.
    """

    @property
    def row(self) -> Row:
        """The memory of one sample."""
        ...

    @property
    def takes_seed(self) -> bool:
        """Whether the sample depends on random numbers."""
        ...

    def decode_into(self, data: Any, out: NDArray[Any], seed: int | None = None) -> None:
        """Decode ``data`` into ``out``, an array of ``row.shape`` and ``row.dtype``."""
        ...


class HostTensor:
    """A tensor of a batch before it is one: host memory in numpy's hands, so that no torch is needed to fill it.

    No dataclass, since those are nodes of a batch and this is a leaf.

    Args:
        memory: the C-contiguous array, [N, *row].
        axes: permutation of all dimensions that gives what the user sees; ``None`` for none.
        torch_dtype: name of a torch dtype that numpy lacks (``"bfloat16"``); memory is then of its size.
        pinned: the memory is page-locked, a copy from it runs by itself.
    """

    __slots__ = ("axes", "memory", "pinned", "torch_dtype")

    def __init__(
        self,
        memory: NDArray[Any],
        axes: tuple[int, ...] | None = None,
        torch_dtype: str | None = None,
        pinned: bool = False,
    ) -> None:
        self.memory = memory
        self.axes = axes
        self.torch_dtype = torch_dtype
        self.pinned = pinned


class DeferredTensor(ABC):
    """A tensor of a batch that is completed on the device."""

    @abstractmethod
    def arrive(self, copy: Callable[[HostTensor], Any]) -> Any:
        """The tensor, on the side stream; ``copy`` queues copies there, and keeps the host's memory until they ran."""


class EpochOrder(Protocol):
    """The order of one epoch."""

    @property
    def length(self) -> int:
        """How many positions it has."""
        ...

    def index_at(self, position: int) -> int | Awaitable[int]:
        """The index at a position, or word of it to come; from ``length`` on it begins anew."""
        ...


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """One batch as the order gives it.

    Args:
        number: position of this batch among this rank's batches of the epoch, from 0.
        indices: positions in the source, in the order in which they stand in the batch.
        positions: position of each sample in the global order of the epoch.
        epoch_seed: what (seed, epoch) come to; with a position it gives that sample's own random numbers.
        order: of the whole epoch, for whoever looks for a sample to take another's place.
    """

    number: int
    indices: Sequence[int]
    positions: Sequence[int]
    epoch_seed: int
    order: EpochOrder | None = None
