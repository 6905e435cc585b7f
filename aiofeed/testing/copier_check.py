"""Checks that a copier delivers every byte, whatever the order of the streams; for simulated and real devices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aiofeed.kernel.core.types import HostTensor
from aiofeed.kernel.devices.copier import Copier, PendingCopy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiofeed.kernel.core.faces import DeviceBackend, Event, Stream

_AHEAD = 2  # copies issued before the consumer takes the first batch
_SLOTS = 3  # host buffers, written in rotation
_SWITCH = 7  # batches after which the consumer changes its stream
PHASE = 64  # batches with a slow side stream, then with a slow consumer: each mistake shows in one of the two
_EXTRA = 64  # integers of the third tensor, which is in pageable memory in the first half of a phase


class WrongBytesError(AssertionError):
    """Batches arrived with wrong contents.

    Example:
        ```python
        from aiofeed.testing import WrongBytesError, check_feeder

        try:
            check_feeder("cpu", batches=16)
        except WrongBytesError as error:
            print(error.wrong, "of", error.batches)
        ```

    Args:
        wrong: numbers of the wrong batches.
        batches: number of all batches.
    """

    def __init__(self, wrong: Sequence[int], batches: int) -> None:
        super().__init__(f"{len(wrong)} of {batches} batches have wrong contents, the first is batch {wrong[0]}")
        self.wrong: list[int] = list(wrong)
        self.batches = batches


def check_copier(
    backend: DeviceBackend,
    streams: Sequence[Stream],
    *,
    copier: Callable[..., Copier] = Copier,
    slow: Callable[[], object] = lambda: None,
    batches: int = 2_000,
    shape: tuple[int, int, int, int] = (2, 4, 4, 3),
    seed: int = 0,
) -> None:
    """Copy batches with checksums through a few host buffers, and compare the checksums that the consumer computes.

    Example:
        ```python
        import torch

        from aiofeed.kernel.devices.resolve import resolve_device
        from aiofeed.testing import check_copier

        if torch.cuda.is_available():
            backend = resolve_device("cuda")  # or the one that you write
            check_copier(backend, [backend.current_stream()])
        ```

    The consumer works on its streams in rotation, behind slow kernels, drops each batch at once and synchronises only
    at the end. A batch is nested: images [N, 3, H, W] in channels_last memory, converted and scaled by ``transform``;
    labels; a tensor in pageable memory that only the batch refers to, alternating with one in the slot's memory, since
    a copy from pageable memory may wait for the stream and so hide a missing wait; a string.

    Args:
        backend: the device.
        streams: the consumer's streams; the first should be the current one, to include the default stream.
        copier: creates the copier under test.
        slow: queues a slow kernel on the current stream.
        batches: number of batches.
        shape: shape of the images' memory, [N, H, W, 3].
        seed: seeds the contents.

    Raises:
        WrongBytesError: a checksum differs.
    """
    rng = np.random.default_rng(seed)
    consumer = _CopyConsumer(backend, streams, slow, batches, shape)
    tested = copier(backend, consumer.transform)
    # Host memory, and the event of the last copy from it.
    slots: deque[tuple[NDArray[np.uint8], Event | None]]
    slots = deque((_pinned_memory(backend, consumer.slot_bytes), None) for _ in range(_SLOTS))
    pending: deque[PendingCopy] = deque()
    expected: list[list[int]] = []
    for _ in range(batches):
        memory, copied = slots.popleft()
        while copied is not None and not copied.query():
            pass
        batch, sums = consumer.fill(memory, rng, pageable=len(expected) % PHASE < PHASE // 2)
        expected.append(sums)
        pending.append(tested.issue(batch))
        del batch
        slots.append((memory, pending[-1].copied))
        if len(pending) > _AHEAD:
            consumer.take(tested, pending.popleft())
    while pending:
        consumer.take(tested, pending.popleft())
    received = consumer.received().tolist()
    tested.release()
    if wrong := [number for number in range(batches) if received[number] != expected[number]]:
        raise WrongBytesError(wrong, batches)


class StreamConsumer:
    """Works like training code on one device: launches work on each batch that it gets, and does not keep the batch.

    Args:
        slow: Queues a slow kernel on the current stream.
        weights: A weight for each position, so that bytes in the wrong place change the checksum.
        sums: Zeros for the checksums of the batches, which are computed on the device.
    """

    def __init__(
        self,
        backend: DeviceBackend,
        streams: Sequence[Stream],
        slow: Callable[[], object],
        weights: torch.Tensor,
        sums: torch.Tensor,
    ) -> None:
        self.backend = backend
        self.streams = streams
        self.slow = slow
        self._host = weights, sums  # the device may still copy from them
        self.weights: torch.Tensor = backend.copy(weights)
        self.sums: torch.Tensor = backend.copy(sums)
        backend.record(backend.current_stream()).synchronize()

    def stream(self, number: int) -> Stream:
        """Return the stream for a batch; they take turns."""
        return self.streams[number // _SWITCH % len(self.streams)]

    def delay(self, number: int) -> None:
        """Be slow in every other phase."""
        if number // PHASE % 2:
            self.slow()

    def received(self) -> NDArray[np.int64]:
        """Wait for all streams; returns the checksums of all batches."""
        for stream in self.streams:
            self.backend.record(stream).synchronize()
        sums: NDArray[np.int64] = self.sums.cpu().numpy()
        return sums


class _CopyConsumer(StreamConsumer):
    """Takes batches from a copier."""

    def __init__(
        self,
        backend: DeviceBackend,
        streams: Sequence[Stream],
        slow: Callable[[], object],
        batches: int,
        shape: tuple[int, int, int, int],
    ) -> None:
        self.shape = shape
        self.pixels = shape[0] * shape[1] * shape[2] * shape[3]
        self.numbers_at = -(-self.pixels // 8) * 8
        self.slot_bytes = self.numbers_at + 8 * (shape[0] + _EXTRA)
        self.taken = 0
        self.transformed = 0
        # In memory order.
        self.host_weights = torch.arange(1, self.pixels + 1).view(shape)
        sums = torch.zeros(batches, 3, dtype=torch.int64)
        super().__init__(backend, streams, slow, self.host_weights.permute(0, 3, 1, 2), sums)

    def fill(self, memory: NDArray[np.uint8], rng: np.random.Generator, *, pageable: bool) -> tuple[Any, list[int]]:
        """Write random contents into a slot; returns the batch and its checksums."""
        images = memory[: self.pixels].reshape(self.shape)
        images[...] = rng.integers(0, 256, self.shape, dtype=np.uint8)
        numbers = memory[self.numbers_at :].view(np.int64)
        numbers[...] = rng.integers(0, 1 << 40, len(numbers))
        labels, extra = numbers[: self.shape[0]], numbers[self.shape[0] :]
        weighted = ((torch.from_numpy(images).to(torch.int64) * 2 + 1) * self.host_weights).sum()
        sums = [int(weighted), int(labels.sum()), int(extra.sum())]
        batch = (
            {"images": HostTensor(images, axes=(0, 3, 1, 2), pinned=True)},
            [
                HostTensor(labels, pinned=True),
                torch.from_numpy(extra.copy()) if pageable else HostTensor(extra, pinned=True),
            ],
            "a key",
        )
        return batch, sums

    def transform(self, batch: Any) -> Any:
        """Return the transform of the copier under test; slow in every other phase."""
        named, rest, key = batch
        number, self.transformed = self.transformed, self.transformed + 1
        if number // PHASE % 2 == 0:
            self.slow()
        # Integers below 2**24 are exact in float32.
        return {"images": named["images"].to(torch.float32) * 2 + 1}, rest, key

    def take(self, copier: Copier, pending: PendingCopy) -> None:
        """Take a batch on the current stream of the rotation, and launch its checksums."""
        number, self.taken = self.taken, self.taken + 1
        with self.backend.use_stream(self.stream(number)):
            self.delay(number)
            named, (labels, extra), key = copier.deliver(pending)
            del pending
            assert key == "a key"
            row = self.sums[number]
            row[0].copy_((named["images"].to(torch.int64) * self.weights).sum())
            row[1].copy_(labels.sum())
            row[2].copy_(extra.sum())


def _pinned_memory(backend: DeviceBackend, nbytes: int) -> NDArray[np.uint8]:
    try:
        return backend.pin(nbytes)
    except RuntimeError:  # the device cannot pin memory: copies are slower, but must be correct too
        return np.empty(nbytes, np.uint8)
