"""Processes that attach to a server: what they run, and how tests start and kill them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any

import aiofeed
from tests.support import process_parts as parts
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

CONTEXT = multiprocessing.get_context("forkserver")


def forking() -> Iterator[None]:
    """Run a fork server that has imported torch, from which consumers are forked, until the tests end."""
    modules = (
        "feeder.attach",
        "feeder.attached_passes",
        "processes.serving.connect",
        "processes.serving.device_reader",
    )
    CONTEXT.set_forkserver_preload(
        ["torch", "uvloop", *(f"aiofeed.{module}" for module in modules), "tests.support.serve_parts"]
    )
    forkserver.ensure_running()
    started = CONTEXT.Process(target=nothing)  # waits until the fork server has imported torch
    started.start()
    started.join()
    yield
    forkserver._forkserver._stop()


def nothing() -> None:
    """The target of a process that only shows that one can be started."""


def epochs(address: str, pipe: Connection, count: int, close_early: int = 0) -> None:
    """Send the batches of each of some epochs; an error as type and text."""
    try:
        with aiofeed.attach(address) as feed:
            for _ in range(count):
                seen = []
                for batch in feed:
                    seen.append(batch.flatten().tolist())
                    if close_early and len(seen) == close_early:
                        break
                pipe.send((feed.epoch, seen))
        pipe.send("done")
    except Exception as error:
        pipe.send((type(error).__name__, str(error)))


def wait_for(path: str) -> None:
    """Wait until a file exists."""
    while not os.path.exists(path):
        time.sleep(0.002)


def flat(batch: Any) -> list[Any]:
    """Return the numbers of a batch."""
    return batch.flatten().tolist()  # type: ignore[no-any-return]


def endlessly(
    address: str, pipe: Connection, step_s: float, begin: str = "", device: Any = None, read: Any = flat
) -> None:
    """Send each batch until killed or until the server is gone; take the first when the file `begin` exists."""
    try:
        with aiofeed.attach(address, device=device) as feed:
            while True:
                iterator = iter(feed)
                if begin:
                    wait_for(begin)
                for batch in iterator:
                    pipe.send(read(batch))
                    time.sleep(step_s)
    except Exception as error:
        pipe.send((type(error).__name__, str(error)))


def stops(address: str, pipe: Connection) -> None:
    """Stop (SIGSTOP) after the first batch; when continued, send the error with which the epoch ends."""
    with aiofeed.attach(address) as feed:
        iterator = iter(feed)  # kept: a dropped iterator leaves its epoch
        next(iterator)
        pipe.send("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            for _ in iterator:
                pass
        except Exception as error:
            pipe.send((type(error).__name__, str(error)))


def serves(address: str, pipe: Connection) -> None:
    """Serve endlessly."""
    feeder = aiofeed.Feeder(parts.Numbers(10**7), decode=parts.slow_number, batch_size=4)
    with aiofeed.serve(feeder, address):
        pipe.send("serving")
        time.sleep(60.0)


class Started:
    """A process, and the pipe from it. Close it by ``with``."""

    def __init__(self, target: Any, address: str, *arguments: Any) -> None:
        self.pipe, theirs = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=target, args=(address, theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def receive(self, limit_s: float = 20.0) -> Any:
        assert self.pipe.poll(limit_s), "the process sent nothing"
        return self.pipe.recv()

    def kill(self) -> None:
        # The fork server may have reaped it already.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            # It may have ended, and been reaped by the fork server.
            with contextlib.suppress(ProcessLookupError):
                self.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


def kill_consumers(
    count: int, seed: int, address: str, feeder: Any, endlessly: Any, *arguments: Any, **options: Any
) -> list[Any]:
    """Serve, kill consumers within half a second of their start, and return what another consumer has received.

    Args:
        count: How many to kill.
        seed: Of the random moments.
        address: Of the server.
        feeder: Is served.
        endlessly: What the consumers run, with ``arguments`` and the duration of a step.
        options: Of ``aiofeed.serve``.
    """
    moments = random.Random(seed)
    with (
        aiofeed.serve(feeder, address, join="batch", **options) as server,
        Started(endlessly, address, *arguments, 0.001) as witness,
    ):
        seen = [witness.receive()]
        for _ in range(count):
            with Started(endlessly, address, *arguments, 0.0005) as victim:
                deadline = time.monotonic() + moments.random() ** 2 * 0.5
                while time.monotonic() < deadline:
                    while witness.pipe.poll():
                        seen.append(witness.receive())
                    time.sleep(0.005)
                victim.kill()
        seen += [witness.receive() for _ in range(20)]  # the slots of the killed consumers were freed
        until(lambda: [each.pid for each in server.consumers] == [witness.pid])
    return seen
