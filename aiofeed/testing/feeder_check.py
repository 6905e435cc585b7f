"""Does every batch of a feeder arrive, whatever streams the training uses? For simulated devices and for real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aiofeed.devices.backend import CpuBackend
from aiofeed.devices.resolve import DeviceGroup, resolve_devices
from aiofeed.feeder.feeder import Feeder
from aiofeed.testing.copier_check import WrongBytesError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiofeed.devices.backend import DeviceBackend, Stream

_ROW = 96  # bytes of a sample
_SWITCH = 7  # the consumer changes its streams every so many batches
_PHASE = 64  # batches for which the copies are slow, then the consumer: each mistake shows in one of the two


class Checked:
    """A source whose bytes say where they belong: sample i, byte j."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def key(self, index: int) -> str:
        """A number."""
        return str(index)

    def row(self, index: int) -> NDArray[np.uint8]:
        """The bytes of a sample."""
        return ((np.arange(_ROW) * 31 + index * 7919 + (index >> 5) * 104729) % 251).astype(np.uint8)

    async def read(self, index: int) -> bytes:
        """The bytes of a sample."""
        return self.row(index).tobytes()

    def target(self, index: int) -> int:
        """The sample's own number."""
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
    """Feed checksummed batches through a feeder, and compare what the consumer's streams saw.

    The consumer works on one stream after the other, behind slow kernels, drops each batch at once (with
    ``static_batches=True`` they are used again under it) and never synchronises before the end.

    Args:
        device: as ``Feeder`` takes it, a list too.
        streams: those of the consumer, of one device; default: its current one. The current one should be the first.
        slow: queues a slow kernel on the current stream of a device.
        batches: how many; two epochs have half of them each.
        batch_size: samples, over all devices.
        options: others of ``Feeder``.

    Returns:
        The feeder, closed.

    Raises:
        WrongBytesError: a checksum differs.
    """
    found = resolve_devices(device)
    backends: list[DeviceBackend]
    backends = list(found.backends) if isinstance(found, DeviceGroup) else [found or CpuBackend()]
    consumers = [
        _FeedConsumer(backend, streams(backend) if streams else [backend.current_stream()], slow, batches)
        for backend in backends
    ]
    source = Checked(batches // 2 * batch_size)
    transform = _Transform(slow, backends)
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
        number = _train(feeder, consumers, several=isinstance(found, DeviceGroup))
    _compare(source, consumers, number)
    return feeder


def _train(feeder: Feeder[Any], consumers: Sequence[_FeedConsumer], *, several: bool) -> int:
    """Two epochs; how many batches they had. With ``several`` devices a batch has a part for each."""
    number = 0
    for _ in feeder.epochs(2):
        iterator = iter(feeder)
        while True:
            # The next batch is asked for on the stream on which it is used.
            with _streams(consumers, number):
                batch = next(iterator, None)
                if batch is None:
                    break
                for consumer, part in zip(consumers, batch if several else (batch,), strict=True):
                    consumer.use(number, part)
                del batch, part
            number += 1
    return number


class _streams:  # noqa: N801 - used as a function
    """Every consumer's stream of the moment, as the current one of its device."""

    def __init__(self, consumers: Sequence[_FeedConsumer], number: int) -> None:
        self._contexts = [consumer.backend.use_stream(consumer.stream(number)) for consumer in consumers]

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *exception: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*exception)


class _Transform:
    """Work on the side stream: slow in every other phase."""

    def __init__(self, slow: Callable[[DeviceBackend], object], backends: Sequence[DeviceBackend]) -> None:
        self.slow = slow
        self.backends = backends
        self.calls = 0

    def __call__(self, batch: Any) -> Any:
        rows, labels = batch
        if self.calls // len(self.backends) // _PHASE % 2 == 0:
            self.slow(self.backends[self.calls % len(self.backends)])
        self.calls += 1
        return {"rows": rows.to(torch.float32) * 2 + 1, "labels": labels}


class _FeedConsumer:
    """The training of one device: launches work on a part, and keeps nothing of it."""

    def __init__(
        self,
        backend: DeviceBackend,
        streams: Sequence[Stream],
        slow: Callable[[DeviceBackend], object],
        batches: int,
    ) -> None:
        self.backend = backend
        self.streams = streams
        self.slow = slow
        self._host = [torch.arange(1, _ROW + 1), torch.zeros(batches, 2, dtype=torch.int64)]
        self.weights, self.sums = [backend.copy(tensor) for tensor in self._host]
        backend.record(backend.current_stream()).synchronize()

    def stream(self, number: int) -> Stream:
        return self.streams[number // _SWITCH % len(self.streams)]

    def use(self, number: int, part: Any) -> None:
        if number // _PHASE % 2:
            self.slow(self.backend)
        row = self.sums[number]
        # Weighted by the row's own number too: rows that changed places count as wrong.
        weights = self.weights * (part["labels"] % 8 + 1).unsqueeze(1)
        row[0].copy_((part["rows"].to(torch.int64) * weights).sum())
        row[1].copy_(part["labels"].sum())

    def seen(self) -> NDArray[np.int64]:
        for stream in self.streams:
            self.backend.record(stream).synchronize()
        found: NDArray[np.int64] = self.sums.cpu().numpy()
        return found


def _compare(source: Checked, consumers: Sequence[_FeedConsumer], batches: int) -> None:
    seen = sum(consumer.seen() for consumer in consumers)
    assert isinstance(seen, np.ndarray)
    size = len(source) // (batches // 2)
    weights = np.arange(1, _ROW + 1, dtype=np.int64)
    own = [
        int(((source.row(index).astype(np.int64) * 2 + 1) * weights).sum()) * (index % 8 + 1)
        for index in range(len(source))
    ]
    wrong = []
    for epoch in range(2):
        order = torch.randperm(len(source), generator=torch.Generator().manual_seed(epoch)).tolist()
        for at in range(batches // 2):
            indices = order[at * size : (at + 1) * size]
            number = epoch * (batches // 2) + at
            if seen[number].tolist() != [sum(own[index] for index in indices), sum(indices)]:
                wrong.append(number)
    if wrong:
        raise WrongBytesError(wrong, batches)


def _decode(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)
