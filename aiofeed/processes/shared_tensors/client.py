"""Attaching: asks for an offer of tensors, and makes tensors of it."""

from __future__ import annotations

import array
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch

from aiofeed.core.errors import FeedError
from aiofeed.processes.ipc.address import TENSORS, connect
from aiofeed.processes.ipc.cuda_ipc import DeviceHandles, HandleError
from aiofeed.processes.ipc.framing import MAX_DESCRIPTORS, Framer, ProtocolError, frame
from aiofeed.processes.shared_tensors.protocol import (
    VERSION,
    Attach,
    AttachRefused,
    InSegment,
    Offer,
    OnDevice,
    decode_reply,
    encode,
)
from aiofeed.processes.shared_tensors.store import assemble, mapped, tensor_in
from aiofeed.runtime.buffers import Bytes

log = logging.getLogger("aiofeed.processes")

_READ_BYTES = 256 * 1024
_INT = array.array("i").itemsize
# For whoever shares the tensors to copy them from a device to host memory: a gigabyte takes it less than a second.
_COPYING_S = 600.0
_ANSWER_S = 1.0


class Attacher:
    """One attachment.

    Args:
        path: of the socket.
        handles: of device memory.
        wanted: where the tensors are to be; ``None``: where they were shared.
        writable: whether what is written to host memory is seen by all.
        timeout_s: how long to wait for somebody to share tensors there.
    """

    def __init__(
        self, path: Path, handles: DeviceHandles, wanted: torch.device | None, *, writable: bool, timeout_s: float
    ) -> None:
        self._path = path
        self._handles = handles
        self._wanted = wanted
        self._writable = writable
        self._timeout_s = timeout_s

    def attach(self) -> Any:
        """The tensors.

        Raises:
            FeedError: they cannot be had.
        """
        host_only = self._wanted is not None and self._wanted.type == "cpu"
        try:
            with connect(self._path, TENSORS, self._timeout_s) as sock:
                found = self._ask(sock, host=host_only, limit_s=_COPYING_S if host_only else None)
                try:
                    return self._structure(*found)
                except HandleError as error:
                    log.warning(
                        "device memory shared at %s cannot be opened here (%s): this process gets a copy of its own",
                        self._path,
                        str(error),  # the error itself would keep the memory, through its traceback
                    )
                return self._structure(*self._ask(sock, host=True, limit_s=_COPYING_S))
        except ProtocolError as error:
            raise FeedError(f"what is at {self._path} does not share tensors as it should: {error}") from error
        except HandleError as error:
            raise FeedError(f"what is at {self._path} offers device memory where host memory was asked for") from error

    def _ask(self, sock: socket.socket, *, host: bool, limit_s: float | None) -> tuple[Offer, list[Bytes]]:
        limit_s = max(self._timeout_s, _ANSWER_S) if limit_s is None else limit_s
        descriptors: list[int] = []
        try:
            try:
                sock.settimeout(limit_s)
                sock.sendall(frame(encode(Attach(VERSION, host))))
                reply = decode_reply(_receive(sock, descriptors, time.monotonic() + limit_s))
            except TimeoutError:
                raise FeedError(
                    f"the process that shares tensors at {self._path} has not answered for {limit_s:g} s"
                ) from None
            except (ConnectionError, EOFError):
                raise FeedError(f"the process that shares tensors at {self._path} ended before it answered") from None
            if isinstance(reply, AttachRefused):
                raise FeedError(f"the process that shares tensors at {self._path} cannot hand them out: {reply.reason}")
            if len(descriptors) != len(reply.segments):
                raise ProtocolError(f"{len(reply.segments)} segments with {len(descriptors)} descriptors")
            pairs = zip(descriptors, reply.segments, strict=True)
            return reply, [self._map(descriptor, nbytes) for descriptor, nbytes in pairs]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _map(self, descriptor: int, nbytes: int) -> Bytes:
        size = os.fstat(descriptor).st_size
        if not 0 < nbytes <= size:
            raise ProtocolError(f"a segment of {size} bytes where {nbytes} were announced")
        try:
            return mapped(descriptor, nbytes, private=not self._writable)
        except OSError as error:
            raise FeedError(f"the {nbytes} bytes shared at {self._path} cannot be mapped: {error.strerror}") from error

    # --- what was offered ---

    def _structure(self, offer: Offer, segments: list[Bytes]) -> Any:
        if len(offer.keys) != (len(offer.places) if offer.kind == "dict" else 0):
            raise ProtocolError(f"{len(offer.keys)} keys for a {offer.kind} of {len(offer.places)}")
        if not offer.places or (offer.kind == "tensor" and len(offer.places) != 1):
            raise ProtocolError(f"a {offer.kind} of {len(offer.places)}")
        tensors: list[torch.Tensor] = []
        try:
            for place in offer.places:
                tensors.append(self._tensor(place, segments))  # noqa: PERF401 - how many there are counts below
        except HandleError:
            # That one is forgotten already, as is what is open with its tensor; the rest will not be opened.
            for place in offer.places[len(tensors) + 1 :]:
                if isinstance(place, OnDevice):
                    self._handles.forget(place.handle)
            raise
        return assemble(offer.kind, offer.keys, tensors)

    def _tensor(self, place: InSegment | OnDevice, segments: list[Bytes]) -> torch.Tensor:
        dtype, nbytes = _dtype(place.dtype), _dtype(place.dtype).itemsize
        if len(place.shape) > 64 or any(not 0 <= size < 1 << 48 for size in place.shape):
            raise ProtocolError(f"a tensor of shape {place.shape}")
        for size in place.shape:
            nbytes *= size
        if isinstance(place, OnDevice):
            return self._opened(place, dtype, nbytes)
        tensor = self._in_segment(place, dtype, nbytes, segments)
        target = self._wanted
        if target is None and place.device:
            target = self._handles.find(place.device)
            if target is None:
                log.warning("tensors that were shared on a device stay in host memory: there is no such device here")
        return tensor if target is None else tensor.to(target)

    def _in_segment(self, place: InSegment, dtype: torch.dtype, nbytes: int, segments: list[Bytes]) -> torch.Tensor:
        try:
            if nbytes == 0:
                return torch.empty(place.shape, dtype=dtype, device="cpu")
            if not 0 <= place.segment < len(segments) or place.offset < 0 or place.offset % dtype.itemsize:
                raise ProtocolError(f"a tensor at {place.offset} of segment {place.segment}")
            memory = segments[place.segment]
            if place.offset + nbytes > memory.nbytes:
                raise ProtocolError(f"{nbytes} bytes at {place.offset} of a segment of {memory.nbytes}")
            return tensor_in(memory, place.offset, place.shape, dtype)
        except RuntimeError as error:  # though it has no bytes, its other dimensions may be too many
            raise ProtocolError(f"a tensor of shape {place.shape}: {error}") from None

    def _opened(self, place: OnDevice, dtype: torch.dtype, nbytes: int) -> torch.Tensor:
        if place.start < 0 or (nbytes and place.start * dtype.itemsize + nbytes > place.handle.nbytes):
            raise ProtocolError(f"{nbytes} bytes at element {place.start} of a storage of {place.handle.nbytes}")
        storage = self._handles.open(place.handle, self._wanted)
        empty = torch.empty(0, dtype=dtype, device=storage.device)
        if nbytes == 0:
            return empty.reshape(place.shape)
        strides = torch.empty(place.shape, device="meta").stride()
        return empty.set_(storage, place.start, place.shape, strides)


def _receive(sock: socket.socket, descriptors: list[int], deadline: float) -> bytes:
    """One message; its descriptors are put into the list, also before an error."""
    framer = Framer()
    while True:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        data, ancillary, flags, _ = sock.recvmsg(
            _READ_BYTES, socket.CMSG_SPACE(MAX_DESCRIPTORS * _INT), getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        )
        for level, kind, found in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.extend(array.array("i", found[: len(found) - len(found) % _INT]))
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError("more descriptors than there may be, or than `ulimit -n` lets this process open")
        if not data:
            raise EOFError
        for payload, count in framer.feed(data):
            if count != len(descriptors):
                raise ProtocolError(f"a message with {len(descriptors)} of its {count} descriptors")
            return payload


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize == 0:
        raise ProtocolError(f"{name!r} is no dtype of this torch ({torch.__version__})")
    return dtype
