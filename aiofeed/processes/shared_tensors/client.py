"""Attaching to shared tensors: requests an offer and makes tensors of it."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

import torch

from aiofeed.core.errors import FeedError
from aiofeed.processes.ipc.address import TENSORS, connect
from aiofeed.processes.ipc.cuda_ipc import DeviceHandles, HandleError
from aiofeed.processes.ipc.framing import ProtocolError, close_all, request
from aiofeed.processes.ipc.schema import encode
from aiofeed.processes.shared_tensors.protocol import (
    VERSION,
    Attach,
    AttachRefused,
    InSegment,
    Offer,
    OnDevice,
    decode_reply,
)
from aiofeed.processes.shared_tensors.store import join_parts, map_memory, tensor_in
from aiofeed.runtime.buffers import Bytes

log = logging.getLogger("aiofeed.processes")

# For the sharing process to copy tensors from a device to host memory; a gigabyte takes less than a second.
_COPYING_S = 600.0
_ANSWER_S = 1.0
_MAX_DIMENSIONS = 64


class Attacher:
    """One attachment to shared tensors.

    Args:
        path: Path of the socket.
        handles: Opens device memory.
        wanted: Where the tensors are to be; ``None``: where they were shared.
        writable: Whether writes to host memory are visible to all processes.
        timeout_s: How long to wait for a process that shares tensors there.
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
            FeedError: No process shares tensors there, or it cannot hand them out.
        """
        host_only = self._wanted is not None and self._wanted.type == "cpu"
        try:
            with connect(self._path, TENSORS, self._timeout_s) as sock:
                offer = self._request_offer(sock, host=host_only)
                try:
                    return self._tensors(*offer)
                except HandleError as error:
                    log.warning(
                        "device memory shared at %s cannot be opened here (%s): this process gets a copy of its own",
                        self._path,
                        str(error),  # the error itself would keep the memory, through its traceback
                    )
                return self._tensors(*self._request_offer(sock, host=True))
        except ProtocolError as error:
            raise FeedError(f"the process at {self._path} sent an invalid offer of tensors: {error}") from error
        except HandleError as error:
            raise FeedError(f"the process at {self._path} offers device memory instead of host memory") from error

    def _request_offer(self, sock: socket.socket, *, host: bool) -> tuple[Offer, list[Bytes]]:
        """An offer, and its segments, mapped."""
        limit_s = _COPYING_S if host else max(self._timeout_s, _ANSWER_S)
        descriptors: list[int] = []
        try:
            try:
                payload, descriptors = request(sock, encode(Attach(VERSION, host)), timeout_s=limit_s)
            except TimeoutError:
                raise FeedError(
                    f"the process that shares tensors at {self._path} did not answer within {limit_s:g} s"
                ) from None
            except ConnectionError:
                raise FeedError(f"the process that shares tensors at {self._path} ended before it answered") from None
            reply = decode_reply(payload)
            if isinstance(reply, AttachRefused):
                raise FeedError(f"the process that shares tensors at {self._path} refused: {reply.reason}")
            if len(descriptors) != len(reply.segments):
                raise ProtocolError(f"{len(reply.segments)} segments with {len(descriptors)} descriptors")
            pairs = zip(descriptors, reply.segments, strict=True)
            return reply, [self._map(descriptor, nbytes) for descriptor, nbytes in pairs]
        finally:
            close_all(descriptors)

    def _map(self, descriptor: int, nbytes: int) -> Bytes:
        size = os.fstat(descriptor).st_size
        if not 0 < nbytes <= size:
            raise ProtocolError(f"a segment has {size} bytes and was announced with {nbytes}")
        try:
            return map_memory(descriptor, nbytes, private=not self._writable)
        except OSError as error:
            raise FeedError(f"the {nbytes} bytes shared at {self._path} cannot be mapped: {error.strerror}") from error

    def _tensors(self, offer: Offer, segments: list[Bytes]) -> Any:
        if len(offer.keys) != (len(offer.places) if offer.kind == "dict" else 0):
            raise ProtocolError(f"{len(offer.keys)} keys for a {offer.kind} of {len(offer.places)}")
        if not offer.places or (offer.kind == "tensor" and len(offer.places) != 1):
            raise ProtocolError(f"a {offer.kind} of {len(offer.places)}")
        tensors: list[torch.Tensor] = []
        try:
            for place in offer.places:
                tensors.append(self._tensor(place, segments))  # noqa: PERF401 - their number is used below
        except HandleError:
            # The handle that failed was taken back, and opened ones are with their tensors; take back the others.
            for place in offer.places[len(tensors) + 1 :]:
                if isinstance(place, OnDevice):
                    self._handles.forget(place.handle)
            raise
        return join_parts(offer.kind, offer.keys, tensors)

    def _tensor(self, place: InSegment | OnDevice, segments: list[Bytes]) -> torch.Tensor:
        dtype, nbytes = _dtype(place.dtype), _dtype(place.dtype).itemsize
        if len(place.shape) > _MAX_DIMENSIONS or any(not 0 <= size < 1 << 48 for size in place.shape):
            raise ProtocolError(f"a tensor of shape {place.shape}")
        for size in place.shape:
            nbytes *= size
        if isinstance(place, OnDevice):
            return self._on_device(place, dtype, nbytes)
        tensor = _in_segment(place, dtype, nbytes, segments)
        target = self._wanted
        if target is None and place.device:
            target = self._handles.find(place.device)
            if target is None:
                log.warning("tensors that were shared on a device stay in host memory: this process has no such device")
        return tensor if target is None else tensor.to(target)

    def _on_device(self, place: OnDevice, dtype: torch.dtype, nbytes: int) -> torch.Tensor:
        if place.start < 0 or (nbytes and place.start * dtype.itemsize + nbytes > place.handle.nbytes):
            raise ProtocolError(f"{nbytes} bytes at element {place.start} of a storage of {place.handle.nbytes}")
        storage = self._handles.open(place.handle, self._wanted)
        empty = torch.empty(0, dtype=dtype, device=storage.device)
        if nbytes == 0:
            return empty.reshape(place.shape)
        strides = torch.empty(place.shape, device="meta").stride()
        return empty.set_(storage, place.start, place.shape, strides)


def _in_segment(place: InSegment, dtype: torch.dtype, nbytes: int, segments: list[Bytes]) -> torch.Tensor:
    try:
        if nbytes == 0:
            return torch.empty(place.shape, dtype=dtype, device="cpu")
        if not 0 <= place.segment < len(segments) or place.offset < 0 or place.offset % dtype.itemsize:
            raise ProtocolError(f"a tensor at {place.offset} of segment {place.segment}")
        memory = segments[place.segment]
        if place.offset + nbytes > memory.nbytes:
            raise ProtocolError(f"{nbytes} bytes at {place.offset} of a segment of {memory.nbytes}")
        return tensor_in(memory, place.offset, place.shape, dtype)
    except RuntimeError as error:  # torch multiplies the other dimensions of a tensor of 0 bytes, too
        raise ProtocolError(f"a tensor of shape {place.shape}: {error}") from None


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize == 0:
        raise ProtocolError(f"{name!r} is no dtype of this torch ({torch.__version__})")
    return dtype
