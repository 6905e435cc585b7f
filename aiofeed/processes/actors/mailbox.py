"""Connections between a server and its consumers in a Ray cluster.

Each connection has a mailbox: an actor that the consumer starts on its node. Both ends put messages into it, and take
those of the other. Ray ends it with the consumer's process, so the server's pending call fails. The server has one more
mailbox, the registry, which Ray finds by name: consumers put their mailboxes there. It ends with the server's process.

Arrays of a batch are in the message if they are small. Otherwise they are in Ray's object store, once for all
consumers, and the message has a reference.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np

from aiofeed.processes.actors.cluster import ClusterConnection, one_line
from aiofeed.processes.actors.handle import ObjectRing
from aiofeed.processes.ipc.framing import MAX_MESSAGE_BYTES, ProtocolError
from aiofeed.processes.ipc.peers import ProcessMonitor

log: logging.Logger = logging.getLogger("aiofeed.processes")

SERVER, CONSUMER = "server", "consumer"
# The payload with which the server closes a connection.
_END = b""
# A call that waits for the end of a server returns after this time: an actor runs at most 1000 calls at once, and Ray
# does not end those of a consumer that has died.
_WATCH_S = 60.0
# How long the end of a server is waited for, after a batch of it was lost.
_END_S = 5.0


class Mailbox:
    """An actor with a queue of messages for each of its users.

    Args:
        about: Describes its owner.
    """

    def __init__(self, about: dict[str, str]) -> None:
        self._about = about
        self._queues: defaultdict[str, asyncio.Queue[Any]] = defaultdict(asyncio.Queue)

    async def about(self) -> dict[str, str]:
        """The description of the owner."""
        return self._about

    async def watch(self, seconds: float) -> None:
        """Return after some seconds; the call fails when the owner dies."""
        await asyncio.sleep(seconds)

    async def put(self, to: str, messages: list[Any]) -> None:
        """Queue messages."""
        for message in messages:
            self._queues[to].put_nowait(message)

    async def take(self, to: str) -> list[Any]:
        """Wait for a message and return all that are queued."""
        queue = self._queues[to]
        messages = [await queue.get()]
        while not queue.empty():
            messages.append(queue.get_nowait())
        return messages


class MailboxLink:
    """One end of a connection: a ``Link`` and an ``OpenLink``.

    One call puts all messages that have been queued since the call before, so that they stay in order.

    Args:
        connection: To the cluster.
        mailbox: The actor.
        pid: The process at the other end, for messages.
        registry: That of the server, for the consumer's end; ``None`` for the server's.
    """

    def __init__(self, connection: ClusterConnection, mailbox: Any, *, pid: int = 0, registry: Any = None) -> None:
        self.pid = pid
        self.process: ProcessMonitor = ProcessMonitor(0)
        self._connection = connection
        self._mailbox = mailbox
        self._registry = registry
        self._here, self._there = (SERVER, CONSUMER) if registry is None else (CONSUMER, SERVER)
        self._unsent: list[tuple[bytes, list[Any]]] = []
        self._sender: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    def ask(self, payload: bytes, timeout_s: float, limit_bytes: int) -> bytes:
        """Send a message and wait for the answer."""
        import ray

        self.tell(payload)
        answer = self._call("take", self._here)
        server_end: Future[Any] = self._connection.call(self._registry, "watch", timeout_s).future()
        wait([answer, server_end], timeout_s, FIRST_COMPLETED)
        try:
            if answer.done():
                reply: bytes = answer.result()[0][0]
                return reply
            if server_end.done():
                server_end.result()
        except ray.exceptions.RayError as error:
            raise ConnectionError(one_line(error)) from error
        raise TimeoutError

    def tell(self, payload: bytes) -> None:
        """Send a message."""
        self._call("put", self._there, [(payload, [])])

    def open(
        self,
        received: Callable[[bytes, list[Any]], None],
        lost: Callable[[Exception | None], None],
        limit_bytes: int = MAX_MESSAGE_BYTES,
        limit_memory: int = 1,
    ) -> MailboxLink:
        """Send and receive on the running loop from now on."""
        self._received, self._lost = received, lost
        self._limit_bytes, self._limit_memory = limit_bytes, limit_memory
        jobs = [self._receive()] if self._registry is None else [self._watch(), self._receive()]
        self._tasks = [asyncio.get_running_loop().create_task(job) for job in jobs]
        return self

    def send(self, payload: bytes, memory: Sequence[Any] = ()) -> None:
        """Queue a message."""
        if not self._closed:
            self._unsent.append((payload, list(memory)))
            if self._sender is None:
                self._sender = asyncio.get_running_loop().create_task(self._send_all())

    @property
    def unsent(self) -> int:
        """Messages in the send queue."""
        return len(self._unsent)

    def close(self) -> None:
        """Close the connection, after the messages in the queue. Idempotent."""
        if self._closed:
            return
        if self._here == SERVER:
            self.send(_END)
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._here == CONSUMER:
            self._connection.kill(self._mailbox)

    def _call(self, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = self._connection.call(self._mailbox, method, *arguments).future()
        return future

    async def _send_all(self) -> None:
        try:
            while self._unsent:
                messages, self._unsent = self._unsent, []
                await self._connection.result(self._call("put", self._there, messages))
        except Exception as error:  # noqa: BLE001 - as in `_receive`
            self._fail(error)
        finally:
            self._sender = None

    async def _receive(self) -> None:
        try:
            coming = self._call("take", self._here)
            while True:
                messages = await self._connection.result(coming)
                # One call waits for further messages while the batches of these are on their way.
                coming = self._call("take", self._here)
                fetches = deque((payload, [_fetch(each) for each in memory]) for payload, memory in messages)
                del messages  # it would keep the batches in the object store
                while fetches:
                    payload, memory = fetches.popleft()
                    memory = [ObjectRing(await self._arrays(memory.pop())) for _ in range(len(memory))]
                    self._process(payload, memory)
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds of errors if an actor or its node is lost
            self._fail(error)

    def _process(self, payload: bytes, memory: list[Any]) -> None:
        if payload == _END:
            self._end(None)
        if self._closed:
            return
        try:
            if len(payload) > self._limit_bytes or len(memory) > self._limit_memory:
                raise ProtocolError(f"a message of {len(payload)} bytes with {len(memory)} objects")
            self._received(payload, memory)
        except Exception as error:  # noqa: BLE001 - as in `Connection`
            log.error("refused a message and closed its connection: %s", error)
            self._end(error)

    async def _arrays(self, fetch: Any) -> Any:
        """The arrays of a message; a lost object is an error, unless the server has died."""
        if isinstance(fetch, dict):
            return fetch
        try:
            return await self._connection.result(fetch)
        except ConnectionError:
            raise
        except Exception as error:
            await asyncio.wait(self._tasks[:1], timeout=_END_S)
            raise ConnectionError(f"a batch is lost: {one_line(error)}") from error

    async def _watch(self) -> None:
        """Wait for the end of the server's process."""
        try:
            while True:
                call = self._connection.call(self._registry, "watch", _WATCH_S)
                await self._connection.result(call.future())
        except ConnectionError as error:
            self._end(error)
        except Exception:  # noqa: BLE001 - as in `_receive`
            self._end(None)

    def _fail(self, error: Exception) -> None:
        """The mailbox cannot be reached: its consumer has ended, or the connection to the cluster."""
        error.__traceback__ = None  # its frames refer to the error and to batches: they would wait for the collector
        if self._here == CONSUMER and not isinstance(error, ConnectionError):
            error = ConnectionError(f"its actor on this node has died, or ray.shutdown() was called: {one_line(error)}")
        self._end(None if self._here == SERVER else error)

    def _end(self, error: Exception | None) -> None:
        if not self._closed:
            self.close()
            self._lost(error)


def _fetch(memory: Any) -> Any:
    """Start to move an object to this node, if the memory of a batch is one."""
    if isinstance(memory, dict):
        return {number: np.frombuffer(data, np.uint8) for number, data in memory.items()}
    return memory.future()
