"""What is shared: tensors brought into shared memory, and the offers of them that attachers get."""

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
from aiofeed.processes.ipc.framing import MAX_DESCRIPTORS
from aiofeed.processes.ipc.shared_memory import anonymous
from aiofeed.processes.shared_tensors.protocol import VERSION, Attach, AttachRefused, InSegment, Offer, OnDevice, encode
from aiofeed.runtime import machine
from aiofeed.runtime.buffers import Bytes

log = logging.getLogger("aiofeed.processes")

# Vector loads, and more than any dtype's own.
ALIGNMENT = 64


Kind = Literal["tensor", "list", "tuple", "dict"]


class TensorStore:
    """Tensors in shared memory, and on devices.

    Args:
        tensors: a tensor or array, or a list, tuple or dict of them.
        handles: of device memory.

    Raises:
        TypeError, ValueError: something among them cannot be shared.
        FeedError: there is too little memory; the message has the figures.
    """

    def __init__(self, tensors: Any, handles: DeviceHandles) -> None:
        self.kind, self.keys, parts = take_apart(tensors)
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
            handles.settle(part)

    @property
    def nbytes(self) -> int:
        """Of all the tensors."""
        return sum(each.nbytes for each in self.tensors)

    def structure(self) -> Any:
        """The shared tensors, in the structure that was given."""
        return assemble(self.kind, self.keys, self.tensors)

    def answer(self, asked: Attach) -> tuple[bytes, list[int]]:
        """An offer of everything, and descriptors that are the caller's to close."""
        if asked.version != VERSION:
            return encode(
                AttachRefused(
                    f"it speaks version {VERSION} of aiofeed's messages, this process version {asked.version}"
                )
            ), []
        places: list[InSegment | OnDevice] | None = None if asked.host else self._places_with_handles()
        if places is None:
            places = list(self._places_on_host())
        offer = Offer(os.getpid(), self.kind, self.keys, places, self._sizes)
        return encode(offer), _duplicates(self._descriptors)

    def close(self) -> None:
        """Close the descriptors. What is mapped stays mapped for as long as a tensor refers to it."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        self._sizes.clear()
        self.tensors = []

    def _device_tensors(self) -> list[torch.Tensor]:
        return [each for each, place in zip(self.tensors, self._places, strict=True) if place is None]

    # --- memory ---

    def _place_in_shared_memory(self, parts: list[Any]) -> tuple[list[torch.Tensor], list[InSegment | None]]:
        """The tensors where others can have them, and where that is: ``None`` on a device."""
        tensors: list[torch.Tensor] = []
        places: list[InSegment | None] = []
        copied: list[int] = []
        known: dict[int, int] = {}
        for at, part in enumerate(parts):
            if isinstance(part, torch.Tensor) and self._handles.holds(part):
                # As bits lie there is what others see: no view that negates, or conjugates, as it is read.
                tensors.append(part.resolve_conj().resolve_neg().contiguous())
                places.append(None)
            elif isinstance(part, torch.Tensor) and (place := self._as_it_lies(part, known)) is not None:
                tensors.append(part)
                places.append(place)
            else:
                tensors.append(_like(part))
                places.append(None)
                copied.append(at)
        segment, memory, offsets = self._room_for([tensors[at] for at in copied])
        for at, offset in zip(copied, offsets, strict=True):
            shape, dtype = list(tensors[at].shape), tensors[at].dtype
            tensors[at] = tensor_in(memory, offset, shape, dtype)
            places[at] = InSegment(shape, _name(dtype), -1 if tensors[at].nbytes == 0 else segment, offset)
            _copy(parts[at], tensors[at])
        return tensors, places

    def _as_it_lies(self, tensor: torch.Tensor, known: dict[int, int]) -> InSegment | None:
        """Where a tensor lies, if that is in torch's shared memory; ``None`` if not."""
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.nbytes == 0 or not storage.is_shared():
            return None
        if tensor.is_neg() or tensor.is_conj():
            return None
        segment = known.get(storage.data_ptr())
        if segment is None:
            # The other strategy, and storages that torch maps from files, have no descriptor; one message has room
            # for so many, with one for what is copied and one for what is brought from devices.
            multiprocessing: Any = torch.multiprocessing  # without types
            if multiprocessing.get_sharing_strategy() != "file_descriptor" or len(known) >= MAX_DESCRIPTORS - 2:
                return None
            untyped: Any = storage  # the method is there, but torch's stubs leave it out
            try:
                descriptor, nbytes = untyped._share_fd_cpu_()
                self._descriptors.append(os.dup(descriptor))
            except (RuntimeError, OSError):
                return None
            self._sizes.append(nbytes)
            segment = known[storage.data_ptr()] = len(self._sizes) - 1
        offset = int(tensor.storage_offset()) * tensor.itemsize
        return InSegment(list(tensor.shape), _name(tensor.dtype), segment, offset)

    def _room_for(self, tensors: Sequence[torch.Tensor]) -> tuple[int, Bytes, list[int]]:
        """A new segment for copies of these: its number, its memory, and where each goes."""
        offsets, end = [], 0
        for each in tensors:
            offsets.append(end)
            end += -(-each.nbytes // ALIGNMENT) * ALIGNMENT
        if end == 0:
            return -1, np.empty(0, np.uint8), offsets
        free = machine.free_memory()
        if end > free:
            raise FeedError(
                f"the tensors take {format_bytes(end)} of shared memory, into which they are copied once, and "
                f"{format_bytes(free)} are left to this machine or container; share fewer, load them piece by piece "
                f"into a tensor that has been shared, or raise the container's memory limit"
            )
        descriptor = anonymous(end)
        self._descriptors.append(descriptor)
        self._sizes.append(end)
        return len(self._sizes) - 1, mapped(descriptor, end, private=False), offsets

    # --- offers ---

    def _places_with_handles(self) -> list[InSegment | OnDevice] | None:
        """With a handle for each tensor on a device; ``None`` where one has none."""
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
        """All in host memory: tensors on devices are copied there, once, and kept."""
        if self._on_host is None:
            on_device = self._device_tensors()
            segment, memory, offsets = self._room_for(on_device)
            brought = []
            for tensor, offset in zip(on_device, offsets, strict=True):
                _copy(tensor, tensor_in(memory, offset, list(tensor.shape), tensor.dtype))
                at = -1 if tensor.nbytes == 0 else segment
                identity = self._handles.identity(tensor)
                brought.append(InSegment(list(tensor.shape), _name(tensor.dtype), at, offset, identity))
            coming = iter(brought)
            self._on_host = [place if place is not None else next(coming) for place in self._places]
        return self._on_host


def mapped(descriptor: int, nbytes: int, *, private: bool) -> Bytes:
    """Shared memory; what is written to a private mapping of it is seen there only."""
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    return np.frombuffer(mmap.mmap(descriptor, nbytes, flags, mmap.PROT_READ | mmap.PROT_WRITE), np.uint8)


def tensor_in(memory: Bytes, offset: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """The tensor that lies there."""
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(memory[offset : offset + nbytes]).view(dtype).reshape(shape)


def _like(part: Any) -> torch.Tensor:
    """Of the same shape and dtype, without memory."""
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
            made.append(os.dup(descriptor))  # noqa: PERF401 - those made before an error have to be closed
    except BaseException:
        for descriptor in made:
            os.close(descriptor)
        raise
    return made


def take_apart(tensors: Any) -> tuple[Kind, list[str | int], list[Any]]:
    """Their structure, the keys of a dict, and each tensor or array, detached.

    Raises:
        TypeError, ValueError: something among them cannot be shared.
    """
    kind, keys, items = _structure(tensors)
    names = [f"[{key!r}]" for key in keys or range(len(items))] if kind != "tensor" else [""]
    return kind, keys, [_checked(item, f"tensors{name}") for name, item in zip(names, items, strict=True)]


def _structure(tensors: Any) -> tuple[Kind, list[str | int], list[Any]]:
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
        raise ValueError(f"tensors has a key that cannot be handed on: {error}") from None


def _checked(item: Any, where: str) -> Any:
    """The tensor or array itself, detached; an error for what is none, or has no plain memory."""
    if isinstance(item, np.ndarray):
        if isinstance(item, np.ma.MaskedArray):
            raise TypeError(f"{where} is a masked array; share its data and its mask")
        array = np.asarray(item)
        try:
            torch.from_numpy(np.empty(0, array.dtype.newbyteorder("=")))
        except TypeError:
            raise TypeError(f"{where} is an array of {array.dtype}, for which there is no tensor") from None
        return array
    if not isinstance(item, torch.Tensor):
        raise TypeError(f"{where} is a {type(item).__name__}: expected a tensor or an array")
    if type(item) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise TypeError(
            f"{where} is a {type(item).__name__}, which would come out as a plain tensor; if that is what you want, "
            f"share its .as_subclass(torch.Tensor)"
        )
    if item.layout is not torch.strided or item.is_nested:
        raise TypeError(f"{where} has the layout {item.layout}: expected a strided tensor, or share its parts")
    if item.is_quantized:
        raise TypeError(f"{where} is quantized; share its int_repr(), and its scales beside it")
    if item.device.type == "meta":
        raise TypeError(f"{where} is on the meta device: it has no values to share")
    return item.detach()


def assemble(kind: Kind, keys: Sequence[str | int], tensors: Sequence[torch.Tensor]) -> Any:
    """The structure of tensors in a row."""
    if kind == "tensor":
        return tensors[0]
    if kind == "dict":
        return dict(zip(keys, tensors, strict=True))
    return list(tensors) if kind == "list" else tuple(tensors)
