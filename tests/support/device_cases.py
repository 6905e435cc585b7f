"""The devices that tests run on: simulated ones always, PyTorch's simulated accelerator and CUDA where they exist."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from aiofeed.kernel.devices import backend as backend_module
from aiofeed.kernel.devices.pinned import release_unused
from aiofeed.kernel.devices.resolve import resolve_device
from tests.support.simulated_device import SimulatedDevice

LATENCIES = ("random", "late", "early")


def _openreg_is_missing() -> str:
    """Return why torch_openreg cannot run; an empty text if it can."""
    if importlib.util.find_spec("torch_openreg") is None:
        return "torch_openreg, PyTorch's simulated accelerator, is not installed"
    kind = torch.accelerator.current_accelerator()
    return "" if kind is not None and kind.type == "openreg" else f"torch's accelerator is {kind}, not openreg"


OPENREG_IS_MISSING = _openreg_is_missing()

SIMULATED = LATENCIES
CUDA = (pytest.param("cuda", marks=pytest.mark.cuda),)
OPENREG = (pytest.param("openreg", marks=pytest.mark.skipif(bool(OPENREG_IS_MISSING), reason=OPENREG_IS_MISSING)),)
ACCELERATORS = (*OPENREG, *CUDA)
EVERY_DEVICE = (*SIMULATED, *ACCELERATORS)


def on(*devices: Any) -> pytest.MarkDecorator:
    """Parametrize the fixture ``device``."""
    return pytest.mark.parametrize("device", devices, indirect=True)


class DeviceCase:
    """One kind of device, with what tests need beside its ``DeviceBackend``.

    Args:
        kind: a latency of ``SimulatedDevice``, "openreg", "cuda", or "host" for no device.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_simulated: bool = kind in LATENCIES
        self._simulated: dict[int, SimulatedDevice] = {}

    @property
    def count(self) -> int:
        """The number of devices."""
        return 2 if self.is_simulated else torch.accelerator.device_count()

    @property
    def backend(self) -> Any:
        """The first device; ``None`` on the host. Also an argument ``device=`` of ``Feeder``."""
        return None if self.kind == "host" else self.at(0)

    def at(self, index: int) -> Any:
        """Return the device of an index."""
        if not self.is_simulated:
            return resolve_device(f"{self.kind}:{index}")
        if index not in self._simulated:
            self._simulated[index] = SimulatedDevice(index, latency=self.kind, index=index)  # type: ignore[arg-type]
        return self._simulated[index]

    def two(self) -> list[Any]:
        """Return two devices; skips the test where there is one."""
        if self.count < 2:
            pytest.skip("needs two devices")
        return [self.at(0), self.at(1)]

    def new_stream(self, backend: Any) -> Any:
        """Return a stream of the user's."""
        if self.is_simulated:
            return backend.new_stream()
        return torch.cuda.Stream(backend.device) if self.kind == "cuda" else torch.Stream(backend.device)

    def another(self, backend: Any) -> Sequence[Any]:
        """Return a stream other than the current one."""
        return [self.new_stream(backend)]

    def in_turn(self, backend: Any) -> Sequence[Any]:
        """Return the current stream and two others."""
        return [backend.current_stream(), self.new_stream(backend), self.new_stream(backend)]

    def use_stream(self, backend: Any, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream current, as users do."""
        if self.is_simulated:
            return backend.use_stream(stream)  # type: ignore[no-any-return]
        return torch.cuda.stream(stream) if self.kind == "cuda" else stream

    def slow(self, backend: Any, factor: int = 1) -> None:
        """Queue a kernel of ``factor`` milliseconds on the current stream, longer than the host takes for a batch."""
        if self.is_simulated:
            backend.sleep(20 * factor)
        elif self.kind == "cuda":
            with torch.cuda.device(backend.device):
                torch.cuda._sleep(2_000_000 * factor)

    def slow_here(self) -> None:
        """Queue a slow kernel on the first device."""
        self.slow(self.at(0))

    def synchronize(self) -> None:
        """Wait for all work of a real device."""
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def number(self, simulated: int, **others: int) -> int:
        """Return a number of batches: simulated devices are slow, and show a mistake after fewer batches."""
        return others.get(self.kind, simulated)

    def set_current(self, index: int) -> None:
        """Make an accelerator current in the calling thread."""
        backend_module._set_device_index(index)

    def assert_released(self) -> None:
        """Check that no memory of a simulated device is left."""
        gc.collect()
        release_unused()
        for simulated in self._simulated.values():
            assert simulated.allocated_bytes == 0
            assert simulated.pinned_bytes == 0
