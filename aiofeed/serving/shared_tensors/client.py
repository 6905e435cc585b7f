"""Attaching to shared tensors: request an offer and make tensors of it."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import torch

from aiofeed.ipc.address import TENSORS, connect
from aiofeed.ipc.batch_codec import TensorInBlock, decode_batch, leaf_of
from aiofeed.ipc.cuda_ipc import CudaHandles, HandleError
from aiofeed.ipc.framing import ProtocolError, close_all, request
from aiofeed.ipc.ring import Ring
from aiofeed.ipc.schema import ArrayNode, encode
from aiofeed.kernel.core.errors import FeedError
from aiofeed.kernel.runtime.tensors import as_tensor
from aiofeed.serving.shared_tensors.offers import VERSION, Attach, AttachRefused, Offer, decode_reply

log: logging.Logger = logging.getLogger("aiofeed.processes")

# For the sharing process to copy tensors from a device to host memory; a gigabyte takes less than a second.
_COPYING_S = 600.0
_ANSWER_S = 1.0


def attach(path: Path, handles: CudaHandles, wanted: torch.device | None, *, writable: bool, timeout_s: float) -> Any:
    """Return the tensors that are shared at a path.

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
        offer, ring = _request_offer(sock, path, host=host, private=not writable, limit_s=limit_s)
        return _decode(offer, ring, handles, wanted)

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


def _request_offer(sock: socket.socket, path: Path, *, host: bool, private: bool, limit_s: float) -> tuple[Offer, Ring]:
    """Return an offer, and its segments, mapped."""
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
        ring = Ring(private=private, sealed=False)
        try:
            ring.map_segments(reply.segments, descriptors)
        except OSError as error:
            raise FeedError(f"the memory shared at {path} cannot be mapped: {error.strerror}") from error
        return reply, ring
    finally:
        close_all(descriptors)


def _decode(offer: Offer, ring: Ring, handles: CudaHandles, wanted: torch.device | None) -> Any:
    """Return the tensors of an offer, in their container."""
    unopened, devices = iter(offer.handles), iter(offer.devices)

    def tensor(node: ArrayNode) -> torch.Tensor:
        device = next(devices, "")
        if node.kind == "device":
            if (handle := next(unopened, None)) is None:
                raise ProtocolError("a tensor in device memory without a handle")
            place = TensorInBlock(node, handle.nbytes)
            storage = handles.open(handle, wanted)
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
            return place.view(whole.set_(storage, 0, (handle.nbytes,), (1,)))
        memory = ring.view(node)
        if not memory.flags.aligned:
            raise ProtocolError(f"a tensor at {node.offset}, which is no multiple of the size of its items")
        found, target = as_tensor(leaf_of(memory, node)), wanted
        if target is None and device:
            target = handles.find(device)
            if target is None:
                log.warning("tensors that were shared on a device stay in host memory: this process has no such device")
        return found if target is None else found.to(target)

    try:
        return decode_batch(offer.tensors, tensor)
    except HandleError:
        # The handle that failed was taken back, and opened ones are with their tensors.
        for handle in unopened:
            handles.forget(handle)
        raise
