"""`feeder.progress` and the bars of long listings: what they show, when they are silent, and what they never change."""

from __future__ import annotations

import io
import pickle
import random
import re
import sys
import threading
import timeit
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _pytest.capture import CaptureIO

from aiofeed import Buckets, DiskCache, Feeder, HostCache, Stream
from aiofeed.common import progress_bar
from aiofeed.common.progress_bar import LoadProgress
from aiofeed.errors import IteratorClosedError, ReadError
from aiofeed.kernel.feeder.iterator import EpochObserver
from aiofeed.kernel.runtime.queue import ReadyBatch
from aiofeed.reports import progress
from tests.support import process_parts as parts
from tests.support.interrupts import interrupted_next
from tests.support.process_parts import Numbers
from tests.support.simulated_device import SimulatedDevice


class Terminal:
    """Standard error as a terminal."""

    start = 0

    def getvalue(self) -> str:
        """Everything that was drawn since the last `clear`."""
        assert isinstance(sys.stderr, CaptureIO)
        return sys.stderr.getvalue()[self.start :]

    def clear(self) -> None:
        self.start += len(self.getvalue())

    @property
    def lines(self) -> list[str]:
        """The drawings."""
        return re.split(r"[\r\n]+", self.getvalue().strip())


def number(data: bytes) -> torch.Tensor:
    return torch.tensor(int(data))


def new_feeder(**options: Any) -> Feeder[torch.Tensor]:
    return Feeder(Numbers(12), decode=number, batch_size=2, **options)


