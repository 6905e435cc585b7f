"""How a process joins a server: greeted, and with the server's device memory tried where both are on one device."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiofeed.core.errors import FeedError
from aiofeed.processes.ipc.peers import peer_of
from aiofeed.processes.ipc.pulse import Pulse, died
from aiofeed.processes.serving.greeting import ask_for_trial, attach, tell
from aiofeed.processes.serving.protocol import Tried, Welcome
from aiofeed.processes.serving.receiver import Taker
from aiofeed.processes.serving.subscription import Attachment
from aiofeed.runtime.buffers import Memory
from aiofeed.runtime.thread_pool import ThreadPool

if TYPE_CHECKING:
    from aiofeed.devices.backend import DeviceBackend
    from aiofeed.processes.serving.device_reader import Blocks

log = logging.getLogger("aiofeed")


def join(
    path: Path,
    wait_s: float,
    backend: DeviceBackend | None,
    *,
    memory: Memory,
    wrap: Callable[[Any], Any],
    executor: ThreadPool,
    begun: Callable[[int, int], object],
    host_only: bool = False,
) -> tuple[Attachment, int]:
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
        pulse = Pulse(server, lambda: died(path, server))
        try:
            blocks = None if host_only else _blocks(sock, path, welcome, backend, pulse)
            taker = Taker(backend, blocks, memory, wrap, executor)
            return Attachment(sock, path, taker=taker, pulse=pulse, begun=begun), welcome.batches
        except BaseException:
            pulse.close()
            raise
    except BaseException:
        sock.close()
        raise


def _blocks(
    sock: socket.socket, path: Path, welcome: Welcome, backend: DeviceBackend | None, pulse: Pulse
) -> Blocks | None:
    """The server's device memory, where it can be read here; else ``None``, and a line in the log that says why."""
    if not welcome.device:
        return None
    if backend is None:
        log.info("batches of the server at %s come through host memory: this process has no device", path)
        return None
    from aiofeed.processes.ipc.shared_device import shared_device
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
            blocks = Blocks(backend, shared, pulse)
            reason = blocks.attempt(trial)
            try:
                tell(sock, Tried(reason))
            except OSError as error:
                raise FeedError(f"the server at {path} ended while this process joined it: {error}") from error
            if not reason:
                return blocks
    log.warning("batches of the server at %s come through host memory: %s", path, reason)
    return None
