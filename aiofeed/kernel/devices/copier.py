"""Copies batches to a device on a side stream and hands them to the consumer's streams.

Three rules keep the data correct:

1. Copies run on the side stream. The event ``copied`` is recorded there after the last copy. The host memory may be
   written again or freed only after ``copied`` is complete.
2. Each ``deliver`` makes the consumer's *current* stream wait for ``ready``.
3. A batch is allocated on the side stream and used on the consumer's stream. When it is dropped, the allocator would
   give its memory back to the side stream at once, while the consumer's kernels are still queued. ``record_stream``
   delays that until those kernels have run.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from aiofeed.kernel.core.errors import DeviceCopyError
from aiofeed.kernel.core.formatting import format_error
from aiofeed.kernel.core.pytree import leaves, map_leaves
from aiofeed.kernel.core.types import DeferredTensor, HostTensor, Transform
from aiofeed.kernel.core.validation import check_returned
from aiofeed.kernel.devices.backend import is_out_of_memory
from aiofeed.kernel.runtime.buffers import DropTracker, release_unused
from aiofeed.kernel.runtime.tensors import is_tensor, restore_layout

if TYPE_CHECKING:
    import torch

    from aiofeed.kernel.core.faces import BaseDevice, Event, Stream

log: logging.Logger = logging.getLogger("aiofeed.devices")

# Tensors that work on the side stream reads, each list with an event after that work.
_Sources = deque[tuple["Event", list["torch.Tensor"]]]

# Each copier with the host tensors of its copies, which may outlive it. The next `release` of any copier moves them to
# `_orphans`, and drops the ones that are copied.
_copiers: DropTracker[_Sources] = DropTracker()
_orphans: deque[_Sources] = deque()
# Host tensors of copies to devices that have failed.
_kept: list[_Sources] = []


@dataclass(frozen=True, slots=True, eq=False)
class PendingCopy:
    """A batch whose copies to the device are queued.

    Args:
        batch: The batch with its tensors on the device. Do not use it before ``Copier.deliver``.
        copied: Complete when the host memory is no longer read.
        ready: Complete when the batch may be read, that is, after ``transform``.
    """

    batch: Any
    copied: Event
    ready: Event


@dataclass(eq=False, repr=False)
class Copier:
    """Queues the copies of one device and hands batches to the consumer's stream. Has no thread and no queue.

    Args:
        transform: Called with each batch on the device, on the side stream, e.g. to normalise images.
        output: Called by ``deliver`` with the batch and the consumer's stream; ``deliver`` returns its result.
    """

    backend: BaseDevice
    transform: Transform | None = None
    output: Callable[[Any, Stream], Any] | None = None

    def __post_init__(self) -> None:
        self._side: Stream = self.backend.side_stream()
        self._consumer_stream: Stream = None
        self._sources: _Sources = deque()
        _copiers.watch(self, self._sources)

    def wait_for_caller(self) -> None:
        """Make the side stream wait for the calling thread's queued work, e.g. constants of ``transform``."""
        backend = self.backend
        backend.wait(self._side, backend.record(backend.current_stream()))

    def issue(self, batch: Any) -> PendingCopy:
        """Queue the copies of a batch, then ``transform``, on the side stream.

        Args:
            batch: A pytree. ``HostTensor`` and host tensors are copied; other leaves, also tensors that are on the
                device already, stay as they are.

        Raises:
            DeviceCopyError: A copy failed or ``transform`` raised. The host memory is then no longer read.
        """
        self.release()
        backend = self.backend
        caller = backend.current_stream()
        sources: list[torch.Tensor] = []
        on_device_already = False

        def move(leaf: Any) -> Any:
            nonlocal on_device_already
            if type(leaf) is HostTensor:
                return self._copy_leaf(leaf, sources)
            if isinstance(leaf, DeferredTensor):
                return leaf.arrive(partial(self._copy_leaf, sources=sources))
            if not is_tensor(leaf):
                return leaf
            moved = self._copy(leaf, sources)
            on_device_already = on_device_already or moved is leaf
            return moved

        with backend.use_stream(self._side):
            try:
                moved = map_leaves(move, batch)
                copied = ready = backend.record(self._side)
                if not on_device_already:
                    self.keep_until(copied, sources)
                if self.transform is not None:
                    if on_device_already:
                        # Another stream computes that tensor; the calling thread's stream is the best guess.
                        backend.wait(self._side, backend.record(caller))
                    moved = self._transformed(moved)
                    ready = backend.record(self._side)
                if on_device_already:
                    # `transform` reads them on the side stream, which their allocators do not know.
                    self.keep_until(ready, sources)
                return PendingCopy(moved, copied, ready)
            except Exception:
                self.wait_for_copies()
                raise

    def deliver(self, pending: PendingCopy) -> Any:
        """Return the batch for work on the calling thread's current stream. Never blocks."""
        backend = self.backend
        stream = backend.current_stream()
        # Rules 2 and 3 of this module: the stream waits for the copy, and keeps the memory until its kernels have run.
        backend.wait(stream, pending.ready)
        for leaf in leaves(pending.batch):
            if is_tensor(leaf):
                backend.record_stream(leaf, stream)
        self._consumer_stream = stream
        return pending.batch if self.output is None else self.output(pending.batch, stream)

    def last_use_event(self) -> Event:
        """Return an event after all work queued so far on the stream of the last ``deliver``, which uses its batch.

        That stream need not be the current one. Before the first ``deliver`` the current stream is used.
        """
        backend = self.backend
        return backend.record(backend.current_stream() if self._consumer_stream is None else self._consumer_stream)

    def keep_until(self, event: Event, tensors: list[torch.Tensor]) -> None:
        """Keep tensors until an event of the side stream is complete, also if the copier is dropped before."""
        self._sources.append((event, tensors))

    def release(self) -> None:
        """Drop the host tensors whose copies are complete, and unlock their memory if nothing else uses it.

        ``issue`` calls it, too. Not thread-safe.
        """
        _orphans.extend(_copiers.collected())
        for _ in range(len(_orphans)):
            try:
                sources = _orphans.popleft()
            except IndexError:  # another copier's thread has removed it
                break
            try:
                if not _drop_copied(sources):
                    _orphans.append(sources)
            except Exception:  # noqa: BLE001 - its device has failed: keep them for good (see `CopyThread._keep_memory_of_failed_device`)
                _kept.append(sources)
        _drop_copied(self._sources)
        release_unused()

    def wait_for_copies(self) -> None:
        """Block until the copies queued so far are complete, so that their host memory may be reused."""
        try:
            self.backend.record(self._side).synchronize()
        except Exception as error:  # noqa: BLE001 - the device is broken; the caller raises the error that reports it
            log.debug("%s failed while its copies were awaited: %s", self.backend.name, error)

    def _copy_leaf(self, leaf: HostTensor, sources: list[torch.Tensor]) -> torch.Tensor:
        # Copy the contiguous memory: torch copies a permuted or converted tensor synchronously, through a temporary.
        import torch

        return restore_layout(self._copy(torch.from_numpy(leaf.memory), sources), leaf)

    def _copy(self, tensor: torch.Tensor, sources: list[torch.Tensor]) -> torch.Tensor:
        sources.append(tensor)
        try:
            copy = self._copy_unless_out_of_memory(tensor)
            if copy is not None:
                return copy
            # Once more: the peak of a training step, or of another process, may have passed when the copies are
            # complete. torch's allocator has returned its unused blocks to the driver before it raised the error, so
            # `empty_cache` would free nothing more; and it must not be called while a CUDA graph is captured.
            self.wait_for_copies()
            self.release()
            return self.backend.copy(tensor)
        except Exception as error:
            raise DeviceCopyError(
                f"copying a tensor of shape {list(tensor.shape)} and dtype {tensor.dtype} to {self.backend.name} "
                f"failed: {format_error(error)}"
            ) from error

    def _copy_unless_out_of_memory(self, tensor: torch.Tensor) -> torch.Tensor | None:
        try:
            return self.backend.copy(tensor)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            log.debug("a copy to %s is tried again: %s", self.backend.name, error)
            return None

    def _transformed(self, batch: Any) -> Any:
        assert self.transform is not None
        try:
            return check_returned("transform=", self.transform(batch))
        except KeyboardInterrupt:  # not an error of transform: for resident data this runs in the consumer's thread
            self.wait_for_copies()
            raise
        except BaseException as error:
            self.wait_for_copies()
            given = ", ".join(f"{leaf.dtype} {list(leaf.shape)}" for leaf in leaves(batch) if is_tensor(leaf))
            raise DeviceCopyError(
                f"transform raised {type(error).__name__} on {self.backend.name}, given {given or 'no tensors'}: "
                f"{error}"
            ) from error


def _drop_copied(sources: _Sources) -> bool:
    while sources and sources[0][0].query():
        sources.popleft()
    return not sources


def copier_for(
    backend: BaseDevice, transform: Transform | None = None, outputs: Sequence[Callable[[Any, Stream], Any]] = ()
) -> Copier:
    """Return the copier of a device, or of a group of devices, which brings its own; ``outputs`` has one per device."""
    copier: Copier = (backend.batch_copier or Copier)(backend, transform, *outputs)
    return copier
