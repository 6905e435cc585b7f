"""Tensors in shared memory, and the thread that offers them to other processes.

The thread has an event loop that accepts connections and answers requests. When it is stopped, it removes the socket
and closes the descriptors. Interpreter exit and forks are handled in ``kernel/runtime/threads.py``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aiofeed.ipc.address import TENSORS, Listener
from aiofeed.ipc.batch_codec import DEVICE_DTYPES, encode_batch
from aiofeed.ipc.cuda_ipc import CudaHandles, HandleError
from aiofeed.ipc.framing import MAX_DESCRIPTORS, Connection
from aiofeed.ipc.peers import Peer
from aiofeed.ipc.ring import ALIGNMENT, SlotPool
from aiofeed.ipc.schema import ArrayNode, DeviceMemoryHandle, encode
from aiofeed.kernel.core.errors import FeedError
from aiofeed.kernel.core.formatting import format_bytes, kind_of
from aiofeed.kernel.runtime import machine
from aiofeed.kernel.runtime.event_loop import EventLoopThread
from aiofeed.serving.shared_tensors.offers import VERSION, Attach, AttachRefused, Offer, decode_attach

log: logging.Logger = logging.getLogger("aiofeed.processes")

# A request has a dozen bytes.
_MAX_REQUEST_BYTES = 1024
# A connection is closed after this time: processes send their request at once and read the reply.
_TIMEOUT_S = 60.0


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
        self._join, parts = split_parts(tensors)
        self._handles = handles
        # Which of them are on a device.
        self._on_device = [
            at for at, part in enumerate(parts) if isinstance(part, torch.Tensor) and handles.holds(part)
        ]
        self._pool = SlotPool(0, single_reader=False)
        self._slot = self._pool.lease()
        try:
            self.tensors: list[torch.Tensor] = self._place(parts)
        except BaseException:
            self.close()
            raise
        for tensor in self._device_tensors():
            handles.synchronize(tensor)

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(each.nbytes for each in self.tensors)

    def structure(self) -> Any:
        """Return the shared tensors, in the given container."""
        return self._join(self.tensors)

    def answer(self, request: Attach) -> tuple[bytes, list[int]]:
        """Return the reply to a request, and its descriptors, which the caller closes."""
        if request.version != VERSION:
            reason = f"it uses protocol version {VERSION}, this process version {request.version}"
            return encode(AttachRefused(reason)), []
        items: list[Any] = list(self.tensors)
        devices = [""] * len(items)
        handles = None if request.host else self._export()
        for at, tensor in zip(self._on_device, self._device_tensors(), strict=True):
            if handles is not None:
                items[at] = _describe_on_device(tensor)
            else:
                items[at], devices[at] = self._host_copies[at], self._handles.identity(tensor)
        # All of them lie in the slot already.
        described = encode_batch(self._join(items), self._slot)
        segments, descriptors, _ = self._slot.introduce(set())
        return encode(Offer(described, segments, handles or [], devices)), descriptors

    def close(self) -> None:
        """Close the descriptors. Memory stays mapped as long as a tensor refers to it. Idempotent."""
        self._pool.close()
        self._slot.segments.clear()
        self.tensors, self._on_device = [], []

    def _device_tensors(self) -> list[torch.Tensor]:
        return [self.tensors[at] for at in self._on_device]

    # --- memory ---

    def _place(self, parts: list[Any]) -> list[torch.Tensor]:
        """Return the tensors in memory that can be shared."""
        found: list[torch.Tensor | None] = []
        on_device = set(self._on_device)
        for at, part in enumerate(parts):
            if at in on_device:
                # Other processes see the bits of the memory: no lazy conjugation or negation.
                found.append(part.resolve_conj().resolve_neg().contiguous())
            else:
                found.append(part if isinstance(part, torch.Tensor) and self._adopt(part) else None)
        copies = iter(self._copy([part for part, each in zip(parts, found, strict=True) if each is None]))
        return [next(copies) if each is None else each for each in found]

    def _adopt(self, tensor: torch.Tensor) -> bool:
        """Add a tensor's storage to the slot; False if it is not in torch's shared memory or has no descriptor."""
        storage: Any = tensor.untyped_storage()  # torch's stubs lack the methods
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.nbytes == 0 or not storage.is_shared():
            return False
        if tensor.is_neg() or tensor.is_conj():
            return False
        memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        if self._slot.locate(memory) is not None:
            return True
        # The other strategy and storages mapped from files have no descriptor. A message carries a limited number; two
        # are reserved for the segments of copied tensors and of tensors copied from devices.
        multiprocessing: Any = torch.multiprocessing  # untyped
        known = len(self._slot.segments)
        if multiprocessing.get_sharing_strategy() != "file_descriptor" or known >= MAX_DESCRIPTORS - 2:
            return False
        try:
            self._slot.adopt(memory, os.dup(storage._share_fd_cpu_()[0]))
        except (RuntimeError, OSError):
            return False
        return True

    def _copy(self, parts: Sequence[Any]) -> list[torch.Tensor]:
        """Return copies of tensors and arrays in a new segment."""
        end = sum(-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts)
        free = machine.free_memory()
        if end > free:
            raise FeedError(
                f"the tensors need {format_bytes(end)} of shared memory, into which they are copied once, and this "
                f"machine or container has {format_bytes(free)} left; share fewer, load them piece by piece "
                f"into a tensor that has been shared, or raise the container's memory limit"
            )
        if end:
            self._slot.extend(end)
        copies = []
        for part in parts:
            is_tensor = isinstance(part, torch.Tensor)
            dtype = part.dtype if is_tensor else _torch_dtype(part)
            copy = torch.empty(part.shape, dtype=dtype)
            if part.nbytes:
                copy = torch.from_numpy(self._slot.take(part.nbytes)).view(dtype).reshape(part.shape)
            if is_tensor:
                copy.copy_(part)
            else:
                np.copyto(copy.numpy(), part)
            copies.append(copy)
        return copies

    @cached_property
    def _host_copies(self) -> dict[int, torch.Tensor]:
        """The tensors on devices, by number, copied to host memory once."""
        return dict(zip(self._on_device, self._copy(self._device_tensors()), strict=True))

    # --- device memory ---

    def _export(self) -> list[DeviceMemoryHandle] | None:
        """Return a handle for each tensor on a device; ``None`` if one cannot be exported."""
        exported: list[DeviceMemoryHandle] = []
        try:
            for tensor in self._device_tensors():
                exported.append(self._handles.export(tensor))  # noqa: PERF401 - those made before an error are taken back
        except HandleError as error:
            log.warning("device memory cannot be shared here (%s): every process gets its own copy", str(error))
            for handle in exported:
                self._handles.forget(handle)
            return None
        return exported


class TensorServer:
    """A listening socket and its thread, which uses and closes the store.

    Attributes:
        thread: Stops the server.

    Raises:
        FeedError: Another process listens there, or there can be no socket.
    """

    def __init__(self, path: Path, store: TensorStore) -> None:
        self.path = path
        self._store = store
        self._connections: set[Connection] = set()
        self._listener = Listener(path, TENSORS)
        self.thread: EventLoopThread = EventLoopThread(read_threads=1, decode_threads=1)
        self.thread.at_exit(self._close)
        try:
            self.thread.launch()
            self.thread.start(self._serve)
        except BaseException:
            self.thread.stop()
            self._close()  # the thread may not exist
            raise

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


def _torch_dtype(array: np.ndarray[Any, Any]) -> torch.dtype:
    """Return torch's dtype for the items of an array; ``TypeError`` if torch has none."""
    return torch.from_numpy(np.empty(0, array.dtype.newbyteorder("="))).dtype


