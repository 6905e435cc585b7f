"""Windows of tokens on a device: the tokens of all files are copied there once, and a gather makes several batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.resident.batch_ranges import BatchRange
from aiofeed.resident.device_windows import DeviceData, DeviceWindows

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from aiofeed.kernel.devices.backend import DeviceBackend

# Host memory that the upload takes: files may be larger than host memory.
UPLOAD_BYTES = 64 << 20


class DeviceTokenWindows(DeviceWindows):
    """Uploads the tokens of files to a device, and gathers windows of them there. Arguments as for ``ResidentData``."""

    def __init__(self, backend: DeviceBackend, source: Any, batch_size: int, memory_bytes: int) -> None:
        arrays = source.arrays
        self._dtype = np.result_type(*{tokens.dtype for tokens in arrays}).newbyteorder("=")
        self._count = sum(map(len, arrays))
        super().__init__(backend, source, batch_size, memory_bytes)
        # While it is made, a window takes as much memory again: the position of each token.
        self.max_batches: int = max(self.max_batches // 2, 1)

    def _rows(self, batch_range: BatchRange) -> NDArray[np.int64]:
        first: NDArray[np.int64] = self._source.first_tokens(batch_range.indices)
        return first

    def _copy_data(self) -> list[DeviceData]:
        import torch

        backend, step, at = self._backend, max(UPLOAD_BYTES // self._dtype.itemsize, 1), 0
        flat: torch.Tensor | None = None
        for tokens in self._source.arrays:
            for first in range(0, len(tokens), step):
                # As signed integers, which all devices can gather. The copy to the device reads this memory.
                piece = tokens[first : first + step].astype(self._dtype).view(f"i{self._dtype.itemsize}")
                host = torch.from_numpy(piece)
                copy = backend.copy(host)
                flat = copy.new_empty(self._count) if flat is None else flat
                flat[at : at + len(host)].copy_(copy)
                backend.record(backend.side_stream()).synchronize()
                at += len(host)
        assert flat is not None
        return [DeviceData(flat, (), getattr(torch, self._dtype.name))]

    def _data_bytes(self, *, only_to_copy: bool) -> int:
        return self._count * self._dtype.itemsize

    def _alternative(self) -> str:
        return "Without cache= batches are gathered from the files and copied"

    def _gather(self) -> Callable[..., list[torch.Tensor]]:
        return _gather_tokens


def _gather_tokens(data: list[DeviceData], source: Any, wanted: tuple[torch.Tensor, int, int]) -> list[torch.Tensor]:
    """Return the tokens of windows, and with targets those that follow, as int64; ``wanted`` as for rows.

    The copier calls it on the side stream.
    """
    import torch

    [(flat, _, dtype)], (first, _, count) = data, wanted
    with torch.inference_mode(False), torch.no_grad():
        needed = source.block + source.targets
        positions = first.unsqueeze(1) + torch.arange(needed, device=first.device)
        tokens = flat.index_select(0, positions.view(-1)).view(count, needed)
        parts = [tokens[:, at : at + source.block] for at in range(1 + source.targets)]
        parts = [part.to(torch.int64, copy=True, memory_format=torch.contiguous_format) for part in parts]
        if not dtype.is_signed:
            for part in parts:
                part.bitwise_and_((1 << 8 * dtype.itemsize) - 1)
        return parts
