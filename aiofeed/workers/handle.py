"""One worker process, as the trainer's loop sees it: its start, its connection, its ring and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiofeed.ipc.framing import Connection, ProtocolError
from aiofeed.ipc.peers import describe_exit
from aiofeed.ipc.ring import Ring
from aiofeed.ipc.schema import encode
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.workers import protocol

if TYPE_CHECKING:
    from aiofeed.kernel.core.faces import BaseDevice


class Handle(ABC):
    """A worker, as the trainer's loop sees it.

    Args:
        number: Number of the worker, from 0.
        lane: The worker, in the timeline.
        name: The worker, for an error message.
        ring: The memory of the batch that it has finished last.

    Attributes:
        ready: Whether its source is open.
        assigned: The batches that it assembles, by serial.
        decoding: How many of them it may decode.
    """

    def __init__(self, number: int, lane: str, name: str, ring: Ring) -> None:
        self.number = number
        self.lane: str = lane
        self.name: str = name
        self.ring: Ring = ring
        self.ready: bool = False
        self.assigned: dict[int, AssignedBatch] = {}
        self.decoding: int = 0

    @abstractmethod
    def send(self, message: protocol.ToWorker) -> None:
        """Send a message; does nothing if the worker has ended."""

    @abstractmethod
    def release_slot(self, serial: int, ring: Ring, reusable: bool = True) -> None:
        """Give the memory of a batch back to the worker; see ``ReleaseSlot``."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once."""


@dataclass(eq=False)
class AssignedBatch:
    """A batch that a worker assembles, or several, of which the first to finish it counts.

    Args:
        reply: Set when the batch is finished.
        was_read: Called when a worker reports that all samples have been read.
        may_decode, permitted_at: Whether it may be decoded, and since when on the clock of ``monotonic``.
        losses: How many workers have died that had it.
        copies: The workers, each with the serial that identifies the batch in its messages.
        finished_by: The worker that has finished it.
        serial: Its serial there.
        ring: The memory in which it lies.
    """

    plan: BatchPlan
    reply: asyncio.Future[protocol.BatchFinished]
    was_read: Callable[[], None]
    may_decode: bool
    permitted_at: float
    losses: int = 0
    copies: list[tuple[Handle, int]] = field(default_factory=list)
    finished_by: Handle | None = None
    serial: int = -1
    ring: Ring | None = None


class WorkerHandle(Handle):
    """One worker process. Created on the running loop.

    Args:
        number, count: Number of the worker, from 0, of how many.
        config: Descriptor of the worker's configuration; inherited, not closed.
        backend: The device that copies from its ring; ``None`` for none.
        received: Called with each message; may raise ``ProtocolError``.
        lost: Called once when the connection has ended; see ``Connection``.

    Attributes:
        exit_status: Negative for a signal; ``None`` while it runs, or if the status could not be obtained.
    """

    def __init__(
        self,
        number: int,
        count: int,
        config: int,
        backend: BaseDevice | None,
        *,
        received: Callable[[WorkerHandle, protocol.FromWorker], None],
        lost: Callable[[WorkerHandle, Exception | None], None],
    ) -> None:
        self.exit_status: int | None = None
        self._ended = False
        self._on_message = received
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            # Ctrl-C in a terminal interrupts all its processes; the trainer decides what happens then. The worker
            # inherits this mask: there Ctrl-C waits until the worker ignores it, also while the interpreter starts.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                self._process = subprocess.Popen(
                    _command(theirs.fileno(), config, number),
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), config),
                    # The worker's parallelism is its decode threads, with which those of NumPy and torch would compete.
                    env={"OMP_NUM_THREADS": "1", **os.environ},
                )
            except BaseException:
                ours.close()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.pid: int = self._process.pid
        name = f'worker process {number + 1} of {count} (engine="process", pid {self.pid})'
        super().__init__(number, f"worker {number + 1}", name, Ring(backend))
        self._connection = Connection(ours, received=self._received, lost=lambda error: lost(self, error))

    def send(self, message: protocol.ToWorker) -> None:
        """Send a message; does nothing if the worker has ended."""
        self._connection.send(encode(message))

    def release_slot(self, serial: int, ring: Ring, reusable: bool = True) -> None:
        """Give the slot of a batch back to the worker; see ``ReleaseSlot``."""
        self.send(protocol.ReleaseSlot(serial, reusable))

    def ended(self) -> bool:
        """Return whether the process has ended; sets ``exit_status``."""
        if not self._ended:
            # Popen.poll() would report status 0 if the status cannot be obtained.
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._ended = True
            else:
                if pid:
                    self._ended, self.exit_status = True, os.waitstatus_to_exitcode(status)
            if self._ended:
                self._process.returncode = self.exit_status or 0  # Popen need not wait for it
        return self._ended

    def kill(self) -> None:
        """Kill the process."""
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the connection and unmap the ring."""
        self._connection.close()
        self.ring.close()

    def _received(self, payload: bytes, descriptors: list[int]) -> None:
        message = protocol.decode_from_worker(payload)
        if isinstance(message, protocol.BatchFinished):
            self.ring.map_segments(message.segments, descriptors, message.retired)
        elif descriptors:
            raise ProtocolError(f"{type(message).__name__} with descriptors")
        self._on_message(self, message)

    def describe_end(self) -> str:
        """Return how the process ended, for an error message."""
        if not self._ended:
            return f"{self.name} closed its connection"
        return f"{self.name} {describe_exit(self.exit_status, ' (see Limits(memory_bytes=))')}"


def _command(connection: int, config: int, number: int) -> list[str]:
    from multiprocessing import spawn

    # Like multiprocessing: the same interpreter, with the same flags and the same sys.path.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    path = [entry for entry in sys.path if isinstance(entry, str)]
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT]); "
        f"import sys; sys.path[:] = {path!r}; from aiofeed.workers.main import main; "
        f"main({connection}, {config}, {os.getpid()}, {number})"
    )
    return [os.fsdecode(spawn.get_executable()), *flags, "-c", program]
