"""Connecting to a server: the handshake, and a trial of its device memory if both processes are on one device."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from aiofeed.ipc.address import SERVER, connect
from aiofeed.ipc.cuda_ipc import shared_device
from aiofeed.ipc.framing import ProtocolError, request, send_message
from aiofeed.ipc.peers import ProcessMonitor, peer_of
from aiofeed.ipc.schema import encode
from aiofeed.kernel.core.errors import FeedError, WorkerDiedError
from aiofeed.serving import messages
from aiofeed.serving.device_memory.device_reader import DeviceReader

if TYPE_CHECKING:
    from aiofeed.kernel.core.faces import BaseDevice

log: logging.Logger = logging.getLogger("aiofeed.processes")

AnswerT = TypeVar("AnswerT", messages.Welcome, messages.Probe)

# A server answers within milliseconds, unless it is stopped.
ANSWER_S = 5.0


class ServerLink(NamedTuple):
    """A connection to a server, with the handshake complete.

    Args:
        process: That of the server.
        address: The server's address.
        batches: The number of batches of an epoch, if it is known.
        device_reader: The server's device memory; ``None`` if only host memory is shared.
    """

    sock: socket.socket
    process: ProcessMonitor
    address: Path
    batches: int | None = None
    device_reader: DeviceReader | None = None

    def close(self) -> None:
        """Close the socket, and no longer monitor the process."""
        self.sock.close()
        self.process.close()


def server_died(address: object, pid: int) -> WorkerDiedError:
    """Return the error for a server that ended without ``Disconnected``."""
    who = f" (pid {pid})" if pid else ""
    return WorkerDiedError(f"the server at {address}{who} has died: start it again, and attach again")


def connect_to_server(address: Path, wait_s: float, backend: BaseDevice | None, *, host_only: bool) -> ServerLink:
    """Connect to the server at an address; blocks.

    Args:
        address: The path of its socket.
        wait_s: How long to wait for a server that is not there yet.
        backend: The device that batches go to; ``None``: they stay on the host.
        host_only: Do without the server's device memory, which could not be opened earlier.

    Raises:
        FeedError: There is no server, it refuses this process, or it does not answer.
    """
    sock = connect(address, SERVER, wait_s)
    link = ServerLink(sock, ProcessMonitor(peer_of(sock).pid), address)
    try:
        welcome = _ask(link, messages.Hello(messages.VERSION), messages.Welcome)
        reader = None if host_only else _open_device_memory(link, welcome.device, backend)
        return link._replace(batches=welcome.batches, device_reader=reader)
    except BaseException:
        link.close()
        raise


def _open_device_memory(link: ServerLink, device: str, backend: BaseDevice | None) -> DeviceReader | None:
    """Return the memory of the server's device if this process can read it; else ``None``, and log the reason."""
    address = link.address
    if not device:
        return None
    if backend is None:
        log.info("batches of the server at %s come through host memory: this process has no device", address)
        return None
    shared, pid = shared_device(backend), link.process.pid
    if not pid:
        reason = (
            "the server's process cannot be seen from here: it is on another host or in a container, or this one is"
        )
    elif shared is None:
        reason = f"memory of {backend.name} cannot be shared between processes"
    elif (identity := shared.identity()) != device:
        reason = f"the server is on device {device}, and this process on {identity}"
    else:
        probe = _ask(link, messages.ProbeRequest(), messages.Probe)
        reason = probe.refusal
        if probe.block is not None:
            reader = DeviceReader(backend, shared, link.process, died=lambda: server_died(address, pid))
            reason = reader.try_probe(probe)
            try:
                send_message(link.sock, encode(messages.ProbeResult(reason)))
            except OSError as error:
                raise FeedError(f"the server at {address} ended while this process connected: {error}") from error
            if not reason:
                return reader
    log.warning("batches of the server at %s come through host memory: %s", address, reason)
    return None


def _ask(link: ServerLink, message: messages.FromConsumer, expected: type[AnswerT]) -> AnswerT:
    address, limit_bytes = link.address, messages.MAX_HANDSHAKE_BYTES
    try:
        payload, _ = request(
            link.sock, encode(message), timeout_s=ANSWER_S, limit_bytes=limit_bytes, limit_descriptors=0
        )
        answer = messages.decode_from_server(payload)
    except TimeoutError:
        raise FeedError(f"the server at {address} did not answer within {ANSWER_S:.0f} s") from None
    except (OSError, ProtocolError) as error:
        raise FeedError(f"the process that listens at {address} did not answer as a server does: {error}") from error
    if isinstance(answer, messages.Disconnected):
        raise FeedError(f"the server at {address} refuses this process: {answer.reason}")
    if not isinstance(answer, expected):
        raise FeedError(f"the server at {address} sent {type(answer).__name__} in answer to {type(message).__name__}")
    return answer
