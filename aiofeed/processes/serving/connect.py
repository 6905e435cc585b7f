"""How a process joins a server: greeted, and with the server's device memory tried where both are on one device."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiofeed.core.errors import FeedError
from aiofeed.processes.ipc.address import SERVER, connect
from aiofeed.processes.ipc.framing import ProtocolError, frame
from aiofeed.processes.ipc.peers import ProcessLiveness, died, peer_of
from aiofeed.processes.ipc.schema import encode
from aiofeed.processes.serving.protocol import (
    MAX_GREETING_BYTES,
    VERSION,
    ConsumerRefused,
    FromConsumer,
    FromServer,
    Hello,
    Probe,
    ProbeRequest,
    ProbeResult,
    Welcome,
    decode_from_server,
)
from aiofeed.processes.serving.receiver import BatchReceiver
from aiofeed.processes.serving.subscription import Subscription
from aiofeed.runtime.buffers import BufferPool
from aiofeed.runtime.thread_pool import ThreadPool

if TYPE_CHECKING:
    from aiofeed.devices.backend import DeviceBackend
    from aiofeed.processes.serving.device_reader import Blocks

log = logging.getLogger("aiofeed.processes")


# A server answers within milliseconds, unless it is stopped.
ANSWER_S = 5.0


def join(
    path: Path,
    wait_s: float,
    backend: DeviceBackend | None,
    *,
    memory: BufferPool,
    wrap: Callable[[Any], Any],
    executor: ThreadPool,
    begun: Callable[[int, int], object],
    host_only: bool = False,
) -> tuple[Subscription, int]:
    """An attachment to the server at a path, and how many batches an epoch has.

    Args:
        path: where the server is.
        wait_s: how long to wait for it to come.
        backend: where batches go; ``None``: they stay on the host.
        memory: for batches that are copied out of the ring on the host.
        wrap: turns a batch of ``ArrayLeaf`` into what is handed over.
        executor: copies large batches.
        begun: called with (epoch, batches) when an epoch begins.
        host_only: the server's device memory was tried, and could not be opened later.

    Raises:
        FeedError: there is none, it refuses, or it does not answer.
    """
    sock, welcome = attach(path, wait_s)
    try:
        server = peer_of(sock).pid
        liveness = ProcessLiveness(server, lambda: died(path, server))
        try:
            blocks = None if host_only else _blocks(sock, path, welcome, backend, liveness)
            taker = BatchReceiver(backend, blocks, memory, wrap, executor)
            return Subscription(sock, path, taker=taker, liveness=liveness, begun=begun), welcome.batches
        except BaseException:
            liveness.close()
            raise
    except BaseException:
        sock.close()
        raise


def _blocks(
    sock: socket.socket, path: Path, welcome: Welcome, backend: DeviceBackend | None, liveness: ProcessLiveness
) -> Blocks | None:
    """The server's device memory, where it can be read here; else ``None``, and a line in the log that says why."""
    if not welcome.device:
        return None
    if backend is None:
        log.info("batches of the server at %s come through host memory: this process has no device", path)
        return None
    from aiofeed.processes.ipc.cuda_ipc import shared_device
    from aiofeed.processes.serving.device_reader import Blocks

    shared = shared_device(backend)
    if not peer_of(sock).pid:
        reason = "the server's process cannot be seen from here: one of the two is in a container"
    elif shared is None:
        reason = f"memory of {backend.name} stays its process's own"
    elif (here := shared.identity()) != welcome.device:
        reason = f"the server is on device {welcome.device}, and this process on {here}"
    else:
        trial = ask_for_trial(sock, path)
        reason = trial.refusal
        if trial.block is not None:
            blocks = Blocks(backend, shared, liveness)
            reason = blocks.attempt(trial)
            try:
                tell(sock, ProbeResult(reason))
            except OSError as error:
                raise FeedError(f"the server at {path} ended while this process joined it: {error}") from error
            if not reason:
                return blocks
    log.warning("batches of the server at %s come through host memory: %s", path, reason)
    return None


def attach(path: Path, wait_s: float) -> tuple[socket.socket, Welcome]:
    """A connection that has been greeted, and what the server said.

    Args:
        path: where the server is.
        wait_s: how long to wait for one to come.

    Raises:
        FeedError: there is none, it refuses, or it does not answer.
    """
    sock = connect(path, SERVER, wait_s)
    try:
        return sock, _greet(sock, path)
    except BaseException:
        sock.close()
        raise


def _greet(sock: socket.socket, path: Path) -> Welcome:
    answer = _ask(sock, path, Hello(VERSION))
    if not isinstance(answer, Welcome) or answer.version != VERSION:
        raise FeedError(f"the server at {path} speaks another version: install the same version of aiofeed for both")
    return answer


def ask_for_trial(sock: socket.socket, path: Path) -> Probe:
    """Device memory of the server's, to try.

    Raises:
        FeedError: it does not answer.
    """
    answer = _ask(sock, path, ProbeRequest())
    if not isinstance(answer, Probe):
        raise FeedError(f"the server at {path} did not answer as a server does")
    return answer


def tell(sock: socket.socket, message: FromConsumer) -> None:
    """Say something that has no answer."""
    sock.sendall(frame(encode(message)))


def _ask(sock: socket.socket, path: Path, message: FromConsumer) -> FromServer:
    sock.settimeout(ANSWER_S)
    try:
        tell(sock, message)
        nbytes, descriptors = struct.unpack("<II", _exactly(sock, 8))
        if nbytes > MAX_GREETING_BYTES or descriptors:
            raise ProtocolError("no greeting")
        answer = decode_from_server(_exactly(sock, nbytes))
    except TimeoutError:
        raise FeedError(f"the server at {path} did not answer within {ANSWER_S:.0f} s") from None
    except (OSError, ProtocolError) as error:
        raise FeedError(f"what listens at {path} did not greet as a server does: {error}") from error
    if isinstance(answer, ConsumerRefused):
        raise FeedError(f"the server at {path} refuses this process: {answer.reason}")
    return answer


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        if not part:
            raise ConnectionError("it closed the connection")
        data += part
    return data
