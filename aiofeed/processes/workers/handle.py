"""One engine process as the trainer's loop sees it: started, told, heard, and what became of it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from aiofeed.core.types import BatchPlan
from aiofeed.processes.ipc.framing import Connection
from aiofeed.processes.ipc.ring import Ring
from aiofeed.processes.ipc.schema import (
    BatchFailed,
    BatchReady,
    FromEngine,
    ReleaseSlot,
    StartDecoding,
    ToEngine,
    decode_from_engine,
    encode,
)

if TYPE_CHECKING:
    from aiofeed.devices.backend import DeviceBackend
    from aiofeed.processes.ipc.passing import Passable

Replies = BatchReady | BatchFailed


@dataclass(eq=False)
class Work:
    """A batch that a process assembles: ``reply`` comes when it is done, ``was_read`` is called before that."""

    process: WorkerHandle
    serial: int
    reply: asyncio.Future[Replies]
    was_read: Callable[[], None]
    plan: BatchPlan

    def open(self) -> None:
        """It may be decoded."""
        self.process.send(StartDecoding(self.serial))


class Owner(Protocol):
    """Who hears of what a process says, and of its end."""

    @property
    def count(self) -> int:
        """How many processes there are."""
        ...

    def heard(self, process: WorkerHandle, message: FromEngine) -> None:
        """A process has said something; ``WireError`` where it makes no sense."""
        ...

    def lost(self, process: WorkerHandle, error: Exception | None) -> None:
        """A process's connection has ended."""
        ...


class WorkerHandle:
    """One process, its connection and its ring. Made on the running loop.

    Args:
        number: which one, from 0.
        start: descriptor of its cargo; inherited, not closed.
        owner: hears of what it says and of its end.
        backend: the device that copies from its ring.
        passable: is told of its ring.
    """

    def __init__(
        self, number: int, start: int, owner: Owner, backend: DeviceBackend | None, passable: Passable | None = None
    ) -> None:
        self.number = number
        self.ring = Ring(backend, passable)
        self.ready = False
        # Batches that it may decode and has not finished.
        self.decoding = 0
        self.at_work: dict[int, Work] = {}
        self._owner = owner
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    _command(theirs.fileno(), start, number),
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), start),
                    # The threads that decode are the parallelism there: numpy's and torch's own would fight them.
                    env={"OMP_NUM_THREADS": "1", **os.environ},
                )
            except BaseException:
                ours.close()
                raise
        self._wire = Connection(ours, received=self._received, lost=self._lost)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Tell it something; nothing happens once it is gone."""
        self._wire.send(encode(message))

    def free(self, serial: int, again: bool = True) -> None:
        """A slot of its ring has been read; see ``ReleaseSlot``."""
        self.send(ReleaseSlot(serial, again))

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; ``None`` while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def close(self) -> None:
        """Close the connection and let go of the ring."""
        self._wire.close()
        self.ring.close()

    def _received(self, payload: bytes, descriptors: list[int]) -> None:
        message = decode_from_engine(payload)
        self.ring.learn(message.segments if isinstance(message, BatchReady) else [], descriptors)
        if isinstance(message, BatchReady):
            self.ring.forget(message.retired)
        self._owner.heard(self, message)

    def _lost(self, error: Exception | None) -> None:
        self._owner.lost(self, error)

    def describe(self, status: int | None) -> str:
        """What became of it, in words."""
        who = f'the process of engine="process" (number {self.number + 1} of {self._owner.count}, pid {self.pid})'
        if status is None:
            return f"{who} closed its connection"
        if status >= 0:
            return f"{who} ended with exit status {status}"
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        hint = ""
        if -status == signal.SIGKILL:
            hint = (
                "; where nobody killed it, the machine or its container was out of memory (see Limits(memory_bytes=))"
            )
        elif -status in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT):
            hint = "; native code of the source, the decoder or collate_fn crashed"
        return f"{who} was killed by {name} (exit status {status}){hint}"


def _command(connection: int, start: int, number: int) -> list[str]:
    from multiprocessing import spawn

    # As multiprocessing starts its own: the same interpreter, with the same flags and the same path.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    path = [entry for entry in sys.path if isinstance(entry, str)]
    program = (
        f"import sys; sys.path[:] = {path!r}; from aiofeed.processes.workers.main import main; "
        f"main({connection}, {start}, {os.getpid()}, {number})"
    )
    return [os.fsdecode(spawn.get_executable()), *flags, "-c", program]
