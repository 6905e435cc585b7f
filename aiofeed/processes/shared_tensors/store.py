"""Tensors in shared memory, and the thread that offers them to other processes.

The thread has an event loop that accepts connections and answers requests. ``stop`` only signals it; it then removes
the socket and closes the descriptors. ``join`` waits for that, for a bounded time. Interpreter exit and forks are
handled in ``runtime/threads.py``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from aiofeed.core.errors import FeedError
from aiofeed.core.formatting import format_bytes, kind_of
from aiofeed.processes.ipc.address import TENSORS, Listener
from aiofeed.processes.ipc.cuda_ipc import CudaHandles, HandleError
from aiofeed.processes.ipc.framing import MAX_DESCRIPTORS, Connection, close_all
from aiofeed.processes.ipc.peers import Peer
from aiofeed.processes.ipc.schema import encode
from aiofeed.processes.ipc.shared_memory import anonymous_memory
from aiofeed.processes.shared_tensors.offers import (
    VERSION,
    Attach,
    AttachRefused,
    InSegment,
    Kind,
    Offer,
    OnDevice,
    decode_attach,
)
from aiofeed.runtime import machine
from aiofeed.runtime.buffers import Bytes
from aiofeed.runtime.event_loop import EventLoopThread

log: logging.Logger = logging.getLogger("aiofeed.processes")

# Vector loads; a multiple of every dtype's own alignment.
ALIGNMENT = 64

# A request has a dozen bytes.
_MAX_REQUEST_BYTES = 1024
# A connection is closed after this time: processes send their request at once and read the reply.
_TIMEOUT_S = 60.0
_JOIN_S = 1.0


class TensorStore:
    """Tensors in shared memory and on devices.

    Args:
        tensors: A tensor or array, or a list, tuple or dict of them.
        handles: Exports device memory.

    Raises:
        TypeError, ValueError: One of them cannot be shared.
        FeedError: There is not enough memory; the message has the figures.
    """

    def __init__(self, tensors: Any, handles: CudaHandles) -> None:
        self.keys: list[str | int]
        self.tensors: list[torch.Tensor]
        self.kind, self.keys, parts = split_parts(tensors)
        self._handles = handles
        self._descriptors: list[int] = []
        self._sizes: list[int] = []
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
            places = list(self._places_on_host)
        offer = Offer(self.kind, self.keys, places, self._sizes)
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
        found: list[tuple[torch.Tensor, InSegment | None] | None] = []
        known: dict[int, int] = {}
        for part in parts:
            if isinstance(part, torch.Tensor) and self._handles.holds(part):
                # Other processes see the bits of the memory: no lazy conjugation or negation.
                found.append((part.resolve_conj().resolve_neg().contiguous(), None))
            elif isinstance(part, torch.Tensor) and (place := self._in_torch_memory(part, known)) is not None:
                found.append((part, place))
            else:
                found.append(None)
        copies = iter(self._copy([part for part, each in zip(parts, found, strict=True) if each is None]))
        pairs = [next(copies) if each is None else each for each in found]
        return [tensor for tensor, _ in pairs], [place for _, place in pairs]

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

    def _copy(self, parts: Sequence[Any]) -> list[tuple[torch.Tensor, InSegment]]:
        """Copies of tensors and arrays in a new segment, and where each is."""
        forms = [_without_memory(part) for part in parts]
        offsets, end = [], 0
        for form in forms:
            offsets.append(end)
            end += -(-form.nbytes // ALIGNMENT) * ALIGNMENT
        free = machine.free_memory()
        if end > free:
            raise FeedError(
                f"the tensors need {format_bytes(end)} of shared memory, into which they are copied once, and this "
                f"machine or container has {format_bytes(free)} left; share fewer, load them piece by piece "
                f"into a tensor that has been shared, or raise the container's memory limit"
            )
        memory: Bytes = np.empty(0, np.uint8)
        if end:
            descriptor = anonymous_memory(end)
            self._descriptors.append(descriptor)
            self._sizes.append(end)
            memory = map_memory(descriptor, end, private=False)
        copies = []
        for part, form, offset in zip(parts, forms, offsets, strict=True):
            shape = list(form.shape)
            copy = tensor_in(memory, offset, shape, form.dtype)
            if isinstance(part, torch.Tensor):
                copy.copy_(part)
            else:
                np.copyto(copy.numpy(), part)
            segment = len(self._sizes) - 1 if copy.nbytes else -1
            copies.append((copy, InSegment(shape, _name(form.dtype), segment, offset)))
        return copies

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

    @cached_property
    def _places_on_host(self) -> list[InSegment]:
        """Where each tensor is in host memory; tensors on devices are copied there once."""
        on_device = self._device_tensors()
        copies = iter(
            msgspec.structs.replace(place, device=self._handles.identity(tensor))
            for tensor, (_, place) in zip(on_device, self._copy(on_device), strict=True)
        )
        return [next(copies) if place is None else place for place in self._places]


class TensorServer:
    """A listening socket and its thread, which uses and closes the store.

    Raises:
        FeedError: Another process listens there, or there can be no socket.
    """

    def __init__(self, path: Path, store: TensorStore) -> None:
        self.path = path
        self._store = store
        self._connections: set[Connection] = set()
        self._listener = Listener(path, TENSORS)
        self._thread = EventLoopThread(read_threads=1, decode_threads=1)
        self._thread.at_exit(self._close)
        try:
            self._thread.launch()
            self._thread.start(self._serve)
        except BaseException:
            self._thread.stop()
            self._close()  # the thread may not exist
            raise

    def stop(self) -> None:
        """Tell the thread to end. Never blocks; idempotent."""
        self._thread.stop()

    def watch(self, owner: object) -> None:
        """Stop when ``owner`` is collected."""
        self._thread.watch(owner)

    def join(self) -> None:
        """Wait until the thread has ended, for a bounded time: it may be copying from a device."""
        self._thread.join(_JOIN_S)

    async def _serve(self) -> None:
        """Answer requests until cancelled."""
        self._listener.start_accepting(self._accepted, self._connections)
        try:
            await asyncio.Event().wait()
        finally:
            self._listener.stop_accepting()
            for connection in self._connections:
                connection.close()

    def _close(self) -> None:
        self._listener.close()
        self._store.close()

    def _accepted(self, sock: socket.socket, peer: Peer) -> None:
        def end(error: Exception | None = None) -> None:
            connection.close()
            timeout.cancel()
            self._connections.discard(connection)

        def received(payload: bytes, descriptors: list[int]) -> None:
            connection.send(*self._answer(decode_attach(payload)))

        connection = Connection(sock, received=received, lost=end, limit_bytes=_MAX_REQUEST_BYTES)
        timeout = asyncio.get_running_loop().call_later(_TIMEOUT_S, end)
        self._connections.add(connection)

    def _answer(self, request: Attach) -> tuple[bytes, list[int]]:
        try:
            return self._store.answer(request)
        except Exception as error:  # noqa: BLE001 - whatever it is, the process that attaches must get it
            return encode(AttachRefused(f"{type(error).__name__}: {error}")), []


def map_memory(descriptor: int, nbytes: int, *, private: bool) -> Bytes:
    """Map shared memory. Writes to a ``private`` mapping are not visible to other processes."""
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    return np.frombuffer(mmap.mmap(descriptor, nbytes, flags, mmap.PROT_READ | mmap.PROT_WRITE), np.uint8)


def tensor_in(memory: Bytes, offset: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """The tensor at an offset of the memory, without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(memory[offset : offset + nbytes]).view(dtype).reshape(shape)


