"""``serve``: one feeder for several training processes. The protocol is in ``hub.py``."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aiofeed.ipc.address import SERVER, Listener, check_free, resolve
from aiofeed.ipc.cuda_ipc import SharedDevice, shared_device
from aiofeed.kernel.core.errors import as_exception
from aiofeed.kernel.core.faces import BaseDevice
from aiofeed.kernel.core.types import public
from aiofeed.kernel.core.validation import check_positive_int, explain_arguments
from aiofeed.kernel.feeder.feeder import Feeder
from aiofeed.kernel.runtime import threads
from aiofeed.kernel.runtime.event_loop import EventLoopThread
from aiofeed.serving.device_memory.device_ring import DeviceRing
from aiofeed.serving.hub import Hub, Mode, ServeOptions, Slow, When

log: logging.Logger = logging.getLogger("aiofeed.feeder")

# An upper limit that is never reached.
_ENDLESS = 1 << 30


@dataclass(frozen=True)
class ServedConsumer:
    """A process that is attached to a server.

    Args:
        pid: Its process id, on its node.
        fed: Whether it takes part in the current epoch; otherwise it waits for the next one.
        batches: Number of batches sent to it so far.
    """

    pid: int
    fed: bool
    batches: int


@public
@explain_arguments()
def serve(
    feeder: Feeder[Any],
    address: str | os.PathLike[str],
    *,
    mode: Mode = "broadcast",
    min_consumers: int = 1,
    lag: int = 4,
    slow: Slow = "wait",
    join: When = "epoch",
) -> Server:
    """Feed several training processes of this host from one feeder; each sample is decoded once.

    Example:
        ```python
        import aiofeed

        photos = aiofeed.ImageFolder("photos")
        decode = aiofeed.DecodeImage(size=224)
        feeder = aiofeed.Feeder(photos, decode=decode, batch_size=4, shuffle=True)
        with aiofeed.serve(feeder, "photos"):
            for images, labels in aiofeed.attach("photos"):  # in each process that trains
                print(images.shape)
        ```

    Training processes call ``aiofeed.attach(address)`` and iterate the result. The server starts with ``with``,
    ``start`` or ``run``:

        with aiofeed.serve(feeder, "imagenet"): ...             # in threads of this process, until the block ends
        aiofeed.serve(feeder, "imagenet").run(epochs=90)        # in the calling thread, until all epochs are fed

    Args:
        feeder: A feeder of host batches; each consumer then chooses its own device and transform. Or a feeder with a
            CUDA device; consumers on the same GPU then read the transformed batches from device memory, others get
            them through host memory.
        address: A name, for a socket in this user's private folder, or the path of a Unix socket. Processes of other
            users are refused.
        mode: "broadcast": each consumer gets every batch. "shard": each batch goes to one consumer, in turns.
        min_consumers: Number of consumers that the first epoch waits for.
        lag: Number of batches in shared memory, that is, how far one consumer may be behind another. On a GPU they
            use memory for one batch more.
        slow: What happens if a consumer is ``lag`` batches behind. "wait": the others wait for it. "drop": it is
            disconnected with an error when another consumer has no batch left to read.
        join: A consumer that connects in mid-epoch takes part from the next "epoch" or the next "batch".

    A consumer takes part from its first ``iter()`` until it leaves an epoch early, closes or ends.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range, or the feeder cannot be served.
    """
    if not isinstance(feeder, Feeder):
        raise TypeError(f"serve takes a Feeder, got {feeder!r}")
    backend = feeder._config.backend
    if backend is None and feeder._config.transform is not None:
        raise ValueError(
            "a feeder with transform= and without device= cannot be served: pass transform= to each attach() instead"
        )
    if backend is not None:
        _shared(backend)
    for name, value, allowed in (
        ("mode", mode, ("broadcast", "shard")),
        ("slow", slow, ("wait", "drop")),
        ("join", join, ("epoch", "batch")),
    ):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
    options = ServeOptions(
        mode, check_positive_int("lag", lag), slow, join, check_positive_int("min_consumers", min_consumers)
    )
    return Server(feeder, resolve(address, SERVER), options)


class Server:
    """The result of ``serve``. After ``close`` it can be started again."""

    def __init__(self, feeder: Feeder[Any], address: Path, options: ServeOptions) -> None:
        self._feeder = feeder
        self._address = address
        self._options = options
        self._loop_thread: EventLoopThread | None = None
        self._hub: Hub | None = None
        self._errors: list[Exception] = []

    @property
    def address(self) -> str:
        """The path of the socket."""
        return str(self._address)

    @property
    def consumers(self) -> tuple[ServedConsumer, ...]:
        """The processes that are attached now."""
        if self._hub is None:
            return ()
        return tuple(ServedConsumer(each.pid, each.fed, each.batches) for each in self._hub.consumers)

    def start(self, epochs: int | None = None) -> Server:
        """Serve in threads of this process, up to epoch ``epochs`` or until ``close``; return the server itself.

        An error of the feeder is raised in the consumers and ends the epoch.

        Raises:
            FeedError: Another server uses the address, or it cannot be opened.
            RuntimeError: The server is running already.
        """
        self._start(epochs, go_on=True)
        return self

    def run(self, epochs: int | None = None) -> None:
        """Serve in the calling thread until ``epochs`` epochs are fed, or without a number until Ctrl-C; then close.

        Epochs count as in ``Feeder.epochs``: a resumed feeder does not feed completed epochs again.

        Raises:
            FeedError: Another server uses the address, or it cannot be opened.
            Exception: The error of the feeder, which is raised in the consumers, too.
            RuntimeError: The server is running already.
        """
        self._start(epochs, go_on=False)
        loop_thread, errors = self._loop_thread, self._errors
        assert loop_thread is not None
        try:
            while not loop_thread.finished.done():
                # A signal that arrives just before the main thread blocks does not wake it, so poll.
                with contextlib.suppress(FutureTimeout):
                    loop_thread.finished.result(threads.POLL_INTERVAL_S)
        finally:
            self.close()
        if errors:
            raise errors[0]

    def _start(self, epochs: int | None, *, go_on: bool) -> None:
        if self._loop_thread is not None and not self._loop_thread.stopping:
            raise RuntimeError(f"the server at {self._address} is running already")
        number = _ENDLESS if epochs is None else check_positive_int("epochs", epochs)
        with contextlib.suppress(TypeError):  # a stream has no len()
            if not len(self._feeder):
                raise ValueError("the feeder has no batches to serve")
        self.close()
        check_free(self._address, SERVER)
        # Before the socket exists: the first use of a GPU takes seconds, and a connecting consumer would time out.
        backend = self._feeder._config.backend
        ring = None if backend is None else DeviceRing(*_shared(backend), self._options.lag + 1)
        listener = Listener(self._address, SERVER)
        loop_thread = EventLoopThread(read_threads=1, decode_threads=1)
        try:
            hub = Hub(self._feeder, listener, self._options, loop_thread.decode_pool, ring)
            self._hub = hub
            errors: list[Exception] = []
            self._errors = errors
            loop_thread.at_exit(listener.close)
            loop_thread.at_death(errors.append)
            loop_thread.watch(self)
            self._loop_thread = loop_thread
            loop_thread.launch()
            loop_thread.start(partial(_serve, hub, number, go_on, errors, loop_thread.stop))
        except BaseException:
            loop_thread.stop()
            listener.close()
            raise

    def close(self) -> None:
        """Disconnect the consumers, remove the socket and wait up to 5 s for the threads. Idempotent.

        Consumers still get the batches that were sent to them, then an error. The feeder stays open.
        """
        loop_thread, self._loop_thread = self._loop_thread, None
        if loop_thread is None or loop_thread.inherited:
            return
        loop_thread.stop()
        if not loop_thread.join(threads.JOIN_S):
            log.warning(
                "the server at %s did not end within %.0f s of close() and is left behind",
                self._address,
                threads.JOIN_S,
            )
        self._hub = None

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Server({self._feeder!r}, {str(self._address)!r}, mode={self._options.mode!r})"


def _shared(backend: BaseDevice) -> tuple[BaseDevice, SharedDevice]:
    """Return the device of a served feeder, and its interface for sharing memory with other processes."""
    several = backend.splits
    shared = None if several else shared_device(backend)
    if shared is None:
        reason = "there are several devices" if several else "its memory cannot be shared"
        raise ValueError(
            f"a feeder with device={backend.name!r} cannot be served, because {reason}: leave device= out, and pass "
            f"device= to each attach()"
        )
    return backend, shared


async def _serve(hub: Hub, epochs: int, go_on: bool, errors: list[Exception], stop: Callable[[], None]) -> None:
    try:
        await hub.run(epochs, go_on=go_on)
    except Exception as error:
        errors.append(as_exception(error))
        if go_on:
            log.exception("the server has ended with an error")
    finally:
        stop()
