"""The main function of a worker process: it reads and decodes the batches that the trainer plans, until it is stopped.

It exits as soon as the trainer is gone: the connection ends; if another process (a fork of the trainer) holds that
open, the parent's process id changes and, on Linux, the kernel kills it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from functools import partial

from msgspec import structs

from aiofeed.ipc.error_codec import describe
from aiofeed.ipc.framing import Connection, ProtocolError, close_all, send_message
from aiofeed.ipc.ring import Slot
from aiofeed.ipc.schema import encode
from aiofeed.kernel.core.errors import FeedError
from aiofeed.kernel.core.formatting import format_error
from aiofeed.kernel.runtime.event_loop import reserve_standard_descriptors
from aiofeed.workers.protocol import FromWorker, WorkerEnded, decode_to_worker
from aiofeed.workers.spawn import WorkerConfig, read_config
from aiofeed.workers.worker import Worker, encode_finished

# Interval of the checks for a trainer whose end the connection does not show.
HEARTBEAT_S = 0.25


def main(connection: int, config: int, parent: int, number: int) -> None:
    """Run as a worker process.

    Args:
        connection, config: Descriptors of the socket to the trainer, and of the file with the configuration.
        parent: The trainer's process id.
        number: Number of this worker, from 0.
    """
    _exit_with(parent)
    reserve_standard_descriptors()
    sock = socket.socket(fileno=connection)
    status = 1
    try:
        worker_config = read_config(config)
        worker = _Worker(worker_config, parent, number)
        worker.loop_thread.launch(import_torch=False)
        worker.loop_thread.start(partial(worker.serve, sock))
        worker.loop_thread.finished.result()
        status = 0
    except BaseException as error:  # noqa: BLE001 - the user's modules and objects may raise anything when they are loaded
        way = '; define it above `if __name__ == "__main__":`' if "__mp_main__" in str(error) else ""
        failure = FeedError(f'a worker process of engine="process" could not start: {format_error(error)}{way}')
        failure.__cause__ = error
        sock.setblocking(True)
        send_message(sock, encode(WorkerEnded(describe(failure))))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # no stream, or a closed one
                stream.flush()
        # Ends threads that cannot leave a decoder, and those of the user's modules.
        os._exit(status)


def _exit_with(parent: int) -> None:
    """Let the kernel kill this process when the trainer ends."""
    if sys.platform == "linux":
        import ctypes

        # PR_SET_PDEATHSIG: sent when the *thread* that started this process ends. That is the thread of the trainer's
        # event loop, which waits for its workers before it ends.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class _Worker(Worker):
    """A worker process, on its event loop."""

    def __init__(self, worker_config: WorkerConfig, parent: int, number: int) -> None:
        super().__init__(worker_config, number)
        self._parent = parent
        self._connection: Connection | None = None
        # Segments that the trainer has mapped.
        self._mapped: set[int] = set()

    async def serve(self, sock: socket.socket) -> None:
        """Open the source and assemble batches, until cancelled."""
        self._connection = Connection(sock, received=self._received, lost=self._lost)
        self._check_parent()
        await self.run()

    def send(self, message: FromWorker, slot: Slot | None = None) -> None:
        """Send a message to the trainer, with the segments of a slot that are new to it."""
        assert self._connection is not None
        descriptors: list[int] = []
        if slot is not None:
            segments, descriptors, retired = slot.introduce(self._mapped)
            message = structs.replace(message, segments=segments, retired=retired)
        payload, fits = encode_finished(message)
        if not fits:
            close_all(descriptors)
            descriptors = []
        self._connection.send(payload, descriptors)

    def _received(self, payload: bytes, descriptors: list[int]) -> None:
        message = decode_to_worker(payload)
        if descriptors:
            raise ProtocolError("a message to a worker has no descriptors")
        self.received(message)

    def _lost(self, error: Exception | None) -> None:
        os._exit(1)  # the trainer is gone; or it sent an invalid message, and sees this process end

    def _check_parent(self) -> None:
        if os.getppid() != self._parent:
            os._exit(1)
        asyncio.get_running_loop().call_later(HEARTBEAT_S, self._check_parent)
