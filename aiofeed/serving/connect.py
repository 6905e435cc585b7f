"""Connecting to a server: the handshake, and a trial of its device memory if both processes are on one device."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from aiofeed.ipc.address import SERVER, connect
from aiofeed.ipc.cuda_ipc import shared_device
from aiofeed.ipc.framing import ProtocolError, request, send_message
from aiofeed.ipc.peers import ProcessMonitor, peer_of
from aiofeed.ipc.schema import encode
from aiofeed.kernel.core.errors import FeedError
from aiofeed.kernel.runtime.buffers import BufferPool
from aiofeed.kernel.runtime.thread_pool import ThreadPool
from aiofeed.serving import messages
from aiofeed.serving.device_memory.device_reader import DeviceReader
from aiofeed.serving.receiver import BatchReceiver
from aiofeed.serving.subscription import Subscription, server_died

if TYPE_CHECKING:
    from aiofeed.kernel.devices.backend import DeviceBackend

log: logging.Logger = logging.getLogger("aiofeed.processes")

AnswerT = TypeVar("AnswerT", messages.Welcome, messages.Probe)

# A server answers within milliseconds, unless it is stopped.
ANSWER_S = 5.0


def subscribe(
    address: Path,
    wait_s: float,
    backend: DeviceBackend | None,
    *,
    memory: BufferPool,
    wrap: Callable[[Any], Any],
    executor: ThreadPool,
    on_epoch: Callable[[int, int | None], object],
    host_only: bool = False,
) -> tuple[Subscription, int | None]:
    """Connect to the server at an address; blocks. Returns the subscription and the number of batches of an epoch.

    Args:
        wait_s: How long to wait for a server that is not there yet.
        backend: The device that batches go to; ``None``: they stay on the host.
        memory: Memory for batches that are copied out of the ring on the host.
        wrap: Turns a batch of ``HostTensor`` into the batch that is delivered.
        executor: Copies large batches.
        on_epoch: Called with (epoch, batches) when an epoch starts.
        host_only: Do without the server's device memory, which could not be opened earlier.

    Raises:
        FeedError: There is no server, it refuses this process, or it does not answer.
    """
    sock = connect(address, SERVER, wait_s)
    process = ProcessMonitor(peer_of(sock).pid)
    try:
        welcome = _ask(sock, address, messages.Hello(messages.VERSION), messages.Welcome)
        reader = None if host_only else _open_device_memory(sock, process, address, welcome.device, backend)
        receiver = BatchReceiver(backend, reader, memory, wrap, executor)
        return Subscription(sock, process, address, receiver=receiver, on_epoch=on_epoch), welcome.batches
    except BaseException:
        sock.close()
        process.close()
        raise


def _open_device_memory(
    sock: socket.socket, process: ProcessMonitor, address: Path, device: str, backend: DeviceBackend | None
) -> DeviceReader | None:
    """Return the memory of the server's device if this process can read it; else ``None``, and log the reason."""
    if not device:
        return None
    if backend is None:
        log.info("batches of the server at %s come through host memory: this process has no device", address)
        return None
    shared = shared_device(backend)
    pid = process.pid
    if not pid:
        reason = (
            "the server's process cannot be seen from here: it is on another host or in a container, or this one is"
        )
    elif shared is None:
        reason = f"memory of {backend.name} cannot be shared between processes"
    elif (identity := shared.identity()) != device:
        reason = f"the server is on device {device}, and this process on {identity}"
    else:
        probe = _ask(sock, address, messages.ProbeRequest(), messages.Probe)
        reason = probe.refusal
        if probe.block is not None:
            reader = DeviceReader(backend, shared, process, died=lambda: server_died(address, pid))
            reason = reader.try_probe(probe)
            try:
                send_message(sock, encode(messages.ProbeResult(reason)))
            except OSError as error:
                raise FeedError(f"the server at {address} ended while this process connected: {error}") from error
            if not reason:
                return reader
    log.warning("batches of the server at %s come through host memory: %s", address, reason)
    return None


def _ask(sock: socket.socket, address: Path, message: messages.FromConsumer, expected: type[AnswerT]) -> AnswerT:
    try:
        payload, _ = request(
            sock, encode(message), timeout_s=ANSWER_S, limit_bytes=messages.MAX_HANDSHAKE_BYTES, limit_descriptors=0
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
