"""No thread is left behind, however an iterator ends. (A fixture in conftest.py checks threads and files.)"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch

from aiofeed import Feeder, Limits, prefetch
from aiofeed.errors import IteratorClosedError, WorkerDiedError
from aiofeed.kernel.runtime.threads import DaemonThread
from tests.support.fork_server import ForkServer
from tests.support.simulated_device import SimulatedDevice

# The target is 0.2 s; this allows for a busy machine.
GONE_S = 20.0


class Slow:
    """A source whose reads never end if `stuck`."""

    def __init__(self, n: int = 1000, stuck: bool = False) -> None:
        self.n = n
        self.stuck = stuck
        self.reading = threading.Event()
        self.cancelled = threading.Event()

    def __len__(self) -> int:
        return self.n

    def key(self, index: int) -> str:
        return str(index)

    async def read(self, index: int) -> bytes:
        self.reading.set()
        if self.stuck:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return b"%d" % index


def number(data: bytes) -> torch.Tensor:
    return torch.tensor(int(data))


def ours() -> list[threading.Thread]:
    running = [thread for thread in threading.enumerate() if thread.name.startswith("aiofeed")]
    # The thread of a dataset ends with the dataset, which another test may keep.
    return [thread for thread in running if thread.name != "aiofeed-decode-dataset"]


def gone_within(limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    # Joins one at a time, because the engine may start another thread until it has noticed.
    while (left := ours()) and time.monotonic() < deadline:
        with contextlib.suppress(RuntimeError):  # a thread that is being started cannot be joined
            left[0].join(max(0.0, deadline - time.monotonic()))
    assert not ours(), ours()
    return True


@pytest.fixture(params=["host", "device"])
def device(request: pytest.FixtureRequest) -> Any:
    return SimulatedDevice() if request.param == "device" else None


def test_after_an_error_of_the_source(device: Any) -> None:
    """After an error at the `for` line the threads end, even while its traceback is referenced."""
    feeder = Feeder(Slow(), decode=lambda data: 1 // (50 - int(data)), batch_size=4, device=device)
    with pytest.raises(Exception, match="50") as kept:
        list(feeder)
    assert gone_within(GONE_S)
    assert kept.value is not None


def test_an_idle_feeder_keeps_its_threads_until_closed(device: Any) -> None:
    """Between epochs the threads wait; close() returns after they have ended."""
    feeder = Feeder(Slow(40), decode=number, batch_size=4, device=device)
    list(feeder)
    assert ours()
    feeder.close()
    assert not ours()


def test_close_cancels_reads_in_flight() -> None:
    """Reads get CancelledError, and close() returns after they have ended."""
    source = Slow(stuck=True)
    feeder = Feeder(source, decode=number, batch_size=4)
    iterator = iter(feeder)
    assert source.reading.wait(10)
    feeder.close()
    assert source.cancelled.is_set()
    assert not ours()
    with pytest.raises(IteratorClosedError, match="closed"):
        next(iterator)


def test_a_read_that_swallows_its_cancellation_does_not_delay_close(caplog: pytest.LogCaptureFixture) -> None:
    """close() does not wait until a batch that was read after its cancellation is decoded."""

    class Stubborn(Slow):
        async def read(self, index: int) -> bytes:
            try:
                return await super().read(index)
            except asyncio.CancelledError:
                return b"0"

    source = Stubborn(stuck=True)
    feeder = Feeder(source, decode=number, batch_size=1, limits=Limits(read_concurrency=8, prefetch_batches=1))
    iterator = iter(feeder)
    assert source.reading.wait(10)
    feeder.close()
    assert not ours()
    assert not caplog.records
    del iterator


async def test_batches_that_swallow_their_cancellation_do_not_delay_close(caplog: pytest.LogCaptureFixture) -> None:
    """An async iterable that yields once more after its cancellation is not iterated any further."""
    waiting = threading.Event()

    async def batches() -> AsyncIterator[int]:
        yield 0
        while True:
            waiting.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            yield 1

    iterator = iter(prefetch(batches()))
    assert next(iterator) == 0
    assert waiting.wait(10)
    await iterator.aclose()
    assert not ours()
    assert not caplog.records


def test_epochs_without_a_batch_are_not_planned_ahead() -> None:
    """With many empty epochs requested, close() still reaches the loop."""
    feeder = Feeder(Slow(0), decode=number, batch_size=4)
    for _ in feeder.epochs(10**9):
        assert list(feeder) == []
        break
    feeder.close()
    assert not ours()


def test_a_stuck_decoder_delays_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Closing an iterator and starting a new epoch do not wait for a decoder that cannot be interrupted."""
    release, stuck = threading.Event(), threading.Event()

    def decode(data: bytes) -> torch.Tensor:
        if data == b"9":
            stuck.set()
            release.wait()
        return number(data)

    feeder = Feeder(Slow(40), decode=decode, batch_size=4, limits=Limits(decode_threads=2))
    iterator = iter(feeder)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    assert stuck.wait(10)
    started = time.monotonic()
    iterator.close()
    again = iter(feeder)
    assert next(again).tolist() == [0, 1, 2, 3]
    assert time.monotonic() - started < GONE_S
    assert "left behind" not in caplog.text
    release.set()
    again.close()
    assert gone_within(GONE_S)


