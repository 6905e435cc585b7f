"""Describes and measures the accelerators that torch sees. Initializes them, so the process can no longer fork."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from aiofeed.devices.resolve import resolve_device
from aiofeed.reports.machine.report import AcceleratorReport

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aiofeed.devices.backend import DeviceBackend

COPY_BYTES = 32 << 20
MEASURE_S = 0.1


def find_accelerators(*, measure: bool) -> tuple[AcceleratorReport, ...]:
    """Every accelerator that torch sees. To ``measure`` copy rates takes about 0.3 s and 64 MiB of memory of each."""
    import torch

    if not torch.accelerator.is_available():
        return ()
    reports = []
    for index in range(torch.accelerator.device_count()):
        backend = resolve_device(index)
        assert backend is not None
        report = describe_accelerator(backend)
        reports.append(measure_copies(report, backend, COPY_BYTES) if measure else report)
    return tuple(reports)


def describe_accelerator(backend: DeviceBackend) -> AcceleratorReport:
    """Name and memory of one accelerator; ``None`` for values that torch does not report."""
    import torch

    device = backend.device
    # torch.cuda, torch.xpu, ... have some of these functions, and torch.accelerator has some for all devices.
    module: Any = getattr(torch, device.type, None)
    common: Any = torch.accelerator

    def ask(name: str) -> Any:
        functions = [function for each in (module, common) if (function := getattr(each, name, None)) is not None]
        values = (_attempt(partial(function, device)) for function in functions)
        return next((value for value in values if value is not None), None)

    free, total = ask("mem_get_info") or ask("get_memory_info") or (None, None)
    return AcceleratorReport(
        device=backend.name,
        name=ask("get_device_name") or device.type,
        total_bytes=total,
        free_bytes=free,
        allocated_bytes=ask("memory_allocated"),
        reserved_bytes=ask("memory_reserved"),
        own_stream=device.type != "mps",
    )


def measure_copies(report: AcceleratorReport, backend: DeviceBackend, nbytes: int) -> AcceleratorReport:
    """The report of a device with the rates of pinned and pageable copies of ``nbytes`` each."""
    import numpy as np

    from aiofeed.runtime.buffers import release_unused

    pageable = _attempt(lambda: copy_rate(backend, np.ones(nbytes, np.uint8), MEASURE_S))
    pinned = pin_error = None
    try:
        memory = backend.pin(nbytes)
    except Exception as error:  # noqa: BLE001 - the driver's error, of any type, belongs into the report
        pin_error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
    else:
        memory[:] = 1
        pinned = _attempt(lambda: copy_rate(backend, memory, MEASURE_S))
        del memory
        release_unused()
    return replace(report, pinned_bytes_per_s=pinned, pageable_bytes_per_s=pageable, pin_error=pin_error)


def _attempt(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception:  # noqa: BLE001 - a full or busy device is still reported, without this value
        return None


def copy_rate(backend: DeviceBackend, memory: NDArray[np.uint8], seconds: float) -> float:
    """Bytes per second of copies from host memory on the side stream, measured for a number of seconds.

    At least three copies are made; the first is not counted.
    """
    import torch

    source, side = torch.from_numpy(memory), backend.side_stream()
    with backend.use_stream(side):
        backend.copy(source)
        backend.record(side).synchronize()
        copies, started = 0, time.perf_counter()
        while True:
            # Two copies at a time: the second is queued before the first ends.
            for _ in range(2):
                backend.copy(source)
            backend.record(side).synchronize()
            copies += 2
            elapsed = time.perf_counter() - started
            if elapsed >= seconds:
                return copies * memory.nbytes / elapsed
