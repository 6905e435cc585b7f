"""Does every byte arrive, whatever the streams do? One check for the simulated device and for real ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aiofeed.core.types import HostTensor
from aiofeed.devices.copier import Copier, PendingCopy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiofeed.devices.backend import DeviceBackend, Event, Stream

_AHEAD = 2  # batches issued before the consumer takes the first
_SLOTS = 3  # pieces of host memory, written in turn
_SWITCH = 7  # the consumer changes its stream every so many batches
_PHASE = 64  # batches for which the side stream is slow, then the consumer's: each mistake shows in one of the two
_PLAIN = 64  # numbers in the tensor that lies in pageable memory in the first half of a phase


class WrongBytesError(AssertionError):
    """Batches arrived with wrong contents.

    Args:
        wrong: the batches, by number.
        batches: how many there were.
    """

    def __init__(self, wrong: Sequence[int], batches: int) -> None:
        super().__init__(f"{len(wrong)} of {batches} batches arrived wrong, the first of them number {wrong[0]}")
        self.wrong = list(wrong)
        self.batches = batches


@dataclass(frozen=True)
class _Slot:
    memory: NDArray[np.uint8]
    copied: Event | None = None


def check_copier(
    backend: DeviceBackend,
    streams: Sequence[Stream],
    *,
    copier: Callable[[DeviceBackend, Callable[[Any], Any]], Copier] = Copier,
    slow: Callable[[], object] = lambda: None,
    batches: int = 2_000,
    shape: tuple[int, int, int, int] = (2, 4, 4, 3),
    seed: int = 0,
) -> None:
    """Copy checksummed batches through a few slots of host memory, and compare what the consumer saw.

    The consumer works on one stream after the other, behind slow kernels, drops each batch at once and never
    synchronises before the end. A batch is nested: images [N, 3, H, W] in channels_last memory, converted and
    scaled by ``transform``; labels; a plain tensor that nobody else keeps, or, since a copy from pageable memory may
    wait for the stream and so hide what comes too soon, more of the slot's memory; a string.

    Args:
        backend: the device.
        streams: the consumer's; the first should be the current one, for the sake of the default stream.
        copier: makes what is checked.
        slow: queues a slow kernel on the current stream.
        batches: how many.
        shape: of the images' memory, [N, H, W, 3].
        seed: of their contents.

    Raises:
        WrongBytesError: a checksum differs.
    """
    rng = np.random.default_rng(seed)
    consumer = _CopyConsumer(backend, streams, slow, batches, shape)
    mover = copier(backend, consumer.transform)
    free = deque(_Slot(_memory(backend, consumer.slot_bytes)) for _ in range(_SLOTS))
    flying: deque[PendingCopy] = deque()
    expected: list[list[int]] = []
    for _ in range(batches):
        slot = free.popleft()
        while slot.copied is not None and not slot.copied.query():
            pass
        batch, sums = consumer.fill(slot.memory, rng, plain=len(expected) % _PHASE < _PHASE // 2)
        expected.append(sums)
        flying.append(mover.issue(batch))
        del batch
        free.append(_Slot(slot.memory, flying[-1].copied))
        if len(flying) > _AHEAD:
            consumer.take(mover, flying.popleft())
    while flying:
        consumer.take(mover, flying.popleft())
    seen = consumer.sums()
    mover.release()
    if wrong := [number for number in range(batches) if seen[number] != expected[number]]:
        raise WrongBytesError(wrong, batches)


class _CopyConsumer:
    """What the training code does: take a batch, launch work on it, drop it."""

    def __init__(
        self,
        backend: DeviceBackend,
        streams: Sequence[Stream],
        slow: Callable[[], object],
        batches: int,
        shape: tuple[int, int, int, int],
    ) -> None:
        self.backend = backend
        self.streams = streams
        self.slow = slow
        self.shape = shape
        self.pixels = shape[0] * shape[1] * shape[2] * shape[3]
        self.numbers_at = -(-self.pixels // 8) * 8
        self.slot_bytes = self.numbers_at + 8 * (shape[0] + _PLAIN)
        self.taken = 0
        self.transformed = 0
        # A weight for each position, so that bytes in the wrong place count as wrong. In the memory's order.
        self.host_weights = torch.arange(1, self.pixels + 1).view(shape)
        self.host_view = self.host_weights.permute(0, 3, 1, 2)
        self.weights = backend.copy(self.host_view)
        self.host_sums = torch.zeros(batches, 3, dtype=torch.int64)
        self.device_sums = backend.copy(self.host_sums)
        backend.record(backend.current_stream()).synchronize()

    def fill(self, memory: NDArray[np.uint8], rng: np.random.Generator, *, plain: bool) -> tuple[Any, list[int]]:
        images = memory[: self.pixels].reshape(self.shape)
        images[...] = rng.integers(0, 256, self.shape, dtype=np.uint8)
        numbers = memory[self.numbers_at :].view(np.int64)
        numbers[...] = rng.integers(0, 1 << 40, len(numbers))
        labels, others = numbers[: self.shape[0]], numbers[self.shape[0] :]
        weighted = ((torch.from_numpy(images).to(torch.int64) * 2 + 1) * self.host_weights).sum()
        sums = [int(weighted), int(labels.sum()), int(others.sum())]
        batch = (
            {"images": HostTensor(images, axes=(0, 3, 1, 2), pinned=True)},
            [
                HostTensor(labels, pinned=True),
                torch.from_numpy(others.copy()) if plain else HostTensor(others, pinned=True),
            ],
            "a key",
        )
        return batch, sums

    def transform(self, batch: Any) -> Any:
        named, rest, key = batch
        number, self.transformed = self.transformed, self.transformed + 1
        if number // _PHASE % 2 == 0:
            self.slow()
        # Whole numbers below 2**24: float32 holds them exactly.
        return {"images": named["images"].to(torch.float32) * 2 + 1}, rest, key

    def take(self, mover: Copier, in_flight: PendingCopy) -> None:
        number, self.taken = self.taken, self.taken + 1
        with self.backend.use_stream(self.streams[number // _SWITCH % len(self.streams)]):
            if number // _PHASE % 2:
                self.slow()
            named, (labels, plain), key = mover.deliver(in_flight)
            del in_flight
            assert key == "a key"
            row = self.device_sums[number]
            row[0].copy_((named["images"].to(torch.int64) * self.weights).sum())
            row[1].copy_(labels.sum())
            row[2].copy_(plain.sum())

    def sums(self) -> list[list[int]]:
        for stream in self.streams:
            self.backend.record(stream).synchronize()
        seen: list[list[int]] = self.device_sums.cpu().tolist()
        return seen


def _memory(backend: DeviceBackend, nbytes: int) -> NDArray[np.uint8]:
    try:
        return backend.pin(nbytes)
    except RuntimeError:  # no such memory there: copies take longer, and must be right all the same
        return np.empty(nbytes, np.uint8)
