"""Tensors in shared memory, and the offers of them that other processes get."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from aiofeed.core.errors import FeedError
from aiofeed.core.formatting import format_bytes
from aiofeed.processes.ipc.cuda_ipc import DeviceHandles, HandleError
from aiofeed.processes.ipc.framing import MAX_DESCRIPTORS, close_all
from aiofeed.processes.ipc.schema import encode
from aiofeed.processes.ipc.shared_memory import anonymous_memory
from aiofeed.processes.shared_tensors.protocol import VERSION, Attach, AttachRefused, InSegment, Offer, OnDevice
from aiofeed.runtime import machine
from aiofeed.runtime.buffers import Bytes

log = logging.getLogger("aiofeed.processes")

# Vector loads; a multiple of every dtype's own alignment.
ALIGNMENT = 64

Kind = Literal["tensor", "list", "tuple", "dict"]


class TensorStore:
    """Tensors in shared memory and on devices.

    Args:
        tensors: A tensor or array, or a list, tuple or dict of them.
        handles: Exports device memory.

    Raises:
        TypeError, ValueError: One of them cannot be shared.
        FeedError: There is not enough memory; the message has the figures.
    """

    def __init__(self, tensors: Any, handles: DeviceHandles) -> None:
        self.kind, self.keys, parts = split_parts(tensors)
        self._handles = handles
        self._descriptors: list[int] = []
        self._sizes: list[int] = []
        self._on_host: list[InSegment] | None = None
        try:
            self.tensors, self._places = self._place_in_shared_memory(parts)
        except BaseException:
            self.close()
            raise
        for part in self._device_tensors():
            handles.synchronize(part)

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(each.nbytes for each in self.tensors)

    def structure(self) -> Any:
        """The shared tensors, in the given container."""
        return join_parts(self.kind, self.keys, self.tensors)

    def answer(self, request: Attach) -> tuple[bytes, list[int]]:
        """The reply to a request, and its descriptors, which the caller closes."""
        if request.version != VERSION:
            reason = f"it uses protocol version {VERSION}, this process version {request.version}"
            return encode(AttachRefused(reason)), []
        places: list[InSegment | OnDevice] | None = None if request.host else self._places_with_handles()
        if places is None:
            places = list(self._places_on_host())
        offer = Offer(os.getpid(), self.kind, self.keys, places, self._sizes)
        return encode(offer), _duplicates(self._descriptors)

    def close(self) -> None:
        """Close the descriptors. Memory stays mapped as long as a tensor refers to it. Idempotent."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        self._sizes.clear()
        self.tensors = []

    def _device_tensors(self) -> list[torch.Tensor]:
        return [each for each, place in zip(self.tensors, self._places, strict=True) if place is None]

    # --- memory ---

    def _place_in_shared_memory(self, parts: list[Any]) -> tuple[list[torch.Tensor], list[InSegment | None]]:
        """The tensors in memory that can be shared, and where each is: ``None`` for a tensor on a device."""
        tensors: list[torch.Tensor] = []
        places: list[InSegment | None] = []
        copied: list[int] = []
        known: dict[int, int] = {}
        for at, part in enumerate(parts):
            if isinstance(part, torch.Tensor) and self._handles.holds(part):
                # Other processes see the bits of the memory: no lazy conjugation or negation.
                tensors.append(part.resolve_conj().resolve_neg().contiguous())
                places.append(None)
            elif isinstance(part, torch.Tensor) and (place := self._in_torch_memory(part, known)) is not None:
                tensors.append(part)
                places.append(place)
            else:
                tensors.append(_without_memory(part))
                places.append(None)
                copied.append(at)
        segment, memory, offsets = self._new_segment([tensors[at] for at in copied])
        for at, offset in zip(copied, offsets, strict=True):
            shape, dtype = list(tensors[at].shape), tensors[at].dtype
            tensors[at] = tensor_in(memory, offset, shape, dtype)
            places[at] = InSegment(shape, _name(dtype), -1 if tensors[at].nbytes == 0 else segment, offset)
            _copy(parts[at], tensors[at])
        return tensors, places

    def _in_torch_memory(self, tensor: torch.Tensor, known: dict[int, int]) -> InSegment | None:
        """Where a tensor is in torch's shared memory; ``None`` if it is not there or has no descriptor."""
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.nbytes == 0 or not storage.is_shared():
            return None
        if tensor.is_neg() or tensor.is_conj():
            return None
        segment = known.get(storage.data_ptr())
        if segment is None:
            # The other strategy and storages mapped from files have no descriptor. A message carries a limited number;
            # two are reserved for the segments of copied tensors and of tensors copied from devices.
            multiprocessing: Any = torch.multiprocessing  # untyped
            if multiprocessing.get_sharing_strategy() != "file_descriptor" or len(known) >= MAX_DESCRIPTORS - 2:
                return None
            untyped: Any = storage  # torch's stubs lack the method
            try:
                descriptor, nbytes = untyped._share_fd_cpu_()
                self._descriptors.append(os.dup(descriptor))
            except (RuntimeError, OSError):
                return None
            self._sizes.append(nbytes)
            segment = known[storage.data_ptr()] = len(self._sizes) - 1
        offset = int(tensor.storage_offset()) * tensor.itemsize
        return InSegment(list(tensor.shape), _name(tensor.dtype), segment, offset)

    def _new_segment(self, tensors: Sequence[torch.Tensor]) -> tuple[int, Bytes, list[int]]:
        """A new segment for copies of tensors: its number, its memory, and the offset of each."""
        offsets, end = [], 0
        for each in tensors:
            offsets.append(end)
            end += -(-each.nbytes // ALIGNMENT) * ALIGNMENT
        if end == 0:
            return -1, np.empty(0, np.uint8), offsets
        free = machine.free_memory()
        if end > free:
            raise FeedError(
                f"the tensors need {format_bytes(end)} of shared memory, into which they are copied once, and this "
                f"machine or container has {format_bytes(free)} left; share fewer, load them piece by piece "
                f"into a tensor that has been shared, or raise the container's memory limit"
            )
        descriptor = anonymous_memory(end)
        self._descriptors.append(descriptor)
        self._sizes.append(end)
        return len(self._sizes) - 1, map_memory(descriptor, end, private=False), offsets

    # --- offers ---

    def _places_with_handles(self) -> list[InSegment | OnDevice] | None:
        """Where each tensor is, with a handle for those on a device; ``None`` if one cannot be exported."""
        places: list[InSegment | OnDevice] = []
        for tensor, place in zip(self.tensors, self._places, strict=True):
            if place is not None:
                places.append(place)
                continue
            try:
                handle = self._handles.export(tensor)
            except HandleError as error:
                log.warning("device memory cannot be shared here (%s): every process gets its own copy", str(error))
                for exported in places:
                    if isinstance(exported, OnDevice):
                        self._handles.forget(exported.handle)
                return None
            places.append(OnDevice(list(tensor.shape), _name(tensor.dtype), int(tensor.storage_offset()), handle))
        return places

    def _places_on_host(self) -> list[InSegment]:
        """Where each tensor is in host memory; tensors on devices are copied there once."""
        if self._on_host is None:
            on_device = self._device_tensors()
            segment, memory, offsets = self._new_segment(on_device)
            copies = []
            for tensor, offset in zip(on_device, offsets, strict=True):
                _copy(tensor, tensor_in(memory, offset, list(tensor.shape), tensor.dtype))
                at = -1 if tensor.nbytes == 0 else segment
                identity = self._handles.identity(tensor)
                copies.append(InSegment(list(tensor.shape), _name(tensor.dtype), at, offset, identity))
            next_copy = iter(copies)
            self._on_host = [place if place is not None else next(next_copy) for place in self._places]
        return self._on_host


def map_memory(descriptor: int, nbytes: int, *, private: bool) -> Bytes:
    """Map shared memory. Writes to a ``private`` mapping are not visible to other processes."""
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    return np.frombuffer(mmap.mmap(descriptor, nbytes, flags, mmap.PROT_READ | mmap.PROT_WRITE), np.uint8)


def tensor_in(memory: Bytes, offset: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """The tensor at an offset of the memory, without a copy."""
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(memory[offset : offset + nbytes]).view(dtype).reshape(shape)


def _without_memory(part: Any) -> torch.Tensor:
    """A tensor of the same shape and dtype on the meta device."""
    if isinstance(part, torch.Tensor):
        return torch.empty(part.shape, dtype=part.dtype, device="meta")
    dtype = torch.from_numpy(np.empty(0, part.dtype.newbyteorder("="))).dtype
    return torch.empty(part.shape, dtype=dtype, device="meta")


def _copy(part: Any, to: torch.Tensor) -> None:
    if isinstance(part, torch.Tensor):
        to.copy_(part)
    else:
        np.copyto(to.numpy(), part)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _duplicates(descriptors: Sequence[int]) -> list[int]:
    made: list[int] = []
    try:
        for descriptor in descriptors:
            made.append(os.dup(descriptor))  # noqa: PERF401 - those made before an error are closed
    except BaseException:
        close_all(made)
        raise
    return made


def split_parts(tensors: Any) -> tuple[Kind, list[str | int], list[Any]]:
    """The kind of container, the keys of a dict, and each tensor or array, detached.

    Raises:
        TypeError, ValueError: One of them cannot be shared.
    """
    kind, keys, items = _container(tensors)
    names = [f"[{key!r}]" for key in keys or range(len(items))] if kind != "tensor" else [""]
    return kind, keys, [_checked(item, f"tensors{name}") for name, item in zip(names, items, strict=True)]


def _container(tensors: Any) -> tuple[Kind, list[str | int], list[Any]]:
    if isinstance(tensors, torch.Tensor | np.ndarray):
        return "tensor", [], [tensors]
    kind: Kind
    if isinstance(tensors, Mapping):
        for key in tensors:
            if type(key) not in (str, int):
                raise TypeError(f"tensors has the key {key!r}: expected keys of type str or int")
        kind, keys, items = "dict", list(tensors), list(tensors.values())
        _check_keys(keys)
    elif type(tensors) in (list, tuple):
        kind, keys, items = ("list" if type(tensors) is list else "tuple"), [], list(tensors)
    else:
        raise TypeError(
            f"tensors: expected a tensor or array, or a list, tuple or dict of them, not {type(tensors).__name__}"
        )
    if not items:
        raise ValueError(f"tensors is an empty {kind}: there is nothing to share")
    return kind, keys, items


def _check_keys(keys: list[str | int]) -> None:
    try:
        encode(keys)
    except (UnicodeEncodeError, OverflowError) as error:
        raise ValueError(f"tensors has a key that cannot be sent to another process: {error}") from None


def _checked(item: Any, where: str) -> Any:
    """A tensor or array, detached.

    Raises:
        TypeError: It is neither, or has no plain memory.
    """
    if isinstance(item, np.ndarray):
        if isinstance(item, np.ma.MaskedArray):
            raise TypeError(f"{where} is a masked array; share its data and its mask")
        array = np.asarray(item)
        try:
            torch.from_numpy(np.empty(0, array.dtype.newbyteorder("=")))
        except TypeError:
            raise TypeError(f"{where} is an array of {array.dtype}, a dtype that torch lacks") from None
        return array
    if not isinstance(item, torch.Tensor):
        raise TypeError(f"{where} is a {type(item).__name__}: expected a tensor or an array")
    if type(item) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise TypeError(
            f"{where} is a {type(item).__name__}, which other processes would get as a plain tensor; to allow that, "
            f"share its .as_subclass(torch.Tensor)"
        )
    if item.layout is not torch.strided or item.is_nested:
        raise TypeError(f"{where} has the layout {item.layout}: expected a strided tensor, or share its parts")
    if item.is_quantized:
        raise TypeError(f"{where} is quantized; share its int_repr() and its scales")
    if item.device.type == "meta":
        raise TypeError(f"{where} is on the meta device: it has no values to share")
    return item.detach()


def join_parts(kind: Kind, keys: Sequence[str | int], tensors: Sequence[torch.Tensor]) -> Any:
    """The container with the given tensors."""
    if kind == "tensor":
        return tensors[0]
    if kind == "dict":
        return dict(zip(keys, tensors, strict=True))
    return list(tensors) if kind == "list" else tuple(tensors)
