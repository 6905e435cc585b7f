"""Checks that a feeder delivers every batch, whatever streams the training uses; for simulated and real devices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aiofeed.kernel.devices.backend import CpuBackend
from aiofeed.kernel.devices.resolve import resolve_devices
from aiofeed.kernel.feeder.feeder import Feeder
from aiofeed.testing.copier_check import PHASE, StreamConsumer, WrongBytesError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiofeed.kernel.core.faces import DeviceBackend, Stream

_ROW = 96  # bytes of a sample


class Checked:
    """A source whose bytes depend on sample and position."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def key(self, index: int) -> str:
        """Return the sample's number."""
        return str(index)

    def row(self, index: int) -> NDArray[np.uint8]:
        """Return the bytes of a sample."""
        return ((np.arange(_ROW) * 31 + index * 7919 + (index >> 5) * 104729) % 251).astype(np.uint8)

    async def read(self, index: int) -> bytes:
        """Return the bytes of a sample, encoded."""
        return self.row(index).tobytes()

    def target(self, index: int) -> int:
        """Return the sample's number."""
        return index


def check_feeder(
    device: Any,
    *,
    streams: Callable[[DeviceBackend], Sequence[Stream]] | None = None,
    slow: Callable[[DeviceBackend], object] = lambda backend: None,
    batches: int = 1_000,
    batch_size: int = 6,
    **options: Any,
) -> Feeder[Any]:
    """Feed batches with checksums through a feeder, and compare the checksums that the consumer computes.

    Example:
        ```python
        from aiofeed.testing import check_feeder

        check_feeder("cpu", batches=16, batch_size=8)  # or "cuda"
        ```

    The consumer works on its streams in rotation, behind slow kernels, drops each batch at once (with
    ``static_batches=True`` the feeder reuses its memory) and synchronises only at the end.

    Args:
        device: device or list of devices, as for ``Feeder``.
        streams: returns the consumer's streams of a device, the current one first; default: the current one only.
        slow: queues a slow kernel on the current stream of a device.
        batches: number of batches, in two epochs.
        batch_size: samples per batch, over all devices.
        options: other arguments of ``Feeder``.

    Returns:
        The closed feeder.

    Raises:
        WrongBytesError: a checksum differs.
    """
    resolved = resolve_devices(device)
    backends = list((resolved or CpuBackend()).backends)
    consumers = [
        _FeedConsumer(
            backend,
            streams(backend.given) if streams else [backend.current_stream()],
            partial(slow, backend.given),
            torch.arange(1, _ROW + 1),
            torch.zeros(batches, 2, dtype=torch.int64),
        )
        for backend in backends
    ]
    source = Checked(batches // 2 * batch_size)
    calls = itertools.count()

    def transform(batch: Any) -> Any:
        """Run on the side stream; slow in every other phase."""
        rows, labels = batch
        number, device_number = divmod(next(calls), len(backends))
        if number // PHASE % 2 == 0:
            slow(backends[device_number].given)
        return {"rows": rows.to(torch.float32) * 2 + 1, "labels": labels}

    feeder: Feeder[Any] = Feeder(
        source,
        decode=_decode,
        batch_size=batch_size,
        device=device,
        transform=transform,
        shuffle=True,
        drop_last=True,
        **options,
    )
    with feeder:
        number = _train(feeder, consumers, several=resolved is not None and resolved.splits)
    _compare(source, consumers, number)
    return feeder


def _train(feeder: Feeder[Any], consumers: Sequence[_FeedConsumer], *, several: bool) -> int:
    """Consume two epochs; returns the number of batches. With ``several`` devices a batch has a part for each."""
    number = 0
    for _ in feeder.epochs(2):
        iterator = iter(feeder)
        while True:
            # The next batch is requested on the streams on which it is used.
            with ExitStack() as stack:
                for consumer in consumers:
                    stack.enter_context(consumer.backend.use_stream(consumer.stream(number)))
                batch = next(iterator, None)
                if batch is None:
                    break
                for consumer, part in zip(consumers, batch if several else (batch,), strict=True):
                    consumer.use(number, part)
                del batch, part
            number += 1
    return number


class _FeedConsumer(StreamConsumer):
    """Uses its device's part of a batch."""

    def use(self, number: int, part: Any) -> None:
        self.delay(number)
        row = self.sums[number]
        # Weighted by the row's label too, so that swapped rows change the checksum.
        weights = self.weights * (part["labels"] % 8 + 1).unsqueeze(1)
        row[0].copy_((part["rows"].to(torch.int64) * weights).sum())
        row[1].copy_(part["labels"].sum())


def _compare(source: Checked, consumers: Sequence[_FeedConsumer], batches: int) -> None:
    """Raise ``WrongBytesError`` if the consumers' checksums differ from those of the source's rows."""
    received = sum(consumer.received() for consumer in consumers)
    assert isinstance(received, np.ndarray)
    size = len(source) // (batches // 2)
    weights = np.arange(1, _ROW + 1, dtype=np.int64)
    checksums = [
        int(((source.row(index).astype(np.int64) * 2 + 1) * weights).sum()) * (index % 8 + 1)
        for index in range(len(source))
    ]
    wrong = []
    for epoch in range(2):
        order = torch.randperm(len(source), generator=torch.Generator().manual_seed(epoch)).tolist()
        for position in range(batches // 2):
            indices = order[position * size : (position + 1) * size]
            number = epoch * (batches // 2) + position
            if received[number].tolist() != [sum(checksums[index] for index in indices), sum(indices)]:
                wrong.append(number)
    if wrong:
        raise WrongBytesError(wrong, batches)


def _decode(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)
