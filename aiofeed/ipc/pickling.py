"""Batches of any type between a worker process and its parent: pickled, with the memory of arrays in a slot.

Containers, tensor subclasses and other objects are pickled as ``torch.multiprocessing`` pickles them. Only the memory
of tensors and arrays is not: it is written to shared memory, and the parent's tensors lie there without a copy.
"""

from __future__ import annotations

import bisect
import io
import math
import pickle
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
import torch.multiprocessing  # registers how tensors are pickled

from aiofeed.ipc.ring import Extent, Ring, Slot
from aiofeed.kernel.runtime.buffers import SMALL_BYTES
from aiofeed.kernel.runtime.tensors import keep_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

# Smaller memory is pickled with the batch.
_INLINE_BYTES = 2 * 1024


class SlotStorage:
    """Creates the storages in which ``default_collate`` stacks a batch inside a slot, so that they need no copy.

    In a worker process ``default_collate`` asks torch for a storage in shared memory; ``installed`` replaces torch's.
    """

    def __init__(self) -> None:
        self._slot: Slot | None = None
        self._owners: list[weakref.ref[Any]] = []

    def begin(self, slot: Slot | None) -> None:
        """Create the next storages in a slot, if there is one."""
        self._slot, self._owners = slot, []

    @property
    def in_use(self) -> bool:
        """Whether something refers to a storage that was created since ``begin``."""
        return any(owner() is not None for owner in self._owners)

    def new_shared(self, nbytes: int, *, device: Any = "cpu") -> torch.UntypedStorage:
        """Return a storage in the slot; on other devices than the CPU, torch's own."""
        if self._slot is None or not nbytes or torch.device(device).type != "cpu":
            return torch.UntypedStorage(nbytes, device=device)
        # An array of its own for each storage: a storage that the dataset keeps keeps this array.
        memory: Any = self._slot.take(nbytes)
        owner = np.frombuffer(memoryview(memory), np.uint8)
        self._owners.append(weakref.ref(owner))
        return torch.frombuffer(owner, dtype=torch.uint8).untyped_storage()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Use ``new_shared`` in place of ``torch.UntypedStorage._new_shared``."""
        kind: Any = torch.UntypedStorage
        original = kind._new_shared
        kind._new_shared = self.new_shared
        try:
            yield
        finally:
            kind._new_shared = original
            self._slot = None


class _Buffers:
    """Puts the buffers of a pickle into a slot, and notes where they lie."""

    def __init__(self, slot: Slot, smallest: float) -> None:
        self._slot = slot
        self._smallest = smallest
        self.extents: list[Extent] = []

    def place(self, buffer: pickle.PickleBuffer) -> bool:
        """Put a buffer into the slot; return whether it is pickled with the batch instead."""
        memory = np.frombuffer(buffer.raw(), np.uint8)
        if memory.nbytes < self._smallest:
            return True
        found = self._slot.locate(memory)
        if found is None:
            copy = self._slot.take(memory.nbytes)
            np.copyto(copy, memory)
            found = self._slot.locate(copy)
            assert found is not None
        self.extents.append(Extent(*found, memory.nbytes))
        return False


_Parts: TypeAlias = dict[tuple[int, int], list[tuple[int, int]]]
"""Where parts of storages begin and end, by address and size of the storage."""


class _BatchPickler(ForkingPickler):
    """Pickles a view of part of a large storage with that part alone.

    Args:
        joined: The parts of storages of which tensors overlap; the tensors of a part share its memory.

    Attributes:
        parts: Those of the tensors and storages that were pickled.
    """

    def __init__(self, file: io.BytesIO, buffers: _Buffers, joined: _Parts) -> None:
        super().__init__(file, 5, True, buffers.place)
        self.parts: _Parts = defaultdict(list)
        self._joined = joined
        self._shared: dict[tuple[int, int], dict[Any, torch.UntypedStorage]] = defaultdict(dict)

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor and _is_plain(value):
            return self._reduce_tensor(value)
        if kind is torch.UntypedStorage and value.device.type == "cpu":
            self.parts[value.data_ptr(), value.nbytes()].append((0, value.nbytes()))
            return _storage, (pickle.PickleBuffer(_memory(value)),)
        if isinstance(value, np.ndarray) and not value.dtype.isnative and value.dtype.names is None:
            # As the older protocol of torch's workers does; it leaves the fields of structures as they are.
            return value.astype(value.dtype.newbyteorder("="), "A").__reduce_ex__(5)
        if kind is np.ndarray and not value.flags.writeable and not value.dtype.hasobject:
            return value.copy(order="A").__reduce_ex__(5)  # arrives writable, as from torch
        return NotImplemented

    def _reduce_tensor(self, tensor: Any) -> tuple[Any, ...]:
        storage, itemsize = tensor.untyped_storage(), tensor.itemsize
        size, stride, offset = tuple(tensor.size()), tensor.stride(), tensor.storage_offset() * itemsize
        span = tensor.numel() and 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        part, nbytes = (offset, offset + span * itemsize), storage.nbytes()
        if nbytes <= 2 * span * itemsize:
            part = 0, nbytes
        key = storage.data_ptr(), nbytes
        if span:
            self.parts[key].append(part)
            if key in self._joined:
                parts = self._joined[key]
                part = parts[bisect.bisect(parts, (part[0], nbytes)) - 1]
        if part[1] - part[0] < nbytes:
            memory = _memory(storage)[slice(*part)]
            if key not in self._joined:
                return _tensor_of_part, (pickle.PickleBuffer(memory), tensor.dtype, size, stride)
            if part not in self._shared[key]:
                self._shared[key][part] = _storage(memory)
            storage = self._shared[key][part]
        return _tensor, (storage, tensor.dtype, (offset - part[0]) // itemsize, size, stride)


def _join(parts: list[tuple[int, int]], grain: int) -> list[tuple[int, int]]:
    """Join parts that overlap; each begins at a multiple of ``grain``."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted((start // grain * grain, end) for start, end in parts):
        if joined and start < joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def dump_batch(batch: Any, slot: Slot, *, shared: bool = True) -> tuple[bytes, list[Extent]]:
    """Pickle a batch; memory of 2 KiB and more goes to the slot if ``shared``.

    Returns:
        The pickle, and where its buffers lie.
    """
    joined: _Parts = {}
    while True:
        file, buffers = io.BytesIO(), _Buffers(slot, _INLINE_BYTES if shared else math.inf)
        pickler = _BatchPickler(file, buffers, joined)
        pickler.dump(batch)
        # Tensors that share memory still do. Several that are sent with their whole storage share that already.
        several = {key: parts for key, parts in pickler.parts.items() if len(parts) > 1 and {*parts} != {(0, key[1])}}
        if joined or all(len(_join(parts, 1)) == len(parts) for parts in several.values()):
            return file.getvalue(), buffers.extents
        # An item of any dtype lies at a whole number of items from a multiple of 16.
        joined = {key: _join(parts, 16) for key, parts in several.items()}


