"""CUDA calls that torch does not wrap: streams, page-locking of existing memory, and use of CUDA beside graph captures.

Does not import torch at import time. Only for devices of type "cuda".
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

# CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: graph captures in other threads do not restrict this thread.
THREAD_LOCAL = 1
# Whether pinned memory is memory of aiofeed's own that is registered with CUDA. torch's allocator rounds sizes up to a
# power of two (a batch of 256 images of 224 x 224 x 3 takes 64 MiB instead of 36.75) and never returns memory to the
# system. The speed of copies from both has not been compared: run `python -m benchmarks.gpu copies` with both values.
REGISTERS_PINNED_MEMORY = True
# CU_STREAM_NON_BLOCKING: work on the legacy default stream does not wait for the stream, nor the stream for it.
_NON_BLOCKING = 1


@cache
def _driver_function(name: str) -> Callable[..., int] | None:
    """Return a function of CUDA's driver that torch does not expose; ``None`` without one, as with ROCm."""
    import ctypes

    import torch

    if torch.version.hip is not None:
        return None
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        function: Callable[..., int] = getattr(driver, name)
    except (OSError, AttributeError):
        return None
    return function


def set_capture_mode(mode: int) -> int | None:
    """Set the calling thread's capture mode; return the previous one, or ``None`` if it cannot be set.

    While any thread captures a graph in mode "global", torch's default, a thread in the default mode must not allocate
    or query events: both its call and the capture fail.
    """
    exchange = _driver_function("cuThreadExchangeStreamCaptureMode")
    if exchange is None:
        return None
    import ctypes

    import torch

    # The driver needs a context in the calling thread. Any call of the CUDA runtime creates it; this one is allowed
    # during captures.
    torch.cuda.is_current_stream_capturing()
    value = ctypes.c_int(mode)
    return value.value if exchange(ctypes.byref(value)) == 0 else None


@contextmanager
def allocating(device: torch.device) -> Iterator[None]:
    """Allow the calling thread to allocate memory of, or for, a device, also while other threads capture graphs.

    Does nothing for devices other than CUDA's.
    """
    import torch

    if device.type != "cuda":
        yield
        return
    # The calling thread's current device may not be initialised; do not initialise it for this.
    module: Any = torch.cuda  # in part without types
    with module.device(device):
        before = set_capture_mode(THREAD_LOCAL)
        try:
            yield
        finally:
            if before is not None:
                set_capture_mode(before)


def new_stream(device: torch.device) -> Any:
    """Return a new stream that no other code uses; it is never destroyed.

    torch has 32 streams per device and returns them in rotation: one of them can be the user's own, and be captured
    in the user's CUDA graph. ROCm has no driver function for streams; there it is one of torch's.

    Raises:
        RuntimeError: The driver refuses the stream.
    """
    import ctypes

    import torch

    module: Any = torch.cuda  # in part without types
    create = _driver_function("cuStreamCreateWithPriority")
    if create is None:
        return module.Stream(device)
    handle = ctypes.c_void_p()
    # `allocating` makes the device's context current, in which the driver creates the stream.
    with allocating(device):
        status = create(ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(0))
    if status != 0:
        raise RuntimeError(
            f"CUDA's driver cannot create a stream on {device}: cuStreamCreateWithPriority returned {status}"
        )
    return module.ExternalStream(handle.value, device=device)


def register(device: torch.device, memory: NDArray[np.uint8]) -> None:
    """Page-lock existing memory. torch does not track copies from it: wait for an event before reusing it."""
    import torch

    runtime: Any = torch.cuda  # in part without types
    with allocating(device):
        _check(device, runtime.cudart().cudaHostRegister(memory.__array_interface__["data"][0], memory.nbytes, 0))


def unregister(device: torch.device, memory: NDArray[np.uint8]) -> None:
    """Undo ``register``, after every copy from the memory has completed."""
    import torch

    runtime: Any = torch.cuda
    with allocating(device):
        _check(device, runtime.cudart().cudaHostUnregister(memory.__array_interface__["data"][0]))


def _check(device: torch.device, status: Any) -> None:
    """Raise the error of a call of CUDA's runtime, and clear it as the thread's last error.

    Otherwise CUDA would raise it at the next kernel of this thread, which may be the user's.
    """
    import torch

    module: Any = torch.cuda
    if status != module.cudart().cudaError.success:
        with suppress(RuntimeError):
            torch.ones(1, device=device)
        module.check_error(status)
