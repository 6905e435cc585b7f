"""Tensors in several processes: loaded once, shared at an address, attached to without a copy."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from aiofeed.ipc.address import TENSORS, check_free, resolve
from aiofeed.ipc.cuda_ipc import CudaHandles
from aiofeed.kernel.core.types import public_in
from aiofeed.kernel.devices.resolve import resolve_device
from aiofeed.serving.shared_tensors.client import attach
from aiofeed.serving.shared_tensors.store import TensorServer, TensorStore

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = torch.Tensor | NDArray[np.generic]

# The thread may be copying from a device.
_JOIN_S = 1.0


@public_in("aiofeed.processes")
class SharedTensors:
    """Tensors in shared memory, and the address at which other processes attach to them. Made by ``share``.

    Example:
        ```python
        import torch

        import aiofeed

        with aiofeed.processes.share(torch.rand(1000, 8), "rows") as shared:
            print(shared.address, shared.nbytes)
            x = aiofeed.processes.attach_tensors(shared.address)  # in another process
        ```

    A context manager. After it is closed or dropped, no process can attach; processes that have attached keep the
    tensors (CUDA tensors: as long as this process runs).

    Attributes:
        address: Path of the socket, for ``attach_tensors``.
        nbytes: Size of all tensors.
    """

    def __init__(self, tensors: Any, nbytes: int, server: TensorServer) -> None:
        self.address: str = str(server.path)
        self.nbytes = nbytes
        self._tensors = tensors
        self._closed = False
        self._server = server
        server.thread.watch(self)

    @property
    def tensors(self) -> Any:
        """The shared tensors, in the given container, for this process. Writes are visible to all processes.

        Raises:
            ValueError: They have been closed.
        """
        if self._closed:
            raise ValueError(f"the tensors shared at {self.address} have been closed")
        return self._tensors

    def close(self) -> None:
        """Free the address. The memory is freed with the last process that uses it. Idempotent."""
        self._closed = True
        self._tensors = None
        self._server.thread.stop()
        self._server.thread.join(_JOIN_S)

    def __enter__(self) -> SharedTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SharedTensors {self.address!r}, {self.nbytes} bytes{', closed' if self._closed else ''}>"


@public_in("aiofeed.processes")
def share(
    tensors: Array | Sequence[Array] | Mapping[str, Array] | Mapping[int, Array], address: str | os.PathLike[str]
) -> SharedTensors:
    """Share tensors with other processes of this user on this machine, which call ``attach_tensors``.

    Example:
        ```python
        import torch

        import aiofeed

        shared = aiofeed.processes.share({"x": torch.rand(1000, 8)}, "training-data")
        x = shared.tensors["x"]  # use this in place of the original
        ```

    Tensors in host memory are copied once, into shared memory without a name, unless they are in torch's shared memory
    already (``share_memory_``). Drop the originals and use ``.tensors`` of the result, which is the memory that the
    other processes see. They are detached and made contiguous. CUDA tensors are opened through CUDA IPC, not copied.

    The memory is freed when the last process that uses it has ended; no name of it can be left behind. With CUDA
    tensors this process must outlive the others.

    Args:
        tensors: A tensor or array, or a list, tuple or dict of them. Arrays become tensors.
        address: A name, or the path of the socket to listen at.

    Raises:
        TypeError, ValueError: One of the tensors cannot be shared, or the address is not valid.
        FeedError: The address is taken, or there is not enough memory; the message has the figures.
    """
    path = resolve(address, TENSORS)
    check_free(path, TENSORS)
    store = TensorStore(tensors, CudaHandles())
    try:
        structure, nbytes = store.structure(), store.nbytes
        return SharedTensors(structure, nbytes, TensorServer(path, store))
    except BaseException:
        store.close()
        raise


@public_in("aiofeed.processes")
def attach_tensors(
    address: str | os.PathLike[str], device: object = None, *, writable: bool = False, timeout_s: float = 10.0
) -> Any:
    """Return the tensors that another process shares, in the same container, without a copy if possible.

    Example:
        ```python
        import torch

        import aiofeed

        shared = aiofeed.processes.share(torch.rand(1000, 8), "table")  # in another process
        x = aiofeed.processes.attach_tensors("table")  # the same memory
        print(x.shape)
        ```

    Tensors in host memory are mapped. Writes are private to this process, page by page; with ``writable=True`` they
    are visible to all processes, without any synchronization.

    Args:
        address: The argument of ``share``, or the ``address`` of its result.
        device: ``None``: where they were shared. "cpu": in host memory. Any other device, or "auto": there; tensors
            that were shared on that device are opened (and are writable), others are copied.
        writable: Map host memory so that writes are visible to all processes.
        timeout_s: How long to wait for a process that shares tensors there.

    Raises:
        FeedError: No process of this user shares tensors there, or it cannot share them.
        TypeError, ValueError: An argument has the wrong type or is out of range.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise TypeError(f"timeout_s={timeout_s!r}: expected seconds, not {type(timeout_s).__name__}")
    if not 0 <= timeout_s < float("inf"):
        raise ValueError(f"timeout_s={timeout_s!r}: expected 0 or more seconds")
    path = resolve(address, TENSORS)
    backend = resolve_device(device)
    wanted = None if device is None else torch.device("cpu") if backend is None else backend.device
    return attach(path, CudaHandles(), wanted, writable=writable, timeout_s=timeout_s)
