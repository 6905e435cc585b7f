"""The accelerators as torch sees them. Starts them: a process that has done so can no longer fork."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiofeed.devices.resolve import resolve_device
from aiofeed.diagnostics.report import AcceleratorReport

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aiofeed.devices.backend import DeviceBackend


NBYTES = 32 << 20
SECONDS = 0.1


def find_accelerators(*, measure: bool) -> tuple[AcceleratorReport, ...]:
    """Every accelerator that torch sees.

    Args:
        measure: whether to measure how fast each copies, which takes about 0.3 s and 64 MiB of it.
    """
    import torch

    if not torch.accelerator.is_available():
        return ()
    found = []
    for index in range(torch.accelerator.device_count()):
        backend = resolve_device(index)
        assert backend is not None
        report = describe_accelerator(backend)
        found.append(measure_copies(report, backend, NBYTES) if measure else report)
    return tuple(found)


def describe_accelerator(backend: DeviceBackend) -> AcceleratorReport:
    """Name and memory of one accelerator; what its part of torch does not say is ``None``."""
    import torch

    device = backend.device
    # torch.cuda, torch.xpu, ...: of the same make, each with some of it; torch.accelerator has some for all.
    module: Any = getattr(torch, device.type, None)
    common: Any = torch.accelerator
    free, total = _ask(module, "mem_get_info", device) or _ask(common, "get_memory_info", device) or (None, None)
    return AcceleratorReport(
        device=backend.name,
        name=_ask(module, "get_device_name", device) or device.type,
        total_bytes=total,
        free_bytes=free,
        allocated_bytes=_ask_either(module, common, "memory_allocated", device),
        reserved_bytes=_ask_either(module, common, "memory_reserved", device),
        own_stream=device.type != "mps",
    )


def measure_copies(report: AcceleratorReport, backend: DeviceBackend, nbytes: int) -> AcceleratorReport:
    """The report with how fast copies are, pinned and pageable.

    Args:
        report: of the same device.
        backend: the device.
        nbytes: of one copy.
    """
    import numpy as np

    pageable = _attempt(lambda: copy_rate(backend, np.ones(nbytes, np.uint8), SECONDS))
    pinned = pin_error = None
    try:
        memory = backend.pin(nbytes)
    except Exception as error:  # noqa: BLE001 - whatever the driver says is what the report is for
        pin_error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
    else:
        memory[:] = 1
        pinned = _attempt(lambda: copy_rate(backend, memory, SECONDS))
    return replace(report, pinned_bytes_per_s=pinned, pageable_bytes_per_s=pageable, pin_error=pin_error)


def _ask(module: Any, name: str, device: Any) -> Any:
    function = getattr(module, name, None)
    return None if function is None else _attempt(lambda: function(device))


def _ask_either(module: Any, common: Any, name: str, device: Any) -> Any:
    found = _ask(module, name, device)
    return _ask(common, name, device) if found is None else found


def _attempt(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception:  # noqa: BLE001 - a device that is full or busy is still reported, without this fact
        return None


def copy_rate(backend: DeviceBackend, memory: NDArray[np.uint8], seconds: float) -> float:
    """Bytes per second of copies from ``memory``, on the side stream, one after the other.

    Args:
        backend: the device.
        memory: host memory, pinned or not.
        seconds: how long to go on; two copies are made at least, the first of which does not count.
    """
    import torch

    source, side = torch.from_numpy(memory), backend.side_stream()
    with backend.use_stream(side):
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
