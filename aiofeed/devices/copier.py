"""Copies to a device, on a stream of their own, and how they are handed to the consumer's stream.

What keeps the bytes right, in order:

1. Copies run on the side stream, so ``copied`` is recorded there, after the last: only once it is complete may the
   host memory be written again or freed.
2. The consumer's *current* stream, read at each ``deliver``, waits for ``ready``.
3. The batch was allocated on the side stream and is used on the consumer's. Dropping it would give its memory back to
   the side stream at once, while the consumer's kernels are still queued: ``hold`` (record_stream) defers that.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from aiofeed.core.errors import DeviceCopyError
from aiofeed.core.pytree import leaves, map_leaves
from aiofeed.core.types import DeferredTensor, HostTensor

if TYPE_CHECKING:
    import torch

    from aiofeed.devices.backend import DeviceBackend, Event, Stream

_Sources = deque[tuple["Event", list["torch.Tensor"]]]

# What copiers that are gone were still copying from. Freed with the next batch of any copier, once it is copied.
_orphans: deque[_Sources] = deque()


@dataclass(frozen=True, slots=True, eq=False)
class PendingCopy:
    """A batch on its way to the device.

    Args:
        batch: the batch with its tensors on the device; not to be used before ``Copier.deliver``.
        copied: complete once the host memory is no longer read.
        ready: complete once the batch may be read, ``transform`` included.
    """

    batch: Any
    copied: Event
    ready: Event


class Copier:
    """Issues a device's copies and hands batches over to the consumer's stream. No threads, no queues.

    Args:
        backend: the device.
        transform: called with each batch on the device, on the side stream: normalising, say.
    """

    def __init__(self, backend: DeviceBackend, transform: Callable[[Any], Any] | None = None) -> None:
        self.backend = backend
        self.transform = transform
        self._side: Stream = backend.side_stream()
        self._used_on: Stream = None
        self._reading: _Sources = deque()
        # Copies may outlive the copier; a C function, because the collector may call it in any thread.
        weakref.finalize(self, _orphans.append, self._reading).atexit = False

    def follow(self) -> None:
        """Let the side stream wait for what the calling thread has queued: constants that ``transform`` uses, say."""
        backend = self.backend
        backend.wait(self._side, backend.record(backend.current_stream()))

    def issue(self, batch: Any) -> PendingCopy:
        """Queue the copies of a batch, then ``transform``, on the side stream.

        Args:
            batch: nested; ``HostTensor`` and host tensors are copied, and everything else stays as it is. A tensor
                that is already on the device does too.

        Raises:
            DeviceCopyError: a copy failed, or ``transform`` raised. Host memory is no longer read by then.
        """
        self.release()
        backend = self.backend
        caller = backend.current_stream()
        reading: list[torch.Tensor] = []
        there_before = False

        def move(leaf: Any) -> Any:
            nonlocal there_before
            if type(leaf) is HostTensor:
                return self._copy_leaf(leaf, reading)
            if isinstance(leaf, DeferredTensor):
                return leaf.arrive(partial(self._copy_leaf, reading=reading))
            if not is_tensor(leaf):
                return leaf
            moved = self._copy(leaf, reading)
            there_before = there_before or moved is leaf
            return moved

        with backend.use_stream(self._side):
            try:
                moved = map_leaves(move, batch)
                copied = backend.record(self._side)
                self._reading.append((copied, reading))
                if self.transform is None:
                    return PendingCopy(moved, copied, copied)
                if there_before:
                    # Whoever made that tensor queued it elsewhere; the calling thread's stream is the best guess.
                    backend.wait(self._side, backend.record(caller))
                moved = self._transformed(moved)
                return PendingCopy(moved, copied, backend.record(self._side))
            except Exception:
                self.settle()
                raise

    def deliver(self, in_flight: PendingCopy) -> Any:
        """The batch, for work on the calling thread's current stream. Never blocks."""
        backend = self.backend
        stream = backend.current_stream()
        backend.wait(stream, in_flight.ready)
        for leaf in leaves(in_flight.batch):
            if is_tensor(leaf):
                backend.record_stream(leaf, stream)
        self._used_on = stream
        return in_flight.batch

    def used(self) -> Event:
        """An event after what has been queued by now on the stream of the last ``deliver``, where its batch is used.

        That need not be the stream which is current now; before the first ``deliver`` it is.
        """
        backend = self.backend
        return backend.record(backend.current_stream() if self._used_on is None else self._used_on)

    def release(self) -> None:
        """Let go of host memory whose copies are complete; ``issue`` does it too. Not for two threads at once."""
        for _ in range(len(_orphans)):
            try:
                sources = _orphans.popleft()
            except IndexError:  # another copier's thread took it
                break
            if not _drop_copied(sources):
                _orphans.append(sources)
        _drop_copied(self._reading)

    def _copy_leaf(self, leaf: HostTensor, reading: list[torch.Tensor]) -> torch.Tensor:
        # Flat, as it lies: a permuted or converted copy would go through a temporary, and not by itself.
        import torch

        copy = self._copy(torch.from_numpy(leaf.memory), reading)
        if leaf.torch_dtype is not None:
            copy = copy.view(getattr(torch, leaf.torch_dtype))
        return copy if leaf.axes is None else copy.permute(leaf.axes)

    def _copy(self, tensor: torch.Tensor, reading: list[torch.Tensor]) -> torch.Tensor:
        reading.append(tensor)
        try:
            return self.backend.copy(tensor)
        except Exception as error:
            raise DeviceCopyError(
                f"copying a tensor of shape {list(tensor.shape)} and dtype {tensor.dtype} to {self.backend.name} "
                f"failed: {type(error).__name__}: {error}"
            ) from error

    def _transformed(self, batch: Any) -> Any:
        assert self.transform is not None
        try:
            return self.transform(batch)
        except KeyboardInterrupt:  # not the transform's: the consumer's thread makes windows of resident data here
            self.settle()
            raise
        except BaseException as error:
            self.settle()
            found = ", ".join(f"{leaf.dtype} {list(leaf.shape)}" for leaf in leaves(batch) if is_tensor(leaf))
            raise DeviceCopyError(
                f"transform raised {type(error).__name__} on {self.backend.name}, given {found or 'no tensors'}: "
                f"{error}"
            ) from error

    def settle(self) -> None:
        """Wait for the copies queued so far, so that their host memory is free when the error is seen."""
        try:
            self.backend.record(self._side).synchronize()
        except Exception:  # noqa: BLE001 - the device is beyond use, and the error that led here says so
            pass


def _drop_copied(sources: _Sources) -> bool:
    while sources and sources[0][0].query():
        sources.popleft()
    return not sources


def is_tensor(value: Any) -> bool:
    """Whether a leaf is a tensor; without importing torch for what is not."""
    # Cheaper than an import for what is no tensor; arrays and scalars have no such attribute.
    if not hasattr(value, "__torch_function__") or isinstance(value, type):
        return False
    import torch

    return isinstance(value, torch.Tensor)