@pytest.mark.parametrize("way", ["task", "callback"])
def test_system_exit_in_the_sources_own_task_ends_the_epoch(
    way: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The `for` line raises WorkerDiedError, the source is closed, and nothing else is reported."""

    class Exits(Slow):
        closed = False

        async def read(self, index: int) -> bytes:
            if index == 20:
                loop = asyncio.get_running_loop()
                if way == "task":
                    self.task = loop.create_task(self.exit_soon())
                else:
                    loop.call_soon(sys.exit, 3)
                await asyncio.Event().wait()
            return await super().read(index)

        async def exit_soon(self) -> None:
            sys.exit(3)

        async def aclose(self) -> None:
            self.closed = True

    source = Exits()
    with pytest.raises(WorkerDiedError, match="died of SystemExit: 3"):
        list(Feeder(source, decode=number, batch_size=4))
    assert gone_within(GONE_S)
    assert source.closed
    source.__dict__.clear()
    gc.collect()
    assert not caplog.records
    assert capsys.readouterr() == ("", "")


async def test_cancelling_an_async_consumer_at_its_wait() -> None:
    """An iterator is usable after a cancelled `anext`, and aclose ends the threads without blocking the loop."""
    source = Slow(stuck=True)
    feeder = Feeder(source, decode=number, batch_size=4)
    iterator = aiter(feeder)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await anext(iterator)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    await feeder.aclose()
    ticker.cancel()
    assert ticks > 1
    assert source.cancelled.is_set()


def test_closing_one_of_two_feeders() -> None:
    """Closing a feeder does not disturb another one in another thread."""
    one = Feeder(Slow(), decode=number, batch_size=4)
    other = Feeder(Slow(), decode=number, batch_size=4)
    iterator = iter(one)
    next(iterator)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(sum(1 for _ in other)))
    thread.start()
    one.close()
    thread.join()
    assert seen == [250]
    other.close()


def run(server: ForkServer, code: str) -> subprocess.CompletedProcess[str]:
    prelude = """
        import asyncio, os, signal, sys, threading, time
        import torch
        from aiofeed import Feeder, Limits
        from aiofeed.errors import IteratorClosedError

        class Numbers:
            def __len__(self): return 1000
            def key(self, index): return str(index)
            async def read(self, index):
                await asyncio.sleep(0)
                return b"%d" % index

        def number(data): return torch.tensor(int(data))
    """
    script = textwrap.dedent(prelude) + textwrap.dedent(code)
    return server.run(script)


@pytest.mark.parametrize("state", ["iterating", "idle", "closed", "before the first batch"])
def test_the_interpreter_ends_in_silence(fork_server: ForkServer, state: str) -> None:
    """A script that ends with a feeder in any state exits with 0 and prints nothing."""
    ended = run(
        fork_server,
        f"""
        feeder = Feeder(Numbers(), decode=number, batch_size=4)
        state = {state!r}
        iterator = iter(feeder)
        if state != "before the first batch": next(iterator)
        if state == "idle": list(iterator)
        if state == "closed": feeder.close()
        """,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "message"),
    [
        # Python's own error: concurrent.futures cannot be imported any more.
        ("aiofeed", "can't register atexit after shutdown"),
        ("torch", "the interpreter is exiting"),
        ("aiofeed.kernel.feeder.feeder", "the interpreter is exiting"),
    ],
)
def test_a_feeder_begun_while_the_interpreter_exits_is_refused(first: str, message: str) -> None:
    """`iter` raises in an atexit handler that runs after aiofeed's own, instead of starting threads that nobody stops.

    The names are imported after the handler was registered.
    """
    program = f"""
        import atexit

        def late():
            import aiofeed

            class Numbers:
                def __len__(self): return 64
                def key(self, index): return str(index)
                async def read(self, index): return b""

            try:
                next(iter(aiofeed.Feeder(Numbers(), decode=len, batch_size=4)))
            except RuntimeError as error:
                print(error)

        atexit.register(late)
        import {first}
        """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert message in ended.stdout


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 starts no thread in an atexit handler")
def test_a_feeder_works_in_an_atexit_handler_that_is_younger_than_aiofeed(fork_server: ForkServer) -> None:
    """An atexit handler that was registered after the import of aiofeed can iterate a feeder."""
    ended = run(
        fork_server,
        """
        import atexit

        def late():
            feeder = Feeder(Numbers(), decode=number, batch_size=500)
            print([batch.sum().item() for batch in feeder])

        atexit.register(late)
        """,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[124750, 374750]\n", "")


def test_the_interpreter_does_not_wait_for_a_stuck_decoder(fork_server: ForkServer) -> None:
    """A decoder that sleeps for a minute does not delay the exit."""
    ended = run(
        fork_server,
        """
        def stuck(data): time.sleep(60)
        feeder = Feeder(Numbers(), decode=stuck, batch_size=4)
        iterator = iter(feeder)
        while not any(t.name.startswith("aiofeed-decode") for t in threading.enumerate()): time.sleep(0.001)
        """,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
def test_a_forked_child_gets_a_feeder_of_its_own(fork_server: ForkServer) -> None:
    """In a fork the inherited iterator raises, the feeder works, and the parent is not disturbed."""
    ended = run(
        fork_server,
        """
        import warnings
        warnings.simplefilter("ignore")
        feeder = Feeder(Numbers(), decode=number, batch_size=4)
        iterator = iter(feeder)
        first = next(iterator)
        child = os.fork()
        if child == 0:
            try:
                next(iterator)
            except IteratorClosedError as error:
                assert "parent" in str(error)
            else:
                os._exit(3)
            count = sum(1 for _ in feeder)
            feeder.close()
            os._exit(0 if count == 250 else 4)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
        print(1 + sum(1 for _ in iterator))
        """,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "250\n", "")


def test_a_thread_does_not_inherit_context_variables() -> None:
    """Otherwise a thread that outlives its creator's task would keep what the task's context refers to."""
    variable: ContextVar[str] = ContextVar("variable", default="unset")
    seen: list[str] = []
    token = variable.set("of the creator")
    try:
        thread = DaemonThread(lambda: seen.append(variable.get()), "test")
        thread.start()
        assert thread.join(10)
    finally:
        variable.reset(token)
    assert seen == ["unset"]
