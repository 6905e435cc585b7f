"""Those who are attached to a server: how they come in, what they say, and how they go. On the server's loop.

Whoever connects has ``HANDSHAKE_S`` to say hello in the right version. What is no message of theirs closes the
connection, with a log line; nobody else hears of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from typing import Protocol

from aiofeed.processes.ipc.address import Listener
from aiofeed.processes.ipc.framing import Connection, ProtocolError
from aiofeed.processes.ipc.peers import Peer, ProcessWatch, exiting, is_alive, peer_of
from aiofeed.processes.ipc.schema import encode
from aiofeed.processes.serving.protocol import (
    MAX_REASON_LETTERS,
    MAX_WORD_BYTES,
    VERSION,
    ConsumerRefused,
    FromServer,
    Hello,
    Join,
    Leave,
    Probe,
    ProbeRequest,
    ProbeResult,
    Read,
    Welcome,
    decode_from_consumer,
)

log = logging.getLogger("aiofeed.processes")

HANDSHAKE_S = 5.0
MOST_CONNECTIONS = 256
# Where the system has no descriptors left, the next look at who wants to come in.
_PAUSE_S = 0.5
# A consumer that does not read what it is told is let go before that fills the memory.
_MOST_UNSENT = 4096


class Host(Protocol):
    """Who hears of what consumers say."""

    def joined(self, consumer: Consumer) -> None:
        """A consumer wants to be fed."""
        ...

    def left(self, consumer: Consumer) -> None:
        """It wants no more."""
        ...

    def device(self) -> str:
        """What the device of the batches is called; "" for host memory."""
        ...

    def trial(self, consumer: Consumer) -> Probe:
        """It is on that device: memory there to try, or why there is none."""
        ...

    def gone(self, consumer: Consumer, *, reading: bool) -> None:
        """It is gone, with all that it had; one that was let go may still be ``reading`` that."""
        ...

    def read(self, consumer: Consumer, serial: int) -> None:
        """It has read a slot."""
        ...


class Consumer:
    """One connection. Made on the running loop.

    Args:
        sock: connected.
        peer: who it is.
        reception: where it came in.
        host: hears of what it says.

    Attributes:
        ticket: of its ``Join``; ``None`` where it does not want to be fed.
        joined: the ticket under which it is fed.
        known: numbers of the segments that it has mapped.
        batches: how many it was sent.
        on_device: whether it reads batches in the server's device memory.
    """

    def __init__(self, sock: socket.socket, peer: Peer, reception: ConsumerRegistry, host: Host) -> None:
        self.pid = peer.pid
        self.greeted = self.on_device = False
        self._trial: Probe | None = None
        self.ticket: int | None = None
        self.joined = -1
        self.known: set[int] = set()
        self.batches = 0
        self._reception = reception
        self._host = host
        self._wire = Connection(
            sock, received=self._received, lost=self._lost, limit_bytes=MAX_WORD_BYTES, limit_descriptors=0
        )
        self._watch = ProcessWatch(peer.pid, self.close)
        self._patience = asyncio.get_running_loop().call_later(HANDSHAKE_S, self._impatient)

    def send(self, message: FromServer, descriptors: Sequence[int] = ()) -> None:
        """Tell it something; nothing happens once it is gone."""
        self._wire.send(encode(message), descriptors)
        if self._wire.unsent > _MOST_UNSENT:
            log.warning("consumer %d does not read what it is told, and is let go", self.pid)
            self.close(reading=True)

    def dismiss(self, reason: str) -> None:
        """Tell it why, and let it go."""
        self.send(ConsumerRefused(reason))
        self.close(reading=True)

    def close(self, *, reading: bool = False) -> None:
        """Close the connection; what it had is free, unless it lives and may still be ``reading`` it."""
        self._patience.cancel()
        self._watch.close()
        self._wire.close()
        self._reception.gone(self)
        self.ticket = None
        self._host.gone(self, reading=reading)

    @property
    def lives(self) -> bool:
        """Whether its process does; a killed one that has not ended yet is exiting."""
        return is_alive(self.pid) and not exiting(self.pid)

    def _impatient(self) -> None:
        log.warning("process %d connected and said nothing for %.0f s: it is let go", self.pid, HANDSHAKE_S)
        self.close()

    def _lost(self, error: Exception | None) -> None:
        # One that lives may still hand out what it was given, whatever made it close.
        self.close(reading=error is not None or self.lives)

    def _received(self, payload: bytes, descriptors: list[int]) -> None:
        message = decode_from_consumer(payload)
        if descriptors:
            raise ProtocolError("descriptors where none belong")
        if not self.greeted:
            self._greet(message)
        elif isinstance(message, Join):
            if self.ticket is not None:
                raise ProtocolError("a Join before a Leave")
            self.ticket = message.ticket
            self._host.joined(self)
        elif isinstance(message, Leave):
            # Of a ticket that has failed meanwhile it says nothing new.
            if self.ticket == message.ticket:
                self.ticket = None
                self._host.left(self)
        elif isinstance(message, Read):
            self._host.read(self, message.serial)
        elif isinstance(message, ProbeRequest):
            self._try()
        elif isinstance(message, ProbeResult):
            self._tried(message.reason)
        else:
            raise ProtocolError("a second Hello")

    def _greet(self, message: object) -> None:
        if not isinstance(message, Hello):
            raise ProtocolError(f"{type(message).__name__} before Hello")
        if message.version != VERSION:
            log.warning("process %d speaks version %d, this server %d", self.pid, message.version, VERSION)
            self.dismiss(
                f"it speaks version {VERSION}, and this process version {message.version}: "
                f"install the same version of aiofeed for both"
            )
            return
        self._patience.cancel()
        self.greeted = True
        self.send(Welcome(VERSION, self._reception.batches, self._host.device()))

    def _try(self) -> None:
        if self._trial is not None or self.joined >= 0 or self.ticket is not None:
            raise ProtocolError("a Try where there is nothing to try, or not any more")
        self._trial = trial = self._host.trial(self)
        self.send(trial)

    def _tried(self, reason: str) -> None:
        if self._trial is None or self._trial.block is None or self.on_device:
            raise ProtocolError("a Tried where there was nothing to try")
        self._trial = Probe(None)
        self.on_device = not reason
        if reason:
            log.warning(
                "consumer %d is fed through host memory: the server's device memory is not to be had there (%s)",
                self.pid,
                reason[:MAX_REASON_LETTERS],
            )


class ConsumerRegistry:
    """The listening socket, and everybody who came in by it. Made anywhere, used on a loop.

    Args:
        listener: the socket; closed with the reception.
        host: hears of what consumers say.
        batches: what ``Welcome`` tells.
    """

    def __init__(self, listener: Listener, host: Host, *, batches: int) -> None:
        self.batches = batches
        self._listener = listener
        self._host = host
        self._all: list[Consumer] = []
        self._retry: asyncio.TimerHandle | None = None

    @property
    def consumers(self) -> list[Consumer]:
        """Those who have said hello, in the order in which they came."""
        return [consumer for consumer in self._all if consumer.greeted]

    def open(self) -> None:
        """Let people in."""
        asyncio.get_running_loop().add_reader(self._listener.sock.fileno(), self._accept)

    def close_door(self) -> None:
        """Let nobody else in, and let go of those who have not said hello."""
        if (descriptor := self._listener.sock.fileno()) >= 0:
            asyncio.get_running_loop().remove_reader(descriptor)
        if self._retry is not None:
            self._retry.cancel()
        self._listener.close()
        for consumer in [each for each in self._all if not each.greeted]:
            consumer.close()

    def close(self) -> None:
        """Let everybody go; those who live, and have not gone by themselves, may still read what they have."""
        self.close_door()
        for consumer in list(self._all):
            consumer.close(reading=consumer.lives)

    def gone(self, consumer: Consumer) -> None:
        """Somebody is not there any more."""
        if consumer in self._all:
            self._all.remove(consumer)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock, _ = self._listener.sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:
            log.error("nobody can be let in for the moment: %s", error)
            loop.remove_reader(self._listener.sock.fileno())
            self._retry = loop.call_later(_PAUSE_S, self.open)
            return
        try:
            peer = peer_of(sock)
        except OSError:
            sock.close()
            return
        if peer.uid != os.getuid() or len(self._all) >= MOST_CONNECTIONS:
            log.warning("process %d of user %d is refused", peer.pid, peer.uid)
            sock.close()
            return
        self._all.append(Consumer(sock, peer, self, self._host))
