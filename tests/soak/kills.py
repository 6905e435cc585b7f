"""SIGKILL at random moments: checks the error, how soon it is raised, and that nothing is left behind.

``python -m tests.soak.kills --times 200 --seed 1`` kills 200 processes and prints a report.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

import aiofeed
from aiofeed import Feeder
from aiofeed.errors import WorkerDiedError
from tests.soak import shared_tensors as share_soak
from tests.support import process_parts as parts
from tests.support import serve_parts
from tests.support.serve_parts import Started
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

SHM = Path("/dev/shm")


class Kills:
    """Rounds in each of which one process is killed.

    Args:
        seed: Of the random moments.
        within_s: Limit for the error to be raised.
    """

    def __init__(self, seed: int, within_s: float) -> None:
        self.random = random.Random(seed)
        self.within_s = within_s
        self.noticed_s: dict[str, list[float]] = defaultdict(list)

    def run(self, times: int) -> None:
        """Kill so many processes, of each kind in turn."""
        kinds: tuple[Callable[[str], float], ...] = (
            self.worker,
            self.worker_of_a_server,
            self.consumer_of_all,
            self.consumer_of_a_share,
            self.server,
            self.holder_of_tensors,
        )
        before = set(os.listdir(SHM)) if SHM.is_dir() else set()
        with contextlib.contextmanager(serve_parts.forking)(), tempfile.TemporaryDirectory(prefix="af") as folder:
            opened: set[str] | None = None
            for _, kind in zip(range(times), itertools.cycle(kinds), strict=False):
                address = str(Path(folder) / "killed.sock")
                took = kind(address)
                self.noticed_s[kind.__name__].append(took)
                assert took < self.within_s, f"{kind.__name__}: noticed after {took:.2f} s"
                if opened is None:
                    opened = share_soak.descriptors()
            assert opened is not None
            share_soak.until_closed(opened)
            # The socket of a killed server, which the next one would replace.
            assert set(os.listdir(folder)) <= {"killed.sock"}
        # Files of other programs disappear in time.
        left = (set(os.listdir(SHM)) if SHM.is_dir() else set()) - before
        until(lambda: not left or not left & set(os.listdir(SHM)))

    def report(self) -> str:
        """How many processes were killed, and how soon that was noticed."""
        lines = [f"{sum(map(len, self.noticed_s.values()))} processes killed"]
        for kind, seconds in self.noticed_s.items():
            ms = sorted(1e3 * each for each in seconds)
            lines.append(f"  {len(ms):4} {kind}: median {statistics.median(ms):.0f} ms, worst {ms[-1]:.0f} ms")
        return "\n".join(lines)

    def _moment(self) -> float:
        return float(self.random.random() ** 2 * 0.5)

    def worker(self, address: str) -> float:
        """One of two workers; the trainer gets the error."""
        return share_soak.kill_once(self._moment(), self.random.randrange(2), self.within_s)

    def worker_of_a_server(self, address: str) -> float:
        """One of two workers of a served feeder; its consumer gets the error with the exit status, and continues."""
        options: dict[str, Any] = {"decode": parts.slow_number, "batch_size": 4, "engine": "process:2"}
        with (
            Feeder(parts.Numbers(10**7), **options) as feeder,
            aiofeed.serve(feeder, address),
            aiofeed.attach(address) as feed,
        ):
            iterator = iter(feed)
            seen = [next(iterator).tolist()]
            killed = _kill_after(self._moment(), parts.worker_pids(feeder)[self.random.randrange(2)])
            with pytest.raises(WorkerDiedError) as caught:
                seen.extend(batch.tolist() for batch in iterator)
            took = time.monotonic() - killed()
            assert caught.value.exit_status == -signal.SIGKILL
            assert seen == [[4 * at, 4 * at + 1, 4 * at + 2, 4 * at + 3] for at in range(len(seen))]
            assert next(iter(feed)).tolist() == [0, 1, 2, 3]
        return took

    def consumer_of_all(self, address: str) -> float:
        """One of two consumers that get every batch; the server notices, and the other continues."""
        return self._consumer(address, "broadcast")

    def consumer_of_a_share(self, address: str) -> float:
        """One of two consumers that take turns; the server notices, and the other continues."""
        return self._consumer(address, "shard")

    def _consumer(self, address: str, mode: Any) -> float:
        feeder = Feeder(parts.Numbers(4000), decode=parts.number, batch_size=4)
        with (
            feeder,
            aiofeed.serve(feeder, address, mode=mode, join="batch", min_consumers=2) as server,
            Started(serve_parts.endlessly, address, 0.001) as witness,
            Started(serve_parts.endlessly, address, 0.0005) as victim,
        ):
            seen = [witness.receive()]
            deadline = time.monotonic() + self._moment()
            while time.monotonic() < deadline or witness.pipe.poll():
                if witness.pipe.poll(0.005):
                    seen.append(witness.receive())
                    if time.monotonic() >= deadline:
                        break
            killed = time.monotonic()
            victim.kill()
            while any(each.pid == victim.pid for each in server.consumers):
                assert time.monotonic() - killed < self.within_s, "the server does not notice it"
                time.sleep(0.001)
            took = time.monotonic() - killed
            seen += [witness.receive() for _ in range(20)]
        firsts = [batch[0] for batch in seen]
        assert all(batch == list(range(batch[0], batch[0] + 4)) for batch in seen)
        assert all(one < other or other < 8 for one, other in itertools.pairwise(firsts))
        return took

    def server(self, address: str) -> float:
        """The server; its consumer gets the error, and the next server takes the address."""
        with Started(serve_parts.serves, address) as server:
            assert server.receive() == "serving"
            with aiofeed.attach(address) as feed:
                iterator = iter(feed)
                next(iterator)
                killed = _kill_after(self._moment(), server.pid)
                with pytest.raises(WorkerDiedError):
                    for _ in iterator:
                        pass
                return time.monotonic() - killed()

    def holder_of_tensors(self, address: str) -> float:
        """A process that writes to shared tensors, or the one that shares them; the others keep them."""
        of_sharer = self.random.random() < 0.5
        with contextlib.ExitStack() as stack:
            if of_sharer:
                sharer = stack.enter_context(Started(shares, address))
                assert sharer.receive() == "sharing"
            else:
                stack.enter_context(aiofeed.processes.share(torch.arange(1000), address))
            holder = stack.enter_context(Started(holds, address))
            assert holder.receive() == 499500
            ours = aiofeed.processes.attach_tensors(address)
            victim = sharer if of_sharer else holder
            time.sleep(self._moment())
            killed = time.monotonic()
            victim.kill()
            victim.process.join()
            took = time.monotonic() - killed
            assert int(ours.sum()) == 499500
            if not of_sharer:
                assert int(aiofeed.processes.attach_tensors(address).sum()) == 499500
        if of_sharer:
            with aiofeed.processes.share(torch.ones(3), address):  # the address of a dead process is free
                pass
        return took


def shares(address: str, pipe: Connection) -> None:
    """Share endlessly."""
    with aiofeed.processes.share(torch.arange(1000), address):
        pipe.send("sharing")
        time.sleep(60.0)


def holds(address: str, pipe: Connection) -> None:
    """Write to the shared tensors endlessly."""
    tensor = aiofeed.processes.attach_tensors(address)
    pipe.send(int(tensor.sum()))
    while True:
        tensor += 1


def _kill_after(seconds: float, pid: int) -> Callable[[], float]:
    """Kill a process from a thread; returns a function that waits for that and gives its time."""
    moment: list[float] = []

    def kill() -> None:
        time.sleep(seconds)
        moment.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()

    def killed() -> float:
        thread.join()
        return moment[0]

    return killed


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills processes at random moments.")
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--within", type=float, default=1.0, metavar="S", help="limit for the error to be raised")
    given = parser.parse_args()
    kills = Kills(given.seed, given.within)
    try:
        kills.run(given.times)
    finally:
        print(kills.report(), flush=True)
    assert not psutil.Process().children() or all(
        "resource_tracker" in " ".join(each.cmdline()) for each in psutil.Process().children()
    )


if __name__ == "__main__":
    main()
