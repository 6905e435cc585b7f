"""A consumer's end of a ring in device memory: it opens the server's blocks and copies batches out of them.

The server keeps its memory. When a block's event ``filled`` is complete, the side stream copies the batch to
memory of this process and records ``read``. If the server dies, the device may drop its queued work, or complete events
whose work was never done. So a copy is valid only if it has completed and the server is alive after that.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiofeed.ipc.batch_codec import TensorInBlock, decode_batch
from aiofeed.ipc.cuda_ipc import HandleError
from aiofeed.ipc.framing import ProtocolError
from aiofeed.ipc.peers import ProcessMonitor
from aiofeed.ipc.schema import ArrayNode, Node
from aiofeed.kernel.core.errors import DeviceCopyError, FeedError
from aiofeed.kernel.core.pytree import map_leaves
from aiofeed.kernel.devices.backend import poll
from aiofeed.kernel.devices.copier import Copier, PendingCopy
from aiofeed.serving.device_memory.device_ring import is_complete
from aiofeed.serving.messages import MAX_REASON_LETTERS, BatchAvailable, DeviceBlockHandle, Probe

if TYPE_CHECKING:
    import torch

    from aiofeed.ipc.cuda_ipc import SharedDevice, SharedEvent
    from aiofeed.kernel.core.faces import BaseDevice, Event, Stream
    from aiofeed.kernel.runtime.buffers import BufferLease

log: logging.Logger = logging.getLogger("aiofeed.processes")

# The first use of a GPU by a process takes seconds.
PROBE_S = 10.0
# Time for the last copies when the server closes or this process disconnects.
LAST_COPIES_S = 1.5

# Blocks that stay open until the interpreter exits, because copies from them had not completed.
_left_open: list[object] = []


class _OpenBlock:
    """A block of the server, opened in this process."""

    def __init__(self, shared: SharedDevice, block: DeviceBlockHandle) -> None:
        self.memory: torch.Tensor = shared.open(block.handle)
        self.filled: SharedEvent = shared.open_event(block.filled)
        self.read: SharedEvent = shared.open_event(block.read)
        self.copied: Event | None = None
        """After the last copy from it; an event of this process, which the server's end does not affect."""

    def is_copied(self) -> bool:
        """Return whether the last copy from it has completed."""
        return self.copied is None or is_complete(self.copied)


class DeviceReader:
    """The device memory of one server. On the subscription's loop, except the methods of ``DeviceBatch``.

    Args:
        shared: The backend's memory and events for other processes.
        died: Makes the error to raise if the server has died.
    """

    def __init__(
        self, backend: BaseDevice, shared: SharedDevice, server: ProcessMonitor, died: Callable[[], FeedError]
    ) -> None:
        self.backend = backend
        self.shared = shared
        self.side: Stream = backend.side_stream()
        self._server = server
        self._died = died
        # Whether all copies are known to be valid, and none will follow, so that the server may end.
        self._finished = False
        self._open: dict[int, _OpenBlock] = {}
        self._retired: list[_OpenBlock] = []

    def check_server(self) -> None:
        """Raise if the server has died."""
        if not self._finished and not self._server.alive():
            raise self._died()

    def wait(self, event: Event | SharedEvent, limit_s: float | None = None) -> None:
        """Wait until an event is complete and its work is valid. Blocks; for aiofeed's own threads.

        The event of a server that has died may never complete, so this polls instead of waiting for it.

        Raises:
            WorkerDiedError: The server has died.
            TimeoutError: The event was not complete within ``limit_s``.
        """
        began = time.monotonic()

        def ready() -> bool:
            try:
                complete = event.query()
            except RuntimeError:
                self.check_server()  # if the server has died, that is the reason
                raise
            self.check_server()
            if not complete and limit_s is not None and time.monotonic() - began > limit_s:
                raise TimeoutError(f"a copy from the server's device memory took longer than {limit_s:g} s")
            return complete

        poll(ready)

    def try_probe(self, probe: Probe) -> str:
        """Read the server's probe in the calling thread; returns why that failed, or ""."""
        assert probe.block is not None
        try:
            with self.backend.use_stream(self.side):
                block = _OpenBlock(self.shared, probe.block)
                try:
                    self.wait(block.filled, PROBE_S)
                    copy = self.shared.clone(block.memory)
                    block.read.record(self.side)
                    self.wait(self.backend.record(self.side), PROBE_S)
                    content = bytes(self.shared.to_host(copy).tolist())
                except BaseException as error:
                    _leave_open([block], error)
                    raise
                del block
        except (HandleError, RuntimeError, TimeoutError, FeedError) as error:
            return (str(error) or type(error).__name__).splitlines()[0][:MAX_REASON_LETTERS]
        return "" if content == probe.content else "its content is not what the server has written"

    def open_blocks(self, message: BatchAvailable) -> None:
        """Open the block that a message introduces, and retire those that it retires.

        Raises:
            HandleError: A block cannot be opened, although the probe could.
            ProtocolError: A block with that number is open.
        """
        if (block := message.new_block) is not None:
            if block.number in self._open:
                raise ProtocolError(f"block {block.number} is already open")
            with self.backend.use_stream(self.side):
                self._open[block.number] = _OpenBlock(self.shared, block)
        for number in message.retired_blocks:
            if (retired := self._open.pop(number, None)) is not None:
                self._retired.append(retired)

    def batch(self, message: BatchAvailable) -> DeviceBatch:
        """Return the batch of a message; ``ProtocolError`` if its block is not open."""
        block = self._open.get(message.block)
        if block is None:
            raise ProtocolError(f"a batch in the unknown block {message.block}")
        return DeviceBatch(self, block)

    def collect(self) -> None:
        """Close retired blocks whose last copy has completed."""
        if self._retired:
            # Closing waits for the current stream, which must not be a training's.
            with self.backend.use_stream(self.side):
                self._retired = [block for block in self._retired if not block.is_copied()]

    def save(self, batches: Sequence[DeviceBatch]) -> None:
        """Copy batches to memory of this process, because the server closes the connection.

        Raises:
            WorkerDiedError, TimeoutError: The copies did not complete.
        """
        for batch in batches:
            batch.save(LAST_COPIES_S)
        self.wait(self.backend.record(self.side), LAST_COPIES_S)
        self._finished = True

    def close(self) -> None:
        """Close all blocks; those that copies still read from stay open."""
        blocks = [*self._open.values(), *self._retired]
        self._open.clear()
        self._retired.clear()
        if not blocks:
            return
        try:
            self.wait(self.backend.record(self.side), LAST_COPIES_S)
        except (FeedError, TimeoutError) as error:
            _leave_open([block for block in blocks if not block.is_copied()], error)
        except RuntimeError as error:
            log.debug("the device has failed, and the server's memory stays open: %s", error)
            _leave_open(blocks, error)
        with self.backend.use_stream(self.side):
            blocks.clear()


