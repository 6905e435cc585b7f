"""Tensors that several processes use: loaded once, shared at an address, attached to without a copy."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from aiofeed.core.errors import FeedError
from aiofeed.core.types import public
from aiofeed.processes.ipc.cuda_ipc import CudaHandles, DeviceHandles

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from aiofeed.processes.shared_tensors.server import TensorServer

    Array: TypeAlias = torch.Tensor | NDArray[np.generic]


@public
class SharedTensors:
    """Tensors in shared memory, and the address at which other processes attach to them. Made by ``share``.

    A context manager. Once it is closed, or dropped, nobody can attach any more; whoever has attached keeps the
    tensors (of CUDA tensors: for as long as this process runs).

    Attributes:
        address: what ``attach_tensors`` takes: the path of a socket.
        nbytes: of all the tensors.
    """

    def __init__(self, tensors: Any, nbytes: int, server: TensorServer) -> None:
        self.address = str(server.path)
        self.nbytes = nbytes
        self._tensors = tensors
        self._closed = False
        self._server = server
        # The interpreter's exit is the server's own matter: it must be waited for, which a finalizer must not.
        weakref.finalize(self, server.stop).atexit = False

    @property
    def tensors(self) -> Any:
        """The shared tensors, in the structure that was given: for this process's own use. Writes are seen by all.

        Raises:
            ValueError: it is closed.
        """
        if self._closed:
            raise ValueError(f"the tensors shared at {self.address} have been closed")
        return self._tensors

    def close(self) -> None:
        """End it: the address is free again, and the memory with the last process that uses it. Idempotent."""
        self._closed = True
        self._tensors = None
        self._server.stop()
        self._server.join()

    def __enter__(self) -> SharedTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SharedTensors {self.address!r}, {self.nbytes} bytes{', closed' if self._closed else ''}>"


@public
def share(
    tensors: Array | Sequence[Array] | Mapping[str, Array] | Mapping[int, Array], address: str | os.PathLike[str]
) -> SharedTensors:
    """Share tensors with other processes of this user on this machine, which ``attach_tensors`` to them.

    Tensors in host memory are copied once, into shared memory without a name, unless they lie in torch's shared memory
    already (``share_memory_``). Drop the originals, and use ``.tensors`` of what is returned: that is what the others
    see. They are detached and made contiguous. CUDA tensors stay where they are, and are opened through CUDA IPC.

    The memory is there until the last process that uses it has ended, this one or another; nothing of it has a name
    that could stay behind. Of CUDA tensors this process must outlive the others.

    Args:
        tensors: a tensor or array, or a list, tuple or dict of them. Arrays become tensors.
        address: a name, or the path of the socket to listen at.

    Raises:
        TypeError, ValueError: something among the tensors cannot be shared, or the address is none.
        FeedError: the address is taken, or there is too little memory; the message has the figures.
    """
    return share_through(CudaHandles(), tensors, address)


@public
def attach_tensors(
    address: str | os.PathLike[str], device: object = None, *, writable: bool = False, timeout_s: float = 10.0
) -> Any:
    """The tensors that another process shares, in the same structure, and without a copy where that can be.

    Those in host memory are mapped. What this process writes to them is its own, page by page, and seen by nobody
    else; with ``writable=True`` it is seen by all, and nothing is in the way of two that write at the same time.

    Args:
        address: what ``share`` was given, or the ``address`` of what it returned.
        device: ``None``: where they were shared. "cpu": in host memory. Any other device, or "auto": there; those
            that were shared on that device are opened (and are writable), others are this process's own copies.
        writable: map host memory so that writes are seen by all.
        timeout_s: how long to wait for a process that shares tensors there.

    Raises:
        FeedError: nobody shares tensors there, another user does, or they cannot be handed over.
        TypeError, ValueError: an argument is none of these.
    """
    return attach_through(CudaHandles(), address, device, writable=writable, timeout_s=timeout_s)


def share_through(handles: DeviceHandles, tensors: Any, address: str | os.PathLike[str]) -> SharedTensors:
    """``share``, with device memory of any make."""
    _check_platform()
    from aiofeed.processes.ipc.address import TENSORS, check_free, resolve
    from aiofeed.processes.shared_tensors.server import TensorServer
    from aiofeed.processes.shared_tensors.store import TensorStore

    path = resolve(address, TENSORS)
    check_free(path, TENSORS)
    store = TensorStore(tensors, handles)
    try:
        structure, nbytes = store.structure(), store.nbytes
        return SharedTensors(structure, nbytes, TensorServer(path, store))
    except BaseException:
        store.close()
        raise


def attach_through(
    handles: DeviceHandles, address: str | os.PathLike[str], device: object, *, writable: bool, timeout_s: float
) -> Any:
    """``attach_tensors``, with device memory of any make."""
    _check_platform()
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise TypeError(f"timeout_s={timeout_s!r}: expected seconds, not {type(timeout_s).__name__}")
    if not 0 <= timeout_s < float("inf"):
        raise ValueError(f"timeout_s={timeout_s!r}: expected 0 or more seconds")
    from aiofeed.processes.ipc.address import TENSORS, resolve

    path = resolve(address, TENSORS)
    import torch

    from aiofeed.devices.resolve import resolve_device
    from aiofeed.processes.shared_tensors.client import Attacher

    backend = resolve_device(device)
    wanted = None if device is None else torch.device("cpu") if backend is None else backend.device
    return Attacher(path, handles, wanted, writable=writable, timeout_s=timeout_s).attach()


def _check_platform() -> None:
    if sys.platform == "win32":
        raise FeedError("tensors are shared through Unix sockets that pass descriptors, which Windows has not")
