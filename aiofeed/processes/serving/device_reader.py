"""A consumer's end of a ring in device memory: the server's blocks, opened, and batches copied out of them.

Nothing of the server's memory is handed out. Once a block's ``filled`` is complete, the side stream copies to memory of
this process's own and records ``read``; that the copies are right is known once they are complete and the server, which
may have died in the middle of filling, is seen to live.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiofeed.core.errors import DeviceCopyError, FeedError
from aiofeed.core.pytree import map_leaves
from aiofeed.devices.copier import Copier, PendingCopy
from aiofeed.processes.ipc.batch_codec import decode_batch
from aiofeed.processes.ipc.cuda_ipc import HandleError
from aiofeed.processes.ipc.framing import ProtocolError
from aiofeed.processes.ipc.peers import ProcessLiveness
from aiofeed.processes.ipc.schema import Leaf, Node
from aiofeed.processes.serving.device_ring import Place
from aiofeed.processes.serving.protocol import MAX_REASON_LETTERS, BatchAvailable, DeviceBlockHandle, Probe

if TYPE_CHECKING:
    from aiofeed.devices.backend import DeviceBackend, Event
    from aiofeed.processes.ipc.cuda_ipc import SharedDevice, SharedEvent
    from aiofeed.runtime.buffers import BufferLease

log = logging.getLogger("aiofeed.processes")

# The first use of a GPU by a process takes seconds.
TRIAL_S = 10.0
# The last copies, when the server ends or this process leaves it.
LAST_COPIES_S = 1.5

# Memory that is left open until the interpreter ends: copies from it had not come to an end when it was let go.
_abandoned: list[object] = []


class _Opened:
    """A block of the server's, open here."""

    def __init__(self, shared: SharedDevice, block: DeviceBlockHandle) -> None:
        self.number = block.number
        self.memory = shared.open(block.handle)
        self.filled: SharedEvent = shared.open_event(block.filled)
        self.read: SharedEvent = shared.open_event(block.read)
        self.copied: Event | None = None
        """After what was last copied from it; an event of this process's own, which the server's end does not touch."""


class Blocks:
    """The device memory of one server. Used on the attachment's loop, but for what ``InSlot`` does.

    Args:
        backend: the consumer's device.
        shared: what of it other processes share.
        liveness: of the server.
    """

    def __init__(self, backend: DeviceBackend, shared: SharedDevice, liveness: ProcessLiveness) -> None:
        self.backend = backend
        self.shared = shared
        self.liveness = liveness
        self.side = backend.side_stream()
        self._opened: dict[int, _Opened] = {}
        self._forgotten: list[_Opened] = []

    def attempt(self, trial: Probe) -> str:
        """Read the server's trial block in the calling thread; why it cannot be, or ""."""
        assert trial.block is not None
        try:
            with self.backend.use_stream(self.side):
                opened = _Opened(self.shared, trial.block)
                try:
                    self.liveness.wait(opened.filled, TRIAL_S)
                    copy = self.shared.clone(opened.memory)
                    opened.read.record(self.side)
                    self.liveness.wait(self.backend.record(self.side), TRIAL_S)
                    seen = bytes(self.shared.to_host(copy).tolist())
                except BaseException as error:
                    _leave_open([opened], error)
                    raise
                del opened
        except (HandleError, RuntimeError, TimeoutError, FeedError) as error:
            return (str(error) or type(error).__name__).splitlines()[0][:MAX_REASON_LETTERS]
        return "" if seen == trial.content else "it holds something else than the server wrote"

    def copier(self, transform: Callable[[Any], Any] | None) -> Copier:
        """What copies batches to the consumer's device, out of these blocks, too."""
        return BlockCopier(self.backend, transform, self.liveness)

    def learn(self, given: BatchAvailable) -> None:
        """Open what is new, and forget what is not used any more.

        Raises:
            HandleError: memory cannot be opened, though the trial's could.
            WireError: a number that is known already.
        """
        if (block := given.new_block) is not None:
            if block.number in self._opened:
                raise ProtocolError(f"block {block.number} is known already")
            with self.backend.use_stream(self.side):
                self._opened[block.number] = _Opened(self.shared, block)
        for number in given.retired_blocks:
            if (gone := self._opened.pop(number, None)) is not None:
                self._forgotten.append(gone)

    def slot(self, given: BatchAvailable) -> InSlot:
        """The device memory of a batch.

        Raises:
            WireError: it does not lie in any.
        """
        opened = self._opened.get(given.block)
        if opened is None:
            raise ProtocolError(f"a batch in block {given.block}, which nobody spoke of")
        return InSlot(self, opened)

    def collect(self) -> None:
        """Let go of forgotten memory whose last copy is complete."""
        if self._forgotten:
            # Closing waits for the current stream, which is not to be the training's.
            with self.backend.use_stream(self.side):
                self._forgotten = [each for each in self._forgotten if not _complete(each)]

    def settle(self, slots: Sequence[InSlot]) -> None:
        """The server ends, or lets this process go: copy what it gave to memory of this process's own.

        Raises:
            WorkerDiedError, TimeoutError: that did not come to an end.
        """
        for slot in slots:
            slot.keep(LAST_COPIES_S)
        self.liveness.wait(self.backend.record(self.side), LAST_COPIES_S)
        self.liveness.settle()

    def close(self) -> None:
        """Let go of all memory; what is still copied from is left open."""
        opened = [*self._opened.values(), *self._forgotten]
        self._opened.clear()
        self._forgotten.clear()
        if not opened:
            return
        try:
            self.liveness.wait(self.backend.record(self.side), LAST_COPIES_S)
        except (FeedError, TimeoutError) as error:
            _leave_open([each for each in opened if not _complete(each)], error)
        except RuntimeError as error:
            log.debug("the device is beyond use, and the server's memory is left open: %s", error)
            _leave_open(opened, error)
        with self.backend.use_stream(self.side):
            opened.clear()


