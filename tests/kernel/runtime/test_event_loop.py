"""Processes that get signals or end in other ways do so promptly, with the right exit code, output and clean-up."""

from __future__ import annotations

import functools
import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.fork_server import Child, End, ForkServer
from tests.support.paths import PACKAGE
from tests.support.signal_cases import (
    FORKED,
    FRESH_SPREAD_S,
    GRACE_S,
    PROMISE_S,
    WITHOUT_TORCH,
    complaints,
    fresh,
    interrupted,
    run_signal_cases,
    terminated,
)
from tests.support.training import TRAINING

pytestmark = [pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals"), pytest.mark.timeout(600)]


@pytest.fixture
def start(fork_server: ForkServer) -> Callable[[str], Child]:
    return functools.partial(fork_server.start, FORKED)


def begun(child: Child) -> Child:
    """The child, after its first line."""
    if (first := child.line()) != "ready":
        child.send(signal.SIGKILL)  # it would not end
        raise AssertionError(f"the first line is {first!r}: {child.end()}")
    return child


def right(end: End, returncode: int = 0, error: str | None = None, out: str = "") -> None:
    assert not complaints(end, returncode, error), end
    assert end.out == out


def test_the_fork_server_distinguishes_its_children(start: Callable[[str], Child]) -> None:
    """The end of a child is not taken for that of another, whenever it is read."""
    endless = begun(start("slow"))
    ended = start("no such script")
    assert ended.line() == "ready"
    again = start("end_by_sys_exit")
    assert len({endless.pid, ended.pid, again.pid}) == 3
    right(begun(again).end(), 3)
    endless.send(signal.SIGKILL)
    assert (endless.end().returncode, ended.end().returncode) == (-signal.SIGKILL, 1)


@pytest.mark.slow
def test_ctrl_c_at_random_moments(fork_server: ForkServer) -> None:
    """At any moment SIGINT causes one KeyboardInterrupt, and the process ends in time; each script gets one signal."""
    totals = run_signal_cases(fork_server, len(TRAINING), seed=random.randrange(2**32))
    totals.check()
    assert set(totals.scripts) == set(TRAINING)


def test_sigterm_at_random_moments(fork_server: ForkServer) -> None:
    """At any moment SIGTERM ends the process at once, without output and with nothing left behind."""
    totals = run_signal_cases(fork_server, 5, seed=random.randrange(2**32), number=signal.SIGTERM)
    totals.check()
    assert totals.signals == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "device", "asynchronous_closing"])
def test_ctrl_c_in_a_fresh_interpreter(name: str) -> None:
    """SIGINT from the import of aiofeed on causes one KeyboardInterrupt."""
    after_s = random.uniform(0, FRESH_SPREAD_S)
    child = begun(fresh(name))
    time.sleep(after_s)
    child.send(signal.SIGINT)
    end = child.end()
    assert not interrupted(end, name), (after_s, end)


def interrupt_without_torch(after_s: float) -> list[str]:
    """The problems of a process that gets SIGINT so many seconds after it begins to import aiofeed."""
    child = begun(fresh("endless", WITHOUT_TORCH))
    time.sleep(after_s)
    child.send(signal.SIGINT)
    end = child.end()
    if end.returncode == -signal.SIGABRT and "pybind11::error_already_set" in end.err:
        return []  # the signal arrived in one of torch's C++ initialisers, which abort then
    return [f"after {after_s:.2f} s: {wrong}\n{end.err}" for wrong in interrupted(end, "endless")]


@pytest.mark.slow
def test_ctrl_c_while_torch_is_imported() -> None:
    """A process that is importing torch for its first batch dies of SIGINT with one traceback."""
    # The import begins after 0.2 s and takes a second or more.
    for after_s in (0.1, 0.5, 1.0):
        assert not interrupt_without_torch(after_s + random.uniform(0, 0.2))


@pytest.mark.slow
def test_ctrl_c_at_each_moment_of_the_first_two_seconds() -> None:
    """SIGINT at any moment, in steps of 20 ms, ends a process that imports torch with one traceback."""
    with ThreadPoolExecutor(2) as pool:
        wrong = list(pool.map(interrupt_without_torch, [moment * 0.02 for moment in range(101)]))
    assert not sum(wrong, [])


@pytest.mark.slow
def test_the_end_of_main_while_torch_is_imported() -> None:
    """A script that ends while its feeder imports torch exits with 0 and prints nothing."""
    right(begun(fresh("end", WITHOUT_TORCH)).end())