def _leave_open(blocks: Sequence[_OpenBlock], error: BaseException) -> None:
    """Keep blocks open because of an error; after a failure of the device, for ever.

    Closing a block waits for the device; if the device has failed, torch aborts the process there, before the error is
    printed.
    """
    _left_open.extend(blocks)
    if isinstance(error, RuntimeError):
        for block in blocks:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(block))


class DeviceBatch:
    """A batch in the server's device memory, until ``Read`` is sent for it."""

    def __init__(self, reader: DeviceReader, block: _OpenBlock) -> None:
        self._reader = reader
        self._block: _OpenBlock | None = block
        self._memory = block.memory
        # `save` runs on the subscription's loop, `copies` in a copy thread.
        self._lock = threading.Lock()

    def tree(self, node: Node, make_array: Callable[[ArrayNode], Any]) -> Any:
        """Return the batch with a ``TensorInBlock`` for each device tensor; ``make_array`` gives the other arrays.

        Raises:
            ProtocolError: A tensor does not lie in the block.
        """
        nbytes = self._memory.nbytes
        return decode_batch(
            node, lambda array: TensorInBlock(array, nbytes) if array.kind == "device" else make_array(array)
        )

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until the server has written the block. Blocks; for aiofeed's own threads.

        Raises:
            WorkerDiedError: The server has died.
            TimeoutError: That took longer than ``limit_s``.
        """
        if (block := self._block) is not None:
            self._reader.wait(block.filled, limit_s)

    def copies(self, tree: Any) -> Any:
        """Queue copies of the batch's tensors on the side stream, which is current; after ``wait``."""
        reader = self._reader
        with self._lock:
            memory = self._memory
            made = map_leaves(
                lambda leaf: reader.shared.clone(leaf.view(memory)) if type(leaf) is TensorInBlock else leaf, tree
            )
            self._record_copy()
            return made

    def save(self, limit_s: float) -> None:
        """Queue a copy of the whole block to memory of this process, from which the batch is copied later.

        Raises:
            WorkerDiedError, TimeoutError: The server has not written it within ``limit_s``.
        """
        self.wait(limit_s)
        with self._lock, self._reader.backend.use_stream(self._reader.side):
            if self._block is not None:
                self._memory = self._reader.shared.clone(self._memory)
                self._record_copy()
                self._block = None

    def _record_copy(self) -> None:
        if self._block is not None:
            self._block.read.record(self._reader.side)
            self._block.copied = self._reader.backend.record(self._reader.side)


class UncopiedBatch:
    """A batch in device memory in the queue of one iterator.

    Its lease is given back when its copies are queued.
    """

    __slots__ = ("batch", "lease", "tree")

    def __init__(self, batch: DeviceBatch, tree: Any, lease: BufferLease) -> None:
        self.batch: DeviceBatch = batch
        self.tree: Any = tree
        self.lease: BufferLease = lease


class BlockCopier(Copier):
    """A copier that also copies batches from the server's device memory."""

    def __init__(self, reader: DeviceReader, transform: Callable[[Any], Any] | None) -> None:
        super().__init__(reader.backend, transform)
        self._reader = reader

    def issue(self, batch: Any) -> PendingCopy:
        """Queue the copies of a batch; one from the server's device memory is complete and valid on return.

        Raises:
            WorkerDiedError: The server has died, so the content of its memory is unknown.
            DeviceCopyError: A copy failed, or ``transform`` raised.
        """
        if type(batch) is not UncopiedBatch:
            return super().issue(batch)
        batch.batch.wait()
        with self.backend.use_stream(self._side):
            try:
                own = batch.batch.copies(batch.tree)
            except RuntimeError as error:
                self._reader.check_server()
                raise DeviceCopyError(f"a batch could not be copied on {self.backend.name}: {error}") from error
            pending = super().issue(own)
        batch.lease.give_back()
        self._reader.wait(pending.copied)
        return pending
