"""Processes that attach to a server: what they do, how they are started, and how they are killed."""

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

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")


def forking() -> Iterator[None]:
    """Have a process from which consumers fork, with torch imported; it ends with the tests."""
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
    started = CONTEXT.Process(target=nothing)  # its import of torch is waited for here
    started.start()
    started.join()
    yield
    forkserver._forkserver._stop()


def nothing() -> None:
    """For a process that shows that one can be started."""


def epochs(address: str, told: Connection, count: int, close_early: int = 0) -> None:
    """Tell what each of some epochs gave; an error by type and text."""
    try:
        with aiofeed.attach(address) as feed:
            for _ in range(count):
                seen = []
                for batch in feed:
                    seen.append(batch.flatten().tolist())
                    if close_early and len(seen) == close_early:
                        break
                told.send((feed.epoch, seen))
        told.send("done")
    except Exception as error:
        told.send((type(error).__name__, str(error)))


def wait_for(path: str) -> None:
    """Until a file is there."""
    while not os.path.exists(path):
        time.sleep(0.002)


def for_ever(address: str, told: Connection, step_s: float, begin: str = "") -> None:
    """Tell of each batch until killed, or until the server is gone; the first is taken once `begin`, a file, exists."""
    try:
        with aiofeed.attach(address) as feed:
            while True:
                iterator = iter(feed)
                if begin:
                    wait_for(begin)
                for batch in iterator:
                    told.send(batch.flatten().tolist())
                    time.sleep(step_s)
    except Exception as error:
        told.send((type(error).__name__, str(error)))


def stops(address: str, told: Connection) -> None:
    """Stop with the first batch; tell, once that is over, how the epoch ends."""
    with aiofeed.attach(address) as feed:
        iterator = iter(feed)  # one that is dropped would leave its epoch
        next(iterator)
        told.send("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            for _ in iterator:
                pass
        except Exception as error:
            told.send((type(error).__name__, str(error)))


def serves(address: str, told: Connection) -> None:
    """Serve for ever."""
    feeder = aiofeed.Feeder(parts.Numbers(10**7), decode=parts.slow_number, batch_size=4)
    with aiofeed.serve(feeder, address):
        told.send("serving")
        time.sleep(60.0)


class Started:
    """A process, and what it tells. Close it by ``with``."""

    def __init__(self, target: Any, address: str, *arguments: Any) -> None:
        self.told, theirs = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=target, args=(address, theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def hear(self, limit_s: float = 20.0) -> Any:
        assert self.told.poll(limit_s), "it says nothing"
        return self.told.recv()

    def kill(self) -> None:
        # The fork server may have reaped it already, and not told yet.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            # Where it has ended meanwhile, whoever forked it has waited for it.
            with contextlib.suppress(ProcessLookupError):
                self.kill()
        self.process.join()
        self.process.close()
        self.told.close()


def kill_consumers_at_random_moments(count: int, seed: int, folder: Path) -> None:
    """Kill consumers at random moments while one goes on, which must see every batch in its order.

    Args:
        count: how many are killed.
        seed: of the moments.
        folder: for the socket.
    """
    moments = random.Random(seed)
    address = str(folder / "killed.sock")
    feeder = aiofeed.Feeder(parts.Numbers(4000), decode=parts.number, batch_size=4)
    with feeder, aiofeed.serve(feeder, address, join="batch") as server, Started(for_ever, address, 0.001) as witness:
        seen = [witness.hear()]
        for _ in range(count):
            with Started(for_ever, address, 0.0005) as victim:
                deadline = time.monotonic() + moments.random() ** 2 * 0.5
                while time.monotonic() < deadline:
                    while witness.told.poll():
                        seen.append(witness.hear())
                    time.sleep(0.005)
                victim.kill()
        seen += [witness.hear() for _ in range(20)]  # the slots of the dead came back: it goes on
        assert [each.pid for each in server.consumers] == [witness.pid]
        expected = [[4 * at, 4 * at + 1, 4 * at + 2, 4 * at + 3] for at in range(1000)]
        assert seen == [expected[at % 1000] for at in range(len(seen))]