@pytest.mark.slow
def test_sigterm_in_a_fresh_interpreter() -> None:
    """SIGTERM from the import of aiofeed on ends the process at once."""
    child = begun(fresh("images"))
    time.sleep(random.uniform(0, FRESH_SPREAD_S))
    child.send(signal.SIGTERM)
    assert not terminated(child.end())


def test_two_signals_at_once(start: Callable[[str], Child]) -> None:
    """A second SIGINT may interrupt the report of the first; aiofeed reports nothing."""
    child = begun(start("stuck"))
    time.sleep(0.2)
    child.send(signal.SIGINT)
    time.sleep(random.uniform(0, 0.01))
    child.send(signal.SIGINT)
    end = child.end()
    assert not end.left
    assert end.seconds < PROMISE_S + GRACE_S, end
    assert end.returncode in (-signal.SIGINT, 1), end
    for words in ("Fatal", "never awaited", "was destroyed"):
        assert words not in end.err
    for ignored in end.err.split("Exception ignored")[1:]:
        assert PACKAGE not in ignored, end.err


def test_ctrl_c_with_a_handler_of_the_user(start: Callable[[str], Child]) -> None:
    """The handler runs, and the script goes on to its own end."""
    child = begun(start("own_handler"))
    assert child.line() == "listening"
    time.sleep(random.uniform(0, 0.1))
    child.send(signal.SIGINT)
    right(child.end(), out="asked to end\n")


def test_ctrl_c_with_a_handler_that_raises(start: Callable[[str], Child]) -> None:
    """The handler's exception leaves the loop, and the feeder works again."""
    child = begun(start("own_exception"))
    assert child.line() == "listening"
    time.sleep(random.uniform(0, 0.1))
    child.send(signal.SIGINT)
    right(child.end(), out="16\n")


def test_ctrl_c_while_closing(start: Callable[[str], Child]) -> None:
    """SIGINT interrupts a close() that waits for a decoder, and the exit takes no longer than otherwise."""
    child = begun(start("close_of_a_stuck_feeder"))
    assert child.line() == "closing"
    time.sleep(random.uniform(0, 0.1))
    child.send(signal.SIGINT)
    right(child.end(), -signal.SIGINT, "KeyboardInterrupt")


def test_ctrl_c_while_the_interpreter_ends(start: Callable[[str], Child]) -> None:
    """SIGINT ends the wait at interpreter exit and does not change the exit code."""
    right(begun(start("ctrl_c_at_the_exit_of_a_stuck_feeder")).end())


@pytest.mark.parametrize(
    "name",
    [
        "end_with_a_live_iterator",
        "end_with_a_dropped_feeder",
        "end_with_an_idle_feeder",
        "end_with_a_stuck_decoder",
        "end_in_calls_of_torch",
        "end_of_a_bridge",
        "end_of_a_device",
    ],
)
def test_the_end_of_main(start: Callable[[str], Child], name: str) -> None:
    """A script that ends with a running feeder exits with 0, promptly and without output."""
    right(begun(start(name)).end())


def test_sys_exit_in_the_loop(start: Callable[[str], Child]) -> None:
    """The process has that exit code and no output."""
    right(begun(start("end_by_sys_exit")).end(), 3)


def test_os_exit_in_the_loop(start: Callable[[str], Child]) -> None:
    """The process has that exit code and no output."""
    right(begun(start("end_by_os_exit")).end(), 4)


def test_an_error_in_the_loop(start: Callable[[str], Child]) -> None:
    """The process prints exactly the traceback of the error."""
    right(begun(start("end_by_an_error")).end(), 1, "ZeroDivisionError: in the loop")


def test_an_error_of_a_decoder(start: Callable[[str], Child]) -> None:
    """The process prints DecodeError with its cause and its note, and nothing else."""
    end = begun(start("end_by_a_decoder")).end()
    assert (end.returncode, end.left) == (1, ())
    assert end.err.count("Traceback") == 2  # of the cause, and of the error
    assert "direct cause" in end.err
    error, note = end.err.splitlines()[-2:]
    assert "aiofeed.errors.DecodeError" in error
    assert "on_error=" in note
    assert "Exception ignored" not in end.err


GLOBALS = """
import torch, aiofeed
data = torch.utils.data.TensorDataset(torch.arange(20))
feeder = aiofeed.Feeder(data, batch_size=4, cache=aiofeed.DiskCache("decoded.cache"))
list(feeder)
loader = aiofeed.DataLoader(data, num_workers=1, persistent_workers=True)
left = iter(loader)
next(left)
"""


def test_global_variables_at_the_end_of_a_script(fork_server: ForkServer, tmp_path: Path) -> None:
    """A script whose variables are destroyed after their modules prints nothing."""
    done = fork_server.run(GLOBALS, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