def _describe_on_device(tensor: torch.Tensor) -> ArrayNode:
    offset, dtype = int(tensor.storage_offset()) * tensor.itemsize, str(tensor.dtype).removeprefix("torch.")
    return ArrayNode("device", 0, offset, list(tensor.shape), DEVICE_DTYPES[tensor.itemsize], None, dtype)


def split_parts(tensors: Any) -> tuple[Callable[[Sequence[Any]], Any], list[Any]]:
    """Return a function that makes such a container, and each tensor or array, detached.

    Raises:
        TypeError, ValueError: One of them cannot be shared.
    """
    if isinstance(tensors, torch.Tensor | np.ndarray):
        return lambda items: items[0], [_checked(tensors, "tensors")]
    join: Callable[[Sequence[Any]], Any]
    if isinstance(tensors, Mapping):
        kind, names, items = "dict", list(tensors), list(tensors.values())
        for key in names:
            if type(key) not in (str, int):
                raise TypeError(f"tensors has the key {key!r}: expected keys of type str or int")
        try:
            encode(names)
        except (UnicodeEncodeError, OverflowError) as error:
            raise ValueError(f"tensors has a key that cannot be sent to another process: {error}") from None
        join = lambda items: dict(zip(names, items, strict=True))  # noqa: E731
    elif type(tensors) in (list, tuple):
        kind, names, items, join = type(tensors).__name__, list(range(len(tensors))), list(tensors), type(tensors)
    else:
        raise TypeError(
            f"tensors: expected a tensor or array, or a list, tuple or dict of them, not {type(tensors).__name__}"
        )
    if not items:
        raise ValueError(f"tensors is an empty {kind}: there is nothing to share")
    return join, [_checked(item, f"tensors[{name!r}]") for name, item in zip(names, items, strict=True)]


def _checked(item: Any, where: str) -> Any:
    """Return a tensor or array, detached; ``TypeError`` if it is neither, or has no plain memory."""
    if isinstance(item, np.ndarray):
        if isinstance(item, np.ma.MaskedArray):
            raise TypeError(f"{where} is a masked array; share its data and its mask")
        array = np.asarray(item)
        try:
            _torch_dtype(array)
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
