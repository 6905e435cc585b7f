"""How fast a device copies from host memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aiofeed.devices.backend import DeviceBackend

NBYTES = 32 << 20
"""Of one copy: large enough for the bus to be at its best."""
SECONDS = 0.1
"""How long copies of one kind go on."""


def copy_rate(backend: DeviceBackend, memory: NDArray[np.uint8], seconds: float) -> float:
    """Bytes per second of copies from ``memory``, on the side stream, one after the other.

    Args:
        backend: the device.
        memory: host memory, pinned or not.
        seconds: how long to go on; two copies are made at least, the first of which does not count.
    """
    import torch

    source, side = torch.from_numpy(memory), backend.side_stream()
    with backend.on(side):
        backend.copy(source)
        backend.record(side).synchronize()
        copies, started = 0, time.perf_counter()
        while True:
            # Two at a time: the second is queued when the first ends.
            for _ in range(2):
                backend.copy(source)
            backend.record(side).synchronize()
            copies += 2
            took = time.perf_counter() - started
            if took >= seconds:
                return copies * memory.nbytes / took