@pytest.fixture
def terminal(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal on which every batch is drawn."""
    monkeypatch.setattr(CaptureIO, "isatty", lambda _: True)
    monkeypatch.setattr(progress, "BAR_EVERY_S", 0.0)
    monkeypatch.setattr(progress, "DRAWING_SHARE", float("inf"))
    monkeypatch.delenv("RANK", raising=False)
    return Terminal()


def same(batches: list[Any], others: list[Any]) -> bool:
    return [batch.tolist() for batch in batches] == [batch.tolist() for batch in others]


class TestBatches:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"shuffle": True, "seed": 3},
            {"in_order": False},
            {"in_order": "samples"},
            {"device": True},
            {"on_error": "skip"},
            {"on_error": "replace"},
            {"cache": "host"},
            {"batch_size": Buckets([1, 2, 3] * 4, [2, 3], [2, 3, 2])},
            pytest.param({"engine": "process:1"}, marks=pytest.mark.slow),
        ],
        ids=str,
    )
    def test_are_those_of_the_feeder(self, terminal: Terminal, options: dict[str, Any]) -> None:
        """Batches, order, failures and state are those of the feeder without a bar, over several epochs."""
        made = []
        for _ in range(2):
            chosen = {"batch_size": 2, **options}
            if options.get("device"):
                chosen["device"] = SimulatedDevice()
            if options.get("engine"):
                made.append(Feeder(parts.Numbers(12), decode=parts.number, **chosen))
            else:
                bad = (3,) if "on_error" in options else ()
                made.append(Feeder(Numbers(12, bad), decode=number, **chosen))
        plain, shown = made
        with plain, shown:
            for _ in plain.epochs(3):
                expected = [batch.cpu() for batch in plain]
                found = [batch.cpu() for batch in shown.progress()]
                if "in_order" in options:
                    expected, found = ([torch.cat(each).sort().values] for each in (expected, found))
                assert same(found, expected)
                assert shown.state_dict() == plain.state_dict()
                assert len(shown.failures) == len(plain.failures)
        assert "train" in terminal.getvalue()

    def test_resume_at_every_position(self, terminal: Terminal) -> None:
        """After a `break` at any batch the state is that of a plain loop, and a loaded state goes on with its batch."""
        whole = list(new_feeder(shuffle=True))
        for stop in range(1, 7):
            feeder = new_feeder(shuffle=True)
            seen = [batch for _, batch in zip(range(stop), feeder.progress(), strict=False)]
            again = new_feeder(shuffle=True)
            again.load_state_dict(feeder.state_dict())
            terminal.clear()
            if stop < 6:
                seen += list(again.progress())
                assert f"| {stop}/6" in terminal.lines[0]
            assert same(seen, whole)

    def test_resume_with_another_world_size(self, terminal: Terminal) -> None:
        """A state of two ranks goes on with one rank, with the batches of a plain loop and a bar that ends at 100 %."""
        first = new_feeder(shuffle=True, shard=(0, 2))
        iterator = iter(first.progress())
        next(iterator)
        feeders = [new_feeder(shuffle=True, shard=(0, 1)) for _ in range(2)]
        for feeder in feeders:
            feeder.load_state_dict(first.state_dict())
        terminal.clear()
        assert same(list(feeders[0].progress()), list(feeders[1]))
        assert "| 2/6" in terminal.lines[0]
        assert "| 6/6" in terminal.lines[-1]

    # An interrupt between opening a file of /proc and the `with` block leaves it to the garbage collector.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    @pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.slow)])
    def test_an_interrupted_next_loses_no_batch(self, terminal: Terminal, step: int) -> None:
        """After Ctrl-C anywhere in `next`, the state does not count the batch, and the next `next` returns it, once."""
        feeder = new_feeder()
        for place in range(random.randrange(step), 3000, step):
            iterator = iter(feeder.progress())
            seen = [next(iterator)]
            interrupted, reached = interrupted_next(iterator, place, seen)
            if interrupted:
                assert feeder.state_dict()["position"] == 2, place
            seen += iterator
            assert torch.cat(seen).tolist() == list(range(12)), place
            if not reached:
                break
        assert place > 30
        feeder.close()

    async def test_async(self, terminal: Terminal) -> None:
        """`async for` gets the same batches; `break` closes the bar."""
        async with new_feeder() as feeder:
            assert same([batch async for batch in feeder.progress()], list(new_feeder()))
            async for _ in feeder.progress("second"):
                break
            assert feeder._session.bar is None
        assert "6/6" in terminal.getvalue()
        assert "second" in terminal.getvalue()

    def test_length(self) -> None:
        """Its length is that of the feeder."""
        assert len(new_feeder().progress()) == 6


class TestBar:
    def test_text(self, terminal: Terminal) -> None:
        """The bar shows name, batches, samples per second, waiting share and limit; the last drawing is complete."""
        for _ in new_feeder().progress("mine"):
            pass
        assert re.fullmatch(
            r"mine: 100%\|.*\| 6/6 \[\d\d:\d\d<\d\d:\d\d, [\d,]+ samples/s, waiting \d+%(, limit: [\w-]+)?\]",
            terminal.lines[-1],
        )

    def test_one_bar_for_all_epochs(self, terminal: Terminal) -> None:
        """Inside `epochs` one bar counts the batches of all epochs."""
        feeder = new_feeder()
        for _ in feeder.epochs(3):
            for _ in feeder.progress():
                pass
        assert terminal.getvalue().count("\n") == 1
        assert re.search(r"100%\|.*\| 18/18 \[.*epoch 3 of 3, ", terminal.lines[-1])
        assert any(re.search(r"\| 8/18 \[.*epoch 2 of 3, ", line) for line in terminal.lines)

    def test_resumed_epochs(self, terminal: Terminal) -> None:
        """After a resume the bar begins where the state was saved."""
        feeder = new_feeder()
        for epoch in feeder.epochs(2):
            for number, _ in enumerate(feeder.progress()):
                if epoch == 1 and number == 2:
                    break
        again = new_feeder()
        again.load_state_dict(feeder.state_dict())
        terminal.clear()
        for _ in again.epochs(3):
            for _ in again.progress():
                pass
        assert "| 9/18" in terminal.lines[0]
        assert "| 18/18" in terminal.lines[-1]

    @pytest.mark.parametrize("left", [False, True])
    def test_another_run(self, terminal: Terminal, left: bool) -> None:
        """A run after another one in the same process has a bar of its own epochs; the text has their numbers."""
        feeder = new_feeder()
        for epoch in feeder.epochs(2):
            for _ in feeder.progress():
                if left and epoch == 1:
                    break
        terminal.clear()
        for _ in feeder.epochs(4):
            for _ in feeder.progress():
                pass
        assert "| 0/12 [" in terminal.lines[0]
        assert re.search(r"100%\|.*\| 12/12 \[.*epoch 4 of 4, ", terminal.lines[-1])
        assert any(re.search(r"\| 1/12 \[.*epoch 3 of 4, ", line) for line in terminal.lines)
        terminal.clear()
        feeder.set_epoch(0)
        for _ in feeder.epochs(1):
            for _ in feeder.progress():
                pass
        assert ("| 0/6 [" in terminal.lines[0], "| 6/6 [" in terminal.lines[-1]) == (True, True)

    def test_epochs_that_are_left(self, terminal: Terminal) -> None:
        """A `break` out of the loop of epochs closes the bar."""
        feeder = new_feeder()
        for _ in feeder.epochs(3):
            for _ in feeder.progress():
                pass
            break
        assert feeder._session.bar is None
        assert terminal.getvalue().endswith("\n")

    @pytest.mark.parametrize("inside", [False, True])
    @pytest.mark.parametrize("error", [None, KeyError, KeyboardInterrupt])
    def test_loop_that_is_left(self, terminal: Terminal, error: type[BaseException] | None, inside: bool) -> None:
        """`break`, an exception and Ctrl-C in the loop body close the bar and end the threads of the feeder."""
        feeder = new_feeder()
        epochs = feeder.epochs(3) if inside else iter(range(3))

        def leave() -> None:
            next(epochs)
            for _ in feeder.progress():
                if error is not None:
                    raise error
                break

        if error is None:
            leave()
        else:
            with pytest.raises(error):
                leave()
        assert feeder._session.bar is None
        assert terminal.getvalue().endswith("\n")
        assert feeder._session.delivery is not None
        assert feeder._session.delivery.join(30)

    def test_error_of_a_sample(self, terminal: Terminal) -> None:
        """An error at the `for` line closes the bar before it is raised."""
        feeder = Feeder(Numbers(12, bad=(7,)), decode=number, batch_size=2)
        iterator = iter(feeder.progress())
        with pytest.raises(ReadError):
            list(iterator)
        assert feeder._session.bar is None
        assert "| 3/6" in terminal.lines[-1]

    def test_close(self, terminal: Terminal) -> None:
        """`close` and a newer `iter` close the bar of an open iterator."""
        feeder = new_feeder()
        iterator = iter(feeder.progress())
        next(iterator)
        feeder.close()
        assert feeder._session.bar is None
        older = iter(feeder.progress())
        newer = iter(feeder.progress("newer"))
        with pytest.raises(IteratorClosedError):
            next(older)
        del older
        next(newer)
        assert feeder._session.bar is not None
        iter(feeder)
        assert feeder._session.bar is None

    def test_loop_that_counts_batches(self, terminal: Terminal) -> None:
        """A loop that never asks for the end of the epoch may be followed by others, with the same bar."""
        feeder = new_feeder()
        for _ in feeder.epochs(3):
            iterator = iter(feeder.progress())
            for _ in range(6):
                next(iterator)
        assert feeder._session.bar is None
        assert terminal.getvalue().count("\n") == 1

    def test_stream_without_a_length(self, terminal: Terminal) -> None:
        """A stream without a length has a bar without a total."""
        feeder: Feeder[Any] = Feeder(Stream(lambda epoch: iter(torch.arange(8))), batch_size=2)
        for _ in feeder.epochs(2):
            assert len(list(feeder.progress())) == 4
        assert "train: 4/? [" in terminal.lines[-1]

    @pytest.mark.parametrize("kind", ["host", "disk"])
    def test_first_fill_of_a_cache(self, terminal: Terminal, kind: str, tmp_path: Any) -> None:
        """The bar shows how much of a cache is filled, in the epoch that fills it only."""
        cache = HostCache(1 << 20) if kind == "host" else DiskCache(tmp_path / "cache")
        feeder = new_feeder(cache=cache, shuffle=True)
        shown = []
        for _ in range(2):
            feeder._session.begin().close()  # the store is open
            shown += ["cache filled" in terminal.lines[-1] for _ in feeder.progress()]
            terminal.clear()
        assert any(shown[:6])
        assert not any(shown[6:])

    def test_many_epochs(self, terminal: Terminal) -> None:
        """Bars of many epochs leave nothing behind: no thread, and no reference to the feeder's parts."""
        feeder = new_feeder()
        before = set(threading.enumerate())  # other tests may have left tqdm's monitor running
        for _ in range(50):
            list(feeder.progress())
        started = set(threading.enumerate()) - before
        assert len(started) <= 8
        assert not [thread for thread in started if "tqdm" in type(thread).__module__]
        assert feeder._session.bar is None

    def test_forked_process(self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process that is forked while a bar is shown does not draw it."""
        feeder = new_feeder()
        iterator = iter(feeder.progress())
        next(iterator)
        terminal.clear()
        bar = feeder._session.bar
        assert bar is not None
        monkeypatch.setattr(progress.os, "getpid", lambda: -1)
        bar.close()
        monkeypatch.undo()
        assert terminal.getvalue() == ""
        feeder.close()

    def test_pickled_feeder(self, terminal: Terminal) -> None:
        """A feeder with an open bar can be pickled."""
        feeder = new_feeder()
        iterator = iter(feeder.progress())
        next(iterator)
        assert len(pickle.loads(pickle.dumps(feeder))) == 6


class TestKinds:
    def test_without_tqdm(self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without tqdm a plain line shows the same."""
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
        list(new_feeder().progress())
        assert re.fullmatch(
            r"train: 6/6 \[[\d,]+ samples/s, waiting \d+%(, limit: [\w-]+)?\]\x1b\[K", terminal.lines[-1]
        )
        assert terminal.getvalue().endswith("\n")


class TestArguments:
    def test_wrong_name(self) -> None:
        """A name that is no str is an error that shows it."""
        name: Any = 3
        with pytest.raises(TypeError, match=r"progress\(name\) must be a str, got 3"):
            new_feeder().progress(name)


class TestSilence:
    def test_no_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is written if standard error is no terminal, is closed or does not exist."""
        written, closed = io.StringIO(), io.StringIO()
        closed.close()
        for stream in (written, closed, None):
            monkeypatch.setattr(sys, "stderr", stream)
            assert len(list(new_feeder().progress())) == 6
        assert written.getvalue() == ""

    def test_ranks(self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
        """Only rank 0 shows a bar: the rank of the feeder's shard, or of the process if the feeder has all samples."""
        list(new_feeder(shard=(1, 2)).progress())
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        list(new_feeder().progress())
        list(new_feeder(sampler=range(12)).progress())
        assert terminal.getvalue() == ""
        monkeypatch.setenv("RANK", "0")
        list(new_feeder().progress())
        assert "3/3" in terminal.getvalue()

    def test_wrong_rank(self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
        """A wrong RANK that the feeder does not need is no error of the bar."""
        monkeypatch.setenv("RANK", "x")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert len(list(new_feeder(shard=None).progress())) == 6

    def test_a_terminal_that_fails(
        self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """If the bar cannot be drawn, the training goes on, with one log line."""
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)

        def write(text: str) -> int:
            raise OSError("no space left")

        feeder = new_feeder()
        iterator = iter(feeder.progress())
        monkeypatch.setattr(sys.stderr, "write", write)
        assert len(list(iterator)) == 6
        assert caplog.text.count("the progress of train is not shown any more: OSError: no space left") == 1


def test_cost_per_batch(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two drawings, the bar costs less than 20 us per batch."""
    monkeypatch.setattr(progress, "BAR_EVERY_S", 60.0)
    feeder = new_feeder()
    iterator = iter(feeder.progress())
    shown, item = iterator.observer, ReadyBatch(0, 2, None)
    shown._observer = EpochObserver(None)  # type: ignore
    assert min(timeit.repeat(lambda: shown.returning(item), number=1000, repeat=5)) < 20e-6 * 1000


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Counts to 3 in a `LoadProgress` that shows each step."""
    monkeypatch.setattr(progress_bar, "BAR_AFTER_S", -1.0)
    monkeypatch.setattr(progress_bar, "BAR_EVERY_S", -1.0)
    monkeypatch.setattr(progress_bar, "LOG_EVERY_S", -1.0)

    def count() -> None:
        with LoadProgress("opening", "shards", 3, lambda done: f"opened {done} of 3 shards") as shown:
            for _ in range(3):
                shown.add()

    return count


class TestLoadProgress:
    def test_on_a_terminal(self, terminal: Terminal, counted: Callable[[], None], caplog: Any) -> None:
        """A listing shows a bar on a terminal, and logs nothing."""
        counted()
        assert re.search(r"opening:  67%.* 2/3 \[.* shards/s\]", terminal.getvalue())
        assert caplog.text == ""

    @pytest.mark.parametrize("why", ["no terminal", "no tqdm", "rank 1"])
    def test_log_lines(
        self, terminal: Terminal, counted: Callable[[], None], caplog: Any, monkeypatch: Any, why: str
    ) -> None:
        """Without a terminal or tqdm, and on other ranks, it logs lines."""
        if why == "no terminal":
            monkeypatch.setattr(CaptureIO, "isatty", lambda _: False)
        elif why == "no tqdm":
            monkeypatch.setitem(sys.modules, "tqdm.auto", None)
        else:
            monkeypatch.setenv("RANK", "1")
            monkeypatch.setenv("WORLD_SIZE", "2")
        counted()
        assert re.findall(r"opened (\d) of 3 shards", caplog.text) == ["1", "2", "3"]
        assert terminal.getvalue() == ""

    def test_short_work_is_silent(self, terminal: Terminal, caplog: Any) -> None:
        """Work that ends soon shows nothing."""
        with LoadProgress("listing", "keys", None, str) as shown:
            shown.add(1000)
        assert terminal.getvalue() == caplog.text == ""
