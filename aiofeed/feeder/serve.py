"""One feeder for several training processes of a host: its end. The mechanism is in ``share``."""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiofeed.core.errors import WorkerDiedError, as_exception
from aiofeed.core.types import public
from aiofeed.core.validation import check_positive_int
from aiofeed.feeder.feeder import Feeder
from aiofeed.runtime import threads
from aiofeed.runtime.event_loop import EventLoopThread
from aiofeed.runtime.threads import JOIN_S

if TYPE_CHECKING:
    from aiofeed.devices.backend import DeviceBackend
    from aiofeed.devices.resolve import DeviceGroup
    from aiofeed.processes.ipc.cuda_ipc import SharedDevice
    from aiofeed.processes.serving.device_ring import DeviceRing
    from aiofeed.processes.serving.hub import Hub, Mode, ServeOptions, Slow, When

log = logging.getLogger("aiofeed.feeder")

# More epochs than anybody feeds.
_ENDLESS = 1 << 30


@dataclass(frozen=True)
class ServedConsumer:
    """A process that is attached to a server.

    Args:
        pid: its number.
        fed: whether it is fed in this epoch, or waits for the next.
        batches: how many it was sent so far.
    """

    pid: int
    fed: bool
    batches: int


@public
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
    """Feed several training processes of this host from one feeder: everything is read and decoded once.

    Training processes ``aiofeed.attach(address)`` and iterate what they get. Nothing is served before the server is
    entered (``with``), started or run:

        with aiofeed.serve(feeder, "imagenet"): ...             # in threads of this process, until the block is left
        aiofeed.serve(feeder, "imagenet").run(epochs=90)        # here, until it is done

    Args:
        feeder: of batches on the host, where each consumer chooses its device and transform for itself; or with a CUDA
            device, where those who attach with the same GPU read batches in its memory, transformed already, and the
            others get them through the host's.
        address: a name, for a socket in this user's private folder, or the path of a Unix socket. Processes of other
            users are refused.
        mode: "broadcast": each consumer gets every batch. "shard": each batch goes to one consumer, in turns.
        min_consumers: so many want to be fed before the first epoch begins.
        lag: batches in shared memory, which is how far one consumer may fall behind another. On a GPU they take the
            memory of one more.
        slow: "wait": a consumer that is so far behind holds up the others. "drop": it is let go, with an error on its
            side, when another one has nothing left to read.
        join: a consumer that comes in mid-epoch is fed from the next "epoch" on, or from the next "batch".

    A consumer takes part from its first ``iter()`` on, until it leaves an epoch early, closes or ends.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or out of range; a feeder that cannot be served.
    """
    if not isinstance(feeder, Feeder):
        raise TypeError(f"serve takes a Feeder, got {feeder!r}")
    backend = feeder._config.backend
    if backend is None and feeder._config.transform is not None:
        raise ValueError(
            "a feeder with transform= and no device= cannot be served: leave it out, and give it to each attach()"
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
    from aiofeed.processes.ipc.address import SERVER, resolve
    from aiofeed.processes.serving.hub import ServeOptions

    terms = ServeOptions(
        mode, check_positive_int("lag", lag), slow, join, check_positive_int("min_consumers", min_consumers)
    )
    return Server(feeder, resolve(address, SERVER), terms)


class Server:
    """What ``serve`` returns. It can be entered, started or run once it is closed, again."""

    def __init__(self, feeder: Feeder[Any], path: Path, terms: ServeOptions) -> None:
        self._feeder = feeder
        self._path = path
        self._terms = terms
        self._loop_thread: EventLoopThread | None = None
        self._hub: Hub | None = None
        self._done: Future[None] = Future()

    @property
    def address(self) -> str:
        """The path of its socket."""
        return str(self._path)

    @property
    def consumers(self) -> tuple[ServedConsumer, ...]:
        """Those who are attached now."""
        if self._hub is None:
            return ()
        return tuple(ServedConsumer(each.pid, each.fed, each.batches) for each in self._hub.consumers)

    def start(self, epochs: int | None = None) -> Server:
        """Serve in threads of this process, up to epoch ``epochs`` or until ``close``; returns itself.

        A failure of the feeder is raised at the consumers' ``for`` lines, and ends that epoch.

        Raises:
            FeedError: another server has the address, or it cannot be had.
            RuntimeError: it serves already.
        """
        self._start(epochs, go_on=True)
        return self

    def run(self, epochs: int | None = None) -> None:
        """Serve, and return when ``epochs`` are fed; without a number, until Ctrl-C. Then close.

        Epochs count as in ``Feeder.epochs``: those that a resumed feeder has behind it are not fed again.

        Raises:
            FeedError: another server has the address, or it cannot be had.
            Exception: what the feeder raised; the consumers have got it, too.
            RuntimeError: it serves already.
        """
        self._start(epochs, go_on=False)
        done = self._done
        try:
            while True:
                try:
                    # A signal that arrives just before the main thread blocks does not wake it.
                    done.result(threads.POLL_INTERVAL_S)
                    return
                except FutureTimeout:
                    if done.done():
                        raise
        finally:
            self.close()

    def _start(self, epochs: int | None, *, go_on: bool) -> None:
        if self._loop_thread is not None and not self._loop_thread.stopping and not self._done.done():
            raise RuntimeError(f"it serves already, at {self._path}")
        number = _ENDLESS if epochs is None else check_positive_int("epochs", epochs)
        if not len(self._feeder):
            raise ValueError("the feeder has no batches to serve")
        self.close()
        from aiofeed.processes.ipc.address import SERVER, Listener, check_free
        from aiofeed.processes.serving.hub import Hub

        check_free(self._path, SERVER)
        # Before anybody can connect, who would not wait for long: a process's first use of a GPU takes seconds.
        ring = self._ring()
        listener = Listener(self._path, SERVER)
        loop_thread = EventLoopThread(read_threads=1, decode_threads=1)
        try:
            hub = Hub(self._feeder, listener, self._terms, loop_thread.decode_pool, ring)
            self._hub = hub
            done: Future[None] = Future()
            self._done = done
            loop_thread.at_exit(listener.close)
            loop_thread.at_exit(partial(_finish, done, None))
            loop_thread.at_death(partial(_finish, done))
            loop_thread.watch(self)
            self._loop_thread = loop_thread
            loop_thread.launch()
            loop_thread.start(partial(_serve, hub, number, go_on, done, loop_thread.stop))
        except BaseException:
            loop_thread.stop()
            listener.close()
            raise

    def _ring(self) -> DeviceRing | None:
        backend = self._feeder._config.backend
        if backend is None:
            return None
        from aiofeed.processes.serving.device_ring import DeviceRing

        return DeviceRing(*_shared(backend), self._terms.lag + 1)

    def close(self) -> None:
        """Let the consumers go, take the socket away and wait for the threads, 5 s at most. Idempotent.

        Consumers still get what they were sent, then an error that says so. The feeder stays open.
        """
        loop_thread, self._loop_thread = self._loop_thread, None
        if loop_thread is None or loop_thread.inherited:
            return
        loop_thread.stop()
        if not loop_thread.join(JOIN_S):
            log.warning("the server at %s did not end within %.0f s of close() and is left behind", self._path, JOIN_S)
            threads.unregister(loop_thread)
        self._hub = None

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Server({self._feeder!r}, {str(self._path)!r}, mode={self._terms.mode!r})"


def _shared(backend: DeviceBackend | DeviceGroup) -> tuple[DeviceBackend, SharedDevice]:
    """The device of a served feeder, and what other processes can use of it."""
    from aiofeed.devices.resolve import DeviceGroup
    from aiofeed.processes.ipc.cuda_ipc import shared_device

    shared = None if isinstance(backend, DeviceGroup) else shared_device(backend)
    if isinstance(backend, DeviceGroup) or shared is None:
        what = "several devices" if isinstance(backend, DeviceGroup) else "memory of its process's own"
        raise ValueError(
            f"a feeder with device={backend.name!r} cannot be served, because that is {what}: leave device= out, and "
            f"give each attach() its device="
        )
    return backend, shared


async def _serve(hub: Hub, epochs: int, go_on: bool, done: Future[None], stop: Any) -> None:
    try:
        await hub.run(epochs, go_on=go_on)
        _finish(done, None)
    except Exception as error:
        _finish(done, as_exception(error))
        if go_on:
            log.exception("the server has ended")
    finally:
        stop()


def _finish(done: Future[None], error: Exception | WorkerDiedError | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