def _complete(opened: _Opened) -> bool:
    try:
        return opened.copied is None or opened.copied.query()
    except RuntimeError:
        return False  # the device is beyond use


def _leave_open(opened: Sequence[_Opened], error: BaseException) -> None:
    """Do not close these, because of an error: of a device that failed, never.

    Closing waits for the device; where that fails torch aborts the process, and nobody reads why.
    """
    _abandoned.extend(opened)
    if isinstance(error, RuntimeError):
        for each in opened:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


class InSlot:
    """A batch in the server's device memory, until the server is told that it was read."""

    def __init__(self, blocks: Blocks, opened: _Opened) -> None:
        self._blocks = blocks
        self._opened: _Opened | None = opened
        self._memory = opened.memory
        # The attachment's loop copies it when the server ends, a copy thread when its turn comes.
        self._lock = threading.Lock()

    def tree(self, node: Node, take: Callable[[Leaf], Any]) -> Any:
        """The batch, with places in device memory as leaves; ``take`` gives the others.

        Raises:
            WireError: a place is none of this slot's.
        """
        return decode_batch(node, lambda leaf: self._place(leaf) if leaf.kind == "device" else take(leaf))

    def _place(self, leaf: Leaf) -> Place:
        return Place(leaf, self._memory.nbytes)

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until it is filled; for threads of aiofeed's own.

        Raises:
            WorkerDiedError: the server has died.
            TimeoutError: it took longer than ``limit_s``.
        """
        if (opened := self._opened) is not None:
            self._blocks.liveness.wait(opened.filled, limit_s)

    def copied(self, tree: Any) -> Any:
        """Queue copies of the batch's tensors on the side stream, which is current, once it is filled."""
        blocks = self._blocks
        with self._lock:
            opened, memory = self._opened, self._memory
            made = map_leaves(
                lambda leaf: blocks.shared.clone(leaf.view(memory)) if type(leaf) is Place else leaf, tree
            )
            if opened is not None:
                opened.read.record(blocks.side)
                opened.copied = blocks.backend.record(blocks.side)
            return made

    def keep(self, limit_s: float) -> None:
        """Queue a copy of the whole slot to memory of this process's own, from which the batch is copied then.

        Raises:
            WorkerDiedError, TimeoutError: it is not filled within ``limit_s``.
        """
        blocks = self._blocks
        self.wait(limit_s)
        with self._lock, blocks.backend.use_stream(blocks.side):
            opened = self._opened
            if opened is not None:
                self._memory = blocks.shared.clone(self._memory)
                opened.read.record(blocks.side)
                opened.copied = blocks.backend.record(blocks.side)
                self._opened = None


class Taken:
    """A batch in device memory on its way to one iterator.

    Args:
        slot: where it lies.
        tree: its structure.
        lease: given back once its copies are queued.
    """

    __slots__ = ("lease", "slot", "tree")

    def __init__(self, slot: InSlot, tree: Any, lease: BufferLease) -> None:
        self.slot = slot
        self.tree = tree
        self.lease = lease


class BlockCopier(Copier):
    """A copier that takes batches from the server's device memory, too."""

    def __init__(
        self, backend: DeviceBackend, transform: Callable[[Any], Any] | None, liveness: ProcessLiveness
    ) -> None:
        super().__init__(backend, transform)
        self._liveness = liveness

    def issue(self, batch: Any) -> PendingCopy:
        """Queue the copies of a batch; one from the server's device memory is complete, and right, on return.

        Raises:
            WorkerDiedError: the server has died, and what its memory holds is not known.
            DeviceCopyError: a copy failed, or ``transform`` raised.
        """
        if type(batch) is not Taken:
            return super().issue(batch)
        batch.slot.wait()
        with self.backend.use_stream(self._side):
            try:
                own = batch.slot.copied(batch.tree)
            except RuntimeError as error:
                self._liveness.check()
                raise DeviceCopyError(f"a batch could not be copied on {self.backend.name}: {error}") from error
            in_flight = super().issue(own)
        batch.lease.give_back()
        self._liveness.wait(in_flight.copied)
        return in_flight
