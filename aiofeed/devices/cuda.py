"""CUDA's own, which torch does not see to: memory that is page-locked late, and threads that go on beside captures.

Imports without torch. All of it is for devices of type "cuda" alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

# CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: captures that other threads have under way are no concern of this one's.
THREAD_LOCAL = 1


@cache
def _exchange_mode() -> Callable[[Any], int] | None:
    """The driver's ``cuThreadExchangeStreamCaptureMode``, which torch does not pass on; ``None``: no such driver."""
    import ctypes

    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        exchange: Callable[[Any], int] = driver.cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # ROCm's, or none
        return None
    return exchange


def set_capture_mode(mode: int) -> int | None:
    """Set the calling thread's capture mode; the one before, or ``None`` where it cannot be set.

    By default a thread may neither allocate nor ask after events while any thread captures a graph in the mode
    "global", which is torch's default: both its call and the capture fail.
    """
    exchange = _exchange_mode()
    if exchange is None:
        return None
    import ctypes

    import torch

    # The driver wants a context in the calling thread. Any call of the runtime's puts it there, and this one is allowed
    # beside captures.
    torch.cuda.is_current_stream_capturing()
    value = ctypes.c_int(mode)
    return value.value if exchange(ctypes.byref(value)) == 0 else None


@contextmanager
def allocating(device: torch.device) -> Iterator[None]:
    """Let the calling thread, whichever it is, allocate page-locked memory: on that device, and beside captures."""
    import torch

    # The thread's own device may be one that nobody has started, and should not be for this.
    module: Any = torch.cuda  # in part without types
    with module.device(device):
        before = set_capture_mode(THREAD_LOCAL)
        try:
            yield
        finally:
            if before is not None:
                set_capture_mode(before)


def register(device: torch.device, memory: NDArray[np.uint8]) -> None:
    """Page-lock memory that is there already. torch does not track its copies: whoever reuses it waits for an event."""
    import torch

    module: Any = torch.cuda
    with allocating(device):
        cudart = module.cudart()
        status = cudart.cudaHostRegister(memory.__array_interface__["data"][0], memory.nbytes, 0)
        if status != cudart.cudaError.success:
            _forget_error(device)
        module.check_error(status)


def unregister(device: torch.device, memory: NDArray[np.uint8]) -> None:
    """Undo ``register``."""
    import torch

    module: Any = torch.cuda
    with allocating(device):
        module.check_error(module.cudart().cudaHostUnregister(memory.__array_interface__["data"][0]))


def _forget_error(device: torch.device) -> None:
    """Take the calling thread's last error out of CUDA, which would else raise it at the user's next kernel."""
    import torch

    try:
        torch.ones(1, device=device)
    except RuntimeError:
        pass