def move_batch(extents: Sequence[Extent], slot: Slot, target: Slot) -> list[Extent]:
    """Copy the buffers of a batch from its slot to another one; return where they lie there."""
    memory: dict[int, Any] = {segment.number: segment.memory for segment in slot.segments}
    buffers = _Buffers(target, smallest=0)
    for segment, offset, nbytes in extents:
        buffers.place(pickle.PickleBuffer(memory[segment][offset : offset + nbytes]))
    return buffers.extents


def unpickle(data: bytes, buffers: Iterable[Any]) -> Any:
    """Rebuild a value that ``dump_batch`` pickled. Only for values of the user's own worker processes."""
    return pickle.loads(data, buffers=buffers)


def load_batch(data: bytes, extents: Sequence[Extent], ring: Ring) -> tuple[Any, list[NDArray[np.uint8]]]:
    """Rebuild a batch; its tensors and arrays of 64 KiB and more lie in the ring.

    Returns:
        The batch, and the arrays that its memory belongs to, one per segment. The slot is free when nothing refers
        to them.
    """
    owners: dict[int, NDArray[np.uint8]] = {}
    buffers: list[NDArray[np.uint8]] = []
    for segment, offset, nbytes in extents:
        if nbytes < SMALL_BYTES:
            buffers.append(ring.segment(segment).memory[offset : offset + nbytes].copy())
            continue
        if segment not in owners:
            owners[segment] = ring.segment(segment).owner()
        buffers.append(owners[segment][offset : offset + nbytes])
    return unpickle(data, buffers), list(owners.values())


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__
    )


def _memory(storage: torch.UntypedStorage) -> Any:
    memory: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return memory


def _storage(memory: Any) -> torch.UntypedStorage:
    if not len(memory):
        return torch.UntypedStorage(0)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    keep_memory(storage, memory)
    return storage


def _tensor(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


def _tensor_of_part(memory: Any, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    return _tensor(_storage(memory), dtype, 0, size, stride)
