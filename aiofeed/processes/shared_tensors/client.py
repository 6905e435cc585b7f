"""Attaching to shared tensors: request an offer and make tensors of it."""

from __future__ import annotations

import logging
import math
import os
import socket
from pathlib import Path
from typing import Any

import torch

from aiofeed.core.errors import FeedError
from aiofeed.processes.ipc.address import TENSORS, connect
from aiofeed.processes.ipc.cuda_ipc import CudaHandles, HandleError
from aiofeed.processes.ipc.framing import ProtocolError, close_all, request
from aiofeed.processes.ipc.schema import encode
from aiofeed.processes.shared_tensors.offers import (
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

log: logging.Logger = logging.getLogger("aiofeed.processes")

# For the sharing process to copy tensors from a device to host memory; a gigabyte takes less than a second.
_COPYING_S = 600.0
_ANSWER_S = 1.0
_MAX_DIMENSIONS = 64


def attach(path: Path, handles: CudaHandles, wanted: torch.device | None, *, writable: bool, timeout_s: float) -> Any:
    """The tensors that are shared at a path.

    Args:
        path: Path of the socket.
        handles: Opens device memory.
        wanted: Where the tensors are to be; ``None``: where they were shared.
        writable: Whether writes to host memory are visible to all processes.
        timeout_s: How long to wait for a process that shares tensors there.

    Raises:
        FeedError: No process shares tensors there, or it cannot share them.
    """

    def tensors(*, host: bool) -> Any:
        limit_s = _COPYING_S if host else max(timeout_s, _ANSWER_S)
        offer, segments = _request_offer(sock, path, host=host, private=not writable, limit_s=limit_s)
        return _join(offer, segments, handles, wanted)

    try:
        with connect(path, TENSORS, timeout_s) as sock:
            if wanted is None or wanted.type != "cpu":
                try:
                    return tensors(host=False)
                except HandleError as error:
                    log.warning(
                        "device memory shared at %s cannot be opened here (%s): this process gets a copy of its own",
                        path,
                        str(error),  # the error itself would keep the memory, through its traceback
                    )
            return tensors(host=True)
    except ProtocolError as error:
        raise FeedError(f"the process at {path} sent an invalid offer of tensors: {error}") from error
    except HandleError as error:
        raise FeedError(f"the process at {path} offers device memory instead of host memory") from error


def _request_offer(
    sock: socket.socket, path: Path, *, host: bool, private: bool, limit_s: float
) -> tuple[Offer, list[Bytes]]:
    """An offer, and its segments, mapped."""
    descriptors: list[int] = []
    try:
        try:
            payload, descriptors = request(sock, encode(Attach(VERSION, host)), timeout_s=limit_s)
        except TimeoutError:
            raise FeedError(f"the process that shares tensors at {path} did not answer within {limit_s:g} s") from None
        except ConnectionError:
            raise FeedError(f"the process that shares tensors at {path} ended before it answered") from None
        reply = decode_reply(payload)
        if isinstance(reply, AttachRefused):
            raise FeedError(f"the process that shares tensors at {path} refused: {reply.reason}")
        if len(descriptors) != len(reply.segments):
            raise ProtocolError(f"{len(reply.segments)} segments with {len(descriptors)} descriptors")
        segments = []
        for descriptor, nbytes in zip(descriptors, reply.segments, strict=True):
            size = os.fstat(descriptor).st_size
            if not 0 < nbytes <= size:
                raise ProtocolError(f"a segment has {size} bytes and was announced with {nbytes}")
            try:
                segments.append(map_memory(descriptor, nbytes, private=private))
            except OSError as error:
                raise FeedError(f"the {nbytes} bytes shared at {path} cannot be mapped: {error.strerror}") from error
        return reply, segments
    finally:
        close_all(descriptors)


def _join(offer: Offer, segments: list[Bytes], handles: CudaHandles, wanted: torch.device | None) -> Any:
    """The tensors of an offer, in their container."""
    if len(offer.keys) != (len(offer.places) if offer.kind == "dict" else 0):
        raise ProtocolError(f"{len(offer.keys)} keys for a {offer.kind} of {len(offer.places)}")
    if not offer.places or (offer.kind == "tensor" and len(offer.places) != 1):
        raise ProtocolError(f"a {offer.kind} of {len(offer.places)}")
    tensors: list[torch.Tensor] = []
    try:
        for place in offer.places:
            tensors.append(_tensor(place, segments, handles, wanted))  # noqa: PERF401 - their number is used below
    except HandleError:
        # The handle that failed was taken back, and opened ones are with their tensors; take back the others.
        for place in offer.places[len(tensors) + 1 :]:
            if isinstance(place, OnDevice):
                handles.forget(place.handle)
        raise
    return join_parts(offer.kind, offer.keys, tensors)


def _tensor(
    place: InSegment | OnDevice, segments: list[Bytes], handles: CudaHandles, wanted: torch.device | None
) -> torch.Tensor:
    dtype = _dtype(place.dtype)
    if len(place.shape) > _MAX_DIMENSIONS or any(not 0 <= size < 1 << 48 for size in place.shape):
        raise ProtocolError(f"a tensor of shape {place.shape}")
    nbytes = math.prod(place.shape) * dtype.itemsize
    if isinstance(place, OnDevice):
        if place.start < 0 or (nbytes and place.start * dtype.itemsize + nbytes > place.handle.nbytes):
            raise ProtocolError(f"{nbytes} bytes at element {place.start} of a storage of {place.handle.nbytes}")
        storage = handles.open(place.handle, wanted)
        empty = torch.empty(0, dtype=dtype, device=storage.device)
        if nbytes == 0:
            return empty.reshape(place.shape)
        return empty.set_(storage, place.start, place.shape, torch.empty(place.shape, device="meta").stride())
    tensor = _in_segment(place, dtype, nbytes, segments)
    if wanted is None and place.device:
        wanted = handles.find(place.device)
        if wanted is None:
            log.warning("tensors that were shared on a device stay in host memory: this process has no such device")
    return tensor if wanted is None else tensor.to(wanted)


def _in_segment(place: InSegment, dtype: torch.dtype, nbytes: int, segments: list[Bytes]) -> torch.Tensor:
    if nbytes == 0:
        try:
            return torch.empty(place.shape, dtype=dtype, device="cpu")
        except RuntimeError as error:  # torch multiplies the other dimensions, too
            raise ProtocolError(f"a tensor of shape {place.shape}: {error}") from None
    if not 0 <= place.segment < len(segments) or place.offset < 0 or place.offset % dtype.itemsize:
        raise ProtocolError(f"a tensor at {place.offset} of segment {place.segment}")
    memory = segments[place.segment]
    if place.offset + nbytes > memory.nbytes:
        raise ProtocolError(f"{nbytes} bytes at {place.offset} of a segment of {memory.nbytes}")
    return tensor_in(memory, place.offset, place.shape, dtype)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize == 0:
        raise ProtocolError(f"{name!r} is no dtype of this torch ({torch.__version__})")
    return dtype