def _without_memory(part: Any) -> torch.Tensor:
    """A tensor of the same shape and dtype on the meta device."""
    if isinstance(part, torch.Tensor):
        return torch.empty(part.shape, dtype=part.dtype, device="meta")
    dtype = torch.from_numpy(np.empty(0, part.dtype.newbyteorder("="))).dtype
    return torch.empty(part.shape, dtype=dtype, device="meta")


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
    if isinstance(tensors, torch.Tensor | np.ndarray):
        return "tensor", [], [_checked(tensors, "tensors")]
    kind: Kind
    keys: list[str | int]
    items: Collection[Any]
    if isinstance(tensors, Mapping):
        for key in tensors:
            if type(key) not in (str, int):
                raise TypeError(f"tensors has the key {key!r}: expected keys of type str or int")
        kind, keys, items = "dict", list(tensors), tensors.values()
        try:
            encode(keys)
        except (UnicodeEncodeError, OverflowError) as error:
            raise ValueError(f"tensors has a key that cannot be sent to another process: {error}") from None
    elif type(tensors) in (list, tuple):
        kind, keys, items = ("list" if type(tensors) is list else "tuple"), [], tensors
    else:
        raise TypeError(
            f"tensors: expected a tensor or array, or a list, tuple or dict of them, not {type(tensors).__name__}"
        )
    if not items:
        raise ValueError(f"tensors is an empty {kind}: there is nothing to share")
    names = keys or range(len(items))
    parts = [_checked(item, f"tensors[{name!r}]") for name, item in zip(names, items, strict=True)]
    return kind, keys, parts


def _checked(item: Any, where: str) -> Any:
    """A tensor or array, detached; ``TypeError`` if it is neither, or has no plain memory."""
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
        raise TypeError(f"{where} is {kind_of(item)}: expected a tensor or an array")
    if type(item) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise TypeError(
            f"{where} is {kind_of(item)}, which other processes would get as a plain tensor; to allow that, "
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
