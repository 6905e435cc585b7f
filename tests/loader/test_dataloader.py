"""What ``aiofeed.DataLoader`` has beyond torch's: devices, async, routes over a Feeder, failures, clean ends."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import itertools
import multiprocessing
import os
import pickle
import resource
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.utils.data as torch_data
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, RandomSampler, Subset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from aiofeed import DataLoader, FailurePolicy, Feeder, FeedError, HostCache
from aiofeed.errors import IteratorClosedError, TooManyFailures, WorkerDiedError
from tests.support.fork_server import ForkServer
from tests.support.interrupts import Interrupt
from tests.support.loader_parts import Plain, Random, same, seed_all, without_none
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import children, until

ROWS = torch.arange(40_000.0).reshape(40, 1000)
WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


@pytest.fixture(autouse=True)
def no_worker_left_running() -> Iterator[None]:
    """Fail a test after which a worker process still runs."""
    before = {each.pid for each in children()}
    yield
    # Collect repeatedly: the traceback of an error refers to the iterator, and a thread that ends to the error.
    until(lambda: gc.collect() >= 0 and not [each for each in children() if each.pid not in before])


def shared_memory() -> int:
    """How many mappings of shared memory this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:aiofeed")


# --- device, transform, async ---


@pytest.mark.parametrize("options", WORKERS)
def test_device_and_transform(options: dict[str, Any]) -> None:
    """``device=`` copies each batch, and ``transform=`` is called with it there; order and epochs are torch's."""
    device = SimulatedDevice()
    devices = []

    def transform(batch: Any) -> Any:
        devices.append(type(batch[0]).__name__)
        return [batch[0] + 1]

    loader = DataLoader(TensorDataset(ROWS), 7, device=device, transform=transform, **options)
    for _ in range(2):
        batches = [batch.cpu().as_subclass(torch.Tensor) for (batch,) in loader]
        assert torch.cat(batches).equal(ROWS + 1)
    assert set(devices) == {"SimulatedTensor"}
    assert len(loader) == 6
    plain = DataLoader(TensorDataset(ROWS), 7, transform=lambda batch: batch[0].sum(), **options)
    assert torch.stack(list(plain)).equal(torch.stack([part.sum() for part in ROWS.split(7)]))


@pytest.mark.parametrize("device", [None, SimulatedDevice()])
@pytest.mark.parametrize("options", WORKERS)
async def test_async_for(options: dict[str, Any], device: Any) -> None:
    """``async for`` gives the batches of ``for``, epoch after epoch, also after one that was left."""
    loader = DataLoader(TensorDataset(ROWS), 7, device=device, **options)
    for stop in (99, 2, 99):
        batches: list[Any] = []
        async for (batch,) in loader:
            batches.append(batch.cpu().as_subclass(torch.Tensor))
            if len(batches) == stop:
                break
        assert torch.cat(batches).equal(ROWS[: 7 * len(batches)])
        assert len(batches) == min(stop, 6)


async def test_async_for_does_not_block_the_loop() -> None:
    """While a worker process makes a batch, other tasks run."""
    gate = torch.multiprocessing.get_context("fork").Event()

    class Gated(Plain):
        def __getitem__(self, index: int) -> Any:
            assert gate.wait(60)
            return index

    async def open_gate() -> None:
        gate.set()

    task = asyncio.create_task(open_gate())
    batches = [batch async for batch in DataLoader(Gated(3), num_workers=1)]
    await task
    assert torch.cat(batches).tolist() == [0, 1, 2]


@pytest.mark.parametrize("options", WORKERS)
def test_an_error_on_the_way_to_a_device(options: dict[str, Any]) -> None:
    """The batches before a sample that fails arrive; its error is raised unchanged."""
    loader = DataLoader(Random(9, (5,)), 2, collate_fn=without_none, device=SimulatedDevice(), **options)
    iterator = iter(loader)
    assert [next(iterator)["index"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="item 5 is bad"):
        next(iterator)
    del iterator
    assert [next(iter(loader))["index"].tolist() for _ in range(2)] == [[0, 1], [0, 1]]


# --- routes over a Feeder ---


class Failing(Dataset[Any]):
    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.bad = bad
        self.threads: set[str] = set()
        self.calls = 0
        self.samples = [(f"folder/{index}.jpg", 0) for index in range(20)]

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise OSError(f"sample {index} is broken")
        self.calls += 1
        self.threads.add(threading.current_thread().name)
        return torch.tensor(index)


def test_on_error_skips_samples() -> None:
    """``on_error="skip"`` leaves out samples that fail, in this process and in workers; the order is torch's."""
    seed_all(1)
    expected = [int(each) for each in torch_data.DataLoader(Failing(), None, shuffle=True) if int(each) not in (3, 7)]
    for workers in (0, 1):
        seed_all(1)
        policy = FailurePolicy("skip", max_failures=2)
        loader = DataLoader(Failing((3, 7)), 4, shuffle=True, num_workers=workers, on_error=policy)
        assert torch.cat(list(loader)).tolist() == expected


def test_threads() -> None:
    """``threads=N`` calls the dataset in threads, in torch's order, with torch's draws from the generator."""
    dataset = Failing()
    ours = DataLoader(dataset, 3, shuffle=True, threads=2, drop_last=True)
    theirs = torch_data.DataLoader(Failing(), 3, shuffle=True, drop_last=True)
    for cls in (ours, theirs):
        seed_all(6)
        got = [list(cls), torch.rand(2), list(cls)]
        if cls is ours:
            first = got
    assert same(first, got)
    assert threading.current_thread().name not in dataset.threads


def test_cache() -> None:
    """``cache=`` calls the dataset once per sample."""
    dataset = Failing()
    loader = DataLoader(dataset, 4, shuffle=True, cache=HostCache())
    for _ in range(3):
        assert sorted(torch.cat(list(loader)).tolist()) == list(range(20))
    assert dataset.calls == 20


def test_resume_over_a_feeder() -> None:
    """The routes over a Feeder resume in mid-epoch, too."""
    seed_all(1)
    loader = DataLoader(Failing(), 4, shuffle=True, threads=1)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest, after = list(iterator), list(loader)
    resumed = DataLoader(Failing(), 4, shuffle=True, threads=1)
    resumed.load_state_dict(state)
    assert same(list(resumed), rest)
    assert same(list(resumed), after)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("options", [{"threads": 2}, {"cache": "host"}, {"engine": "process"}])
def test_the_batches_of_a_batch_sampler_in_threads(options: dict[str, Any]) -> None:
    """Torch's batches in two epochs, and a resume in the middle of one."""

    def batches() -> list[list[int]]:
        return [[index, (7 * index) % 20, 3][: 1 + index % 3] for index in range(13)]

    theirs = torch_data.DataLoader(Plain(20), batch_sampler=batches())
    ours = DataLoader(Plain(20), batch_sampler=batches(), **options)
    expected = list(theirs)
    assert same(list(ours), expected)
    iterator = iter(ours)
    assert same([next(iterator) for _ in range(5)], expected[:5])
    state = ours.state_dict()
    resumed = DataLoader(Plain(20), batch_sampler=batches(), **options)
    resumed.load_state_dict(state)
    assert same(list(resumed), expected[5:])


class Endless:
    """Never ends: as a sampler, or as a batch sampler of batches of one to four."""

    def __init__(self, batches: bool) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        for number in itertools.count():
            yield [number % 20, *range(number % 4)] if self.batches else 7 * number % 20


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
@pytest.mark.parametrize("options", [{"threads": 2}, {"cache": "host"}, {"on_error": "skip"}])
def test_endless_samplers_over_a_feeder(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], kind: str) -> None:
    """They are listed in parts; batches are torch's, and a resume in a later part is exact."""
    monkeypatch.setattr("aiofeed.loader.dataloader._PART_BATCHES", 3)
    options = options | {kind: Endless(kind == "batch_sampler")}
    sampled: Any = {kind: options[kind]}
    expected = list(itertools.islice(torch_data.DataLoader(Plain(20), **sampled), 12))
    for taken in (2, 3, 7):
        loader = DataLoader(Plain(20), **options)
        assert same(list(itertools.islice(loader, taken)), expected[:taken])
        resumed = DataLoader(Plain(20), **options)
        resumed.load_state_dict(loader.state_dict())
        assert same(list(itertools.islice(resumed, 12 - taken)), expected[taken:])


class Long(Endless):
    """An endless sampler that counts what is read, and says that it has a length, or raises."""

    def __init__(self, batches: bool, length: Any) -> None:
        super().__init__(batches)
        self.length, self.read = length, 0

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            self.read += 1
            yield each

    def __len__(self) -> int:
        if isinstance(self.length, int):
            return self.length
        raise self.length("not known before they are made")


LENGTHS = [10**10, 2000, ValueError, NotImplementedError, RuntimeError]


WAYS: list[dict[str, Any]] = [
    {"threads": 2},
    {"cache": "host"},
    {"on_error": "skip"},
    {"engine": "process:1"},
    {},
    {"num_workers": 1},
]


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
@pytest.mark.parametrize(
    ("options", "length"), [*((way, LENGTHS[0]) for way in WAYS), *(({}, each) for each in LENGTHS[1:])]
)
@pytest.mark.usefixtures("forked_workers")
def test_a_long_sampler_is_read_as_it_goes(options: dict[str, Any], length: Any, kind: str) -> None:
    """The first batch comes after a few batches of the sampler were read; batches are torch's, also after a resume."""
    is_batches = kind == "batch_sampler"
    sampled: Any = {kind: Endless(is_batches)}
    expected = list(itertools.islice(torch_data.DataLoader(Plain(20), **sampled), 70))
    sampler = Long(is_batches, length)
    loader = DataLoader(Plain(20), **{kind: sampler}, **options)  # type: ignore[arg-type]
    batches = iter(loader)
    assert same([next(batches)], expected[:1])
    assert sampler.read <= 64
    assert same(list(itertools.islice(batches, 66)), expected[1:67])
    resumed = DataLoader(Plain(20), **{kind: Long(is_batches, length)}, **options)  # type: ignore[arg-type]
    resumed.load_state_dict(loader.state_dict())
    del batches
    assert same(list(itertools.islice(resumed, 3)), expected[67:])


class GlobalNumbers:
    """A sampler without a length that draws each index from torch's global generator."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(20, ()))


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 5, 6, 7, 12])
@pytest.mark.parametrize("kind", ["own generator", "global generator"])
def test_generators_of_long_samplers_are_resumed(monkeypatch: pytest.MonkeyPatch, kind: str, taken: int) -> None:
    """A sampler that draws while it is read goes on exactly, wherever in a part the state was saved."""
    monkeypatch.setattr("aiofeed.loader.dataloader._PART_BATCHES", 3)

    def new_loader(seed: int) -> DataLoader[Any]:
        torch.manual_seed(seed)
        own = RandomSampler(range(20), True, 10**10, torch.Generator().manual_seed(seed))  # type: ignore[arg-type]
        return DataLoader(Plain(20), 40, sampler=own if kind == "own generator" else GlobalNumbers(), threads=1)

    expected = list(itertools.islice(new_loader(0), 20))
    loader = new_loader(0)
    batches = iter(loader)
    assert same(list(itertools.islice(batches, taken)), expected[:taken])
    state = loader.state_dict()
    resumed = new_loader(1)
    resumed.load_state_dict(state)
    assert same(list(itertools.islice(resumed, 20 - taken)), expected[taken:])


class InterruptedOnce:
    """A batch sampler that Ctrl-C interrupts once, at its eighth batch, and that goes on."""

    def __init__(self) -> None:
        self.number, self.interrupts = -1, 1

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        if self.number == 6 and self.interrupts:
            self.interrupts = 0
            raise KeyboardInterrupt
        self.number += 1
        return [self.number % 20]


@pytest.mark.parametrize("goes_on", [False, True])
def test_ctrl_c_in_a_later_part_loses_no_batch(monkeypatch: pytest.MonkeyPatch, goes_on: bool) -> None:
    """If a sampler is interrupted, the next call goes on with the same batch, or says that it cannot."""
    monkeypatch.setattr("aiofeed.loader.dataloader._PART_BATCHES", 3)

    def generated() -> Iterator[list[int]]:
        yield from ([number] for number in range(7))
        raise KeyboardInterrupt

    batches = iter(DataLoader(Plain(20), batch_sampler=InterruptedOnce() if goes_on else generated(), threads=1))
    expected = list(itertools.islice(torch_data.DataLoader(Plain(20)), 12))
    assert same(list(itertools.islice(batches, 6)), expected[:6])
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    if goes_on:
        assert same(list(itertools.islice(batches, 6)), expected[6:])
    else:
        assert same([next(batches)], expected[6:7])
        with pytest.raises(FeedError, match="the sampler was interrupted at batch 7"):
            next(batches)


def test_failures_count_in_all_parts_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch of several parts has one ``max_failures``."""
    monkeypatch.setattr("aiofeed.loader.dataloader._PART_BATCHES", 3)
    failing = Failing((1, 4, 7, 10, 13))
    for most, fails in ((4, True), (5, False)):
        policy = FailurePolicy("skip", max_failures=most)
        loader = DataLoader(failing, 2, sampler=(each for each in range(20)), threads=1, on_error=policy)
        with pytest.raises(TooManyFailures, match="5 samples failed") if fails else nullcontext():
            assert len(list(loader)) == 10


def test_an_error_ends_the_epoch_of_an_endless_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next part does not begin after an error in the middle of one."""
    monkeypatch.setattr("aiofeed.loader.dataloader._PART_BATCHES", 3)
    iterator = iter(DataLoader(Failing((7,)), sampler=Endless(batches=False), threads=1))
    assert int(next(iterator)) == 0
    with pytest.raises(FeedError):
        next(iterator)
    assert list(iterator) == []


def test_what_the_routes_cannot_do() -> None:
    """An iterable dataset and ``batch_size=None`` are refused, and named."""

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    refused: list[tuple[Any, dict[str, Any]]] = [
        (Stream(), {}),
        (Plain(3), {"batch_size": None}),
    ]
    for dataset, options in refused:
        with pytest.raises(ValueError, match="leave them out with an IterableDataset"):
            DataLoader(dataset, threads=2, **options)


# --- failures ---


@pytest.mark.parametrize("workers", [0, 1])
def test_failures_name_index_and_path(workers: int) -> None:
    """An error of the dataset names the sample, and the file if the dataset lists files, also through a ``Subset``."""
    for dataset, text in (
        (Failing((17,)), "in sample 17 of Failing (folder/17.jpg)"),
        (Subset(Failing((17,)), [2, 17]), "in sample 1 of Subset (folder/17.jpg)"),
    ):
        with pytest.raises(OSError, match="sample 17 is broken") as raised:
            list(DataLoader(dataset, 4, num_workers=workers))
        assert text in (str(raised.value) if workers else raised.value.__notes__)


@pytest.mark.parametrize("options", WORKERS)
def test_the_length_of_an_iterator(options: dict[str, Any]) -> None:
    """An iterator has the length of its loader, as torch's has, also with look-ahead."""
    for transform in (None, abs):
        assert len(iter(DataLoader(Plain(8), 2, transform=transform, **options))) == 4


def outcomes(iterator: Any) -> list[Any]:
    """The batches of an epoch, with ``None`` for each error."""
    found: list[Any] = []
    while True:
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except OSError:
            found.append(None)


@pytest.mark.parametrize("failing", [(3,), (0, 1), (6, 7)])
def test_the_next_batch_after_an_error(failing: tuple[int, ...]) -> None:
    """``next`` after an error of the dataset returns the next batch, also if a thread receives the batches ahead."""
    for persistent in (False, True):
        loader = DataLoader(Failing(failing), None, num_workers=2, persistent_workers=persistent, transform=abs)
        for _ in range(2):
            assert outcomes(iter(loader)) == [None if each in failing else each for each in range(len(loader))]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_killed_worker(persistent: bool) -> None:
    """A worker that was killed ends the iterator with torch's error, which names the signal and the cause."""
    loader = DataLoader(Plain(200), num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    next(iterator)
    os.kill(iterator._workers[1].pid, signal.SIGKILL)  # type: ignore
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* exited unexpectedly: .*SIGKILL.*out of memory"):
        for _ in range(200):
            next(iterator)
    with pytest.raises(WorkerDiedError):
        next(iterator)
    assert len(list(loader)) == 200  # with new workers


class Exits(Plain):
    def __getitem__(self, index: int) -> Any:
        os._exit(3)


def test_a_worker_that_exits() -> None:
    with pytest.raises(WorkerDiedError, match="exit status 3"):
        next(iter(DataLoader(Exits(3), num_workers=1)))


class Waits(Plain):
    """Its second sample never ends."""

    def __init__(self) -> None:
        super().__init__(range(9))
        self.waiting = multiprocessing.Event()

    def __getitem__(self, index: int) -> Any:
        while index == 1:
            self.waiting.set()
            signal.pause()
        return index


class Gated(Waits):
    """Its second sample waits until a gate is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = multiprocessing.Event()

    def __getitem__(self, index: int) -> Any:
        if index == 1:
            self.waiting.set()
            self.gate.wait(60)
        return torch.tensor(index)


def ignore_sigterm(number: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@pytest.mark.parametrize(("init", "status"), [(None, 0), (ignore_sigterm, -signal.SIGKILL)])
def test_a_stuck_worker_is_terminated(monkeypatch: pytest.MonkeyPatch, init: Any, status: int) -> None:
    """A worker that does not end by itself is ended by a signal when the iterator is dropped: SIGTERM, then SIGKILL."""
    monkeypatch.setattr("aiofeed.loader.workers.workers._END_S", 0.1)
    dataset = Waits()
    iterator = iter(DataLoader(dataset, num_workers=1, worker_init_fn=init))
    assert dataset.waiting.wait(60)
    [worker] = iterator._batches.workers._workers
    del iterator
    until(lambda: worker.process.exitcode == status)


def test_a_stopped_worker_ends() -> None:
    """A worker that SIGSTOP has stopped ends with status 0, as others do, when the iterator is dropped."""
    iterator = iter(DataLoader(Plain(list(range(9))), num_workers=2))
    next(iterator)
    processes = [each.process for each in iterator._batches.workers._workers]
    os.kill(processes[0].pid, signal.SIGSTOP)
    del iterator
    until(lambda: [each.exitcode for each in processes] == [0, 0])


def test_a_dropped_iterator_does_not_wait_for_its_workers() -> None:
    """A Ctrl-C in a finalizer would be lost. The next workers start when those of before have ended."""
    dataset = Waits()
    iterator: Any = iter(DataLoader(dataset, num_workers=1))
    assert dataset.waiting.wait(60)
    [process] = iterator._workers
    del iterator
    assert process.is_alive()
    os.kill(process.pid, signal.SIGKILL)
    assert next(iter(DataLoader(Plain(3), num_workers=1))).tolist() == [0]
    assert process.exitcode == -signal.SIGKILL


# --- Ctrl-C, break, exit ---


@pytest.mark.parametrize("case", ["end", "break", "error", "unused", "device"])
def test_nothing_is_left_behind(case: str) -> None:
    """After an epoch that ended, was left or failed there is no process, descriptor or shared memory of it."""
    gc.collect()
    mapped, descriptors = shared_memory(), len(os.listdir("/proc/self/fd"))
    device = SimulatedDevice() if case == "device" else None
    loader = DataLoader(Plain(list(torch.zeros(20, 50_000))), 2, num_workers=2, device=device)
    iterator = iter(loader)
    if case != "unused":
        next(iterator)
    if case == "end":
        list(iterator)
    if case == "error":
        with pytest.raises(ZeroDivisionError):
            for batch in iterator:
                del batch
                _ = 1 / 0
    if case == "device":
        list(iterator)
    del iterator
    gc.collect()
    until(lambda: shared_memory() <= mapped)
    until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
    assert not [each for each in children() if "pytest" in each.name()]


SCRIPT = """
import os, sys, time, torch
from torch.utils.data import Dataset
from aiofeed import DataLoader
class Slow(Dataset):
    def __len__(self): return 1000
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(20_000)
if __name__ == "__main__":
    iterator = iter(DataLoader(Slow(), 2, num_workers=2, multiprocessing_context="fork"))
    next(iterator)
    print(*[each.pid for each in iterator._workers], flush=True)
    for _ in iterator: pass
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_the_script_ends_the_workers(number: signal.Signals, fork_server: ForkServer) -> None:
    """Ctrl-C, SIGTERM and SIGKILL of the script end its workers; Ctrl-C prints one traceback."""
    script = fork_server.start(SCRIPT)
    pids = [int(pid) for pid in script.line().split()]
    assert len(pids) == 2
    if number == signal.SIGINT:
        os.killpg(script.pid, number)  # a terminal sends it to all processes
    else:
        script.send(number)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    errors = script.end().err
    assert errors.count("Traceback") == (number == signal.SIGINT), errors
    assert errors.count("KeyboardInterrupt") == (number == signal.SIGINT), errors


def test_ctrl_c_anywhere_repeats_no_batch() -> None:
    """Ctrl-C at any place in ``next`` may be caught: at most the batch that it was to return is lost, none repeated."""
    items = list(torch.arange(12.0).reshape(12, 1).expand(12, 20_000))
    place = 0
    while True:
        iterator = iter(DataLoader(Plain(items), None, num_workers=1, timeout=60))
        first = next(iterator)
        caught, got = False, [first]
        try:
            with Interrupt(place) as interrupt:
                got.append(next(iterator))
        except KeyboardInterrupt:
            caught = True
        if not caught and interrupt.left > 0:
            break
        try:
            got.extend(iterator)
        except (WorkerDiedError, RuntimeError):
            pass  # an interrupted message ends the connection
        else:
            numbers = [int(each[0]) for each in got]
            assert numbers in (list(range(12)), [0, *range(2, 12)]), place
        place += 7
    assert place > 20


interrupted_forks = 0


def interrupt_fork() -> None:
    """Send Ctrl-C at the start of as many forks."""
    global interrupted_forks
    if interrupted_forks:
        interrupted_forks -= 1
        signal.raise_signal(signal.SIGINT)


os.register_at_fork(before=interrupt_fork)


@pytest.mark.parametrize("persistent", [False, True])
def test_ctrl_c_while_a_worker_is_forked(persistent: bool) -> None:
    """It is raised by `iter`, although exceptions of functions that are called at a fork are lost."""
    global interrupted_forks
    loader = DataLoader(Plain(4), 2, num_workers=2, persistent_workers=persistent)
    interrupted_forks = 1
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert not interrupted_forks
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


class Interrupted(Plain):
    """Sends Ctrl-C at one item, once: while that is made, or while its number is drawn as a sampler."""

    at = 5

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            self.at = -1
            signal.raise_signal(signal.SIGINT)
        return index

    def __iter__(self) -> Iterator[int]:
        return (self[index] for index in range(len(self)))


class Streamed(Interrupted, IterableDataset[int]):
    """The same, without indices."""

    def __iter__(self) -> Iterator[int]:
        return super().__iter__()


@pytest.mark.parametrize(
    ("dataset", "options", "repeated"),
    [
        (Interrupted, {}, True),
        (Interrupted, {"transform": torch.neg}, True),
        (Streamed, {}, False),
        (Plain, {"sampler": Interrupted(12)}, False),
        (Plain, {"sampler": Interrupted(12), "num_workers": 1, "prefetch_factor": 1}, False),
        (Plain, {"sampler": Interrupted(12), "num_workers": 1, "transform": torch.neg}, False),
    ],
)
def test_a_caught_ctrl_c_loses_no_batch(dataset: Any, options: dict[str, Any], repeated: bool) -> None:
    """Not in the dataset and not in the sampler: the batch is made again, or an error says how to go on with it."""
    if "sampler" in options:
        options["sampler"].at = 5
    loader = DataLoader(dataset(12), 2, **options)
    seen: list[int] = []
    caught = 0
    iterator = None
    while len(seen) < 12:
        try:
            iterator = iter(loader) if iterator is None else iterator
            for batch in iterator:
                seen += batch.abs().tolist()
            assert len(seen) == 12, "the epoch has ended early"
        except KeyboardInterrupt:
            caught += 1
        except FeedError as error:
            assert not repeated
            assert "interrupted at batch 2" in str(error)  # noqa: PT017 - some kinds raise none
            loader.load_state_dict(loader.state_dict())
            iterator, repeated = None, True
    assert (caught, repeated) == (1, True)
    assert seen == list(range(12))


class NoState(Plain):
    """Has a state only between epochs."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no state within an epoch")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("no state within an epoch")


def test_the_state_of_the_dataset_is_not_requested_for_each_batch() -> None:
    """A loop without `state_dict` calls none of the dataset, which may take long or raise."""
    assert [batch.tolist() for batch in DataLoader(NoState(4), 2)] == [[0, 1], [2, 3]]


class InterruptedState(Interrupted):
    """Has a state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_state_from_within_a_batch_is_named() -> None:
    """After Ctrl-C in a dataset with a state, the error does not promise the batch, whose state before is not known."""
    iterator = iter(DataLoader(InterruptedState(12), 2))
    with pytest.raises(KeyboardInterrupt):
        list(iterator)
    with pytest.raises(FeedError, match="at batch 2, and its state is one from within that batch"):
        next(iterator)


@pytest.mark.parametrize("options", [{"on_error": "skip"}, {"threads": 2}])
def test_batches_of_arrays_in_a_feeder(options: dict[str, Any]) -> None:
    """Batches of NumPy indices are not compared, which gives an array."""
    loader: Any = DataLoader(Plain(6), batch_sampler=[np.arange(3), np.arange(3, 6)], **options)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]


def test_fork_in_the_loop_body() -> None:
    """A child process of the loop body keeps its batch, cannot use the iterator, and disturbs nothing."""
    iterator = iter(DataLoader(Plain(list(ROWS.repeat(1, 20))), None, num_workers=2))
    for number, batch in enumerate(iterator):
        assert float(batch[0]) == ROWS[number, 0]
        if number % 10 == 3:
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    next(iterator)
                except IteratorClosedError:
                    status = 0 if float(batch[0]) == ROWS[number, 0] else 2
                finally:
                    os._exit(status)
            assert os.waitpid(pid, 0)[1] == 0
    assert number == 39


def test_two_threads_on_one_iterator() -> None:
    """Two threads that call ``next`` get each batch once."""
    iterator = iter(DataLoader(Plain(list(ROWS.repeat(1, 20))), None, num_workers=2))
    got: list[list[int]] = [[], []]

    def pull(into: list[int]) -> None:
        into.extend(int(batch[0]) // 1000 for batch in iterator)

    threads = [threading.Thread(target=pull, args=(each,)) for each in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(got[0] + got[1]) == list(range(40))
    assert all(each == sorted(each) for each in got)


@pytest.mark.parametrize("transform", [None, torch.neg])
def test_a_new_epoch_while_a_thread_is_in_the_one_before(transform: Any) -> None:
    """With persistent workers the thread's `next` raises an error, and the new epoch has all batches."""
    dataset = Gated()
    loader = DataLoader(dataset, None, num_workers=1, persistent_workers=True, transform=transform)
    iterator: Any = iter(loader)
    next(iterator)
    failed: list[Exception] = []

    def pull() -> None:
        try:
            while True:
                next(iterator)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=pull)
    thread.start()
    assert dataset.waiting.wait(60)
    batches, epoch = iterator._batches, iterator._batches.epoch

    def open_gate() -> None:
        until(lambda: batches.epoch > epoch)
        dataset.gate.set()

    opening = threading.Thread(target=open_gate)
    opening.start()
    seen = [abs(int(batch)) for batch in loader]
    opening.join(60)
    thread.join(60)
    assert seen == list(range(9))
    assert [type(error) for error in failed] == [IteratorClosedError]


# --- memory ---


def test_kept_batches_are_never_overwritten() -> None:
    """Batches, and views of them, that a script keeps stay as they are while many others pass."""
    n = 600
    loader = DataLoader(Numbered(n), None, num_workers=2)
    kept: dict[int, Any] = {}
    for number, batch in enumerate(loader):
        assert bool((batch == number).all())
        if number % 50 == 0:
            kept[number] = batch[5:10] if number % 100 else batch.numpy()[7:9]
        del batch
    assert len(kept) == 12
    assert all(bool((view == number).all()) for number, view in kept.items())


@pytest.mark.parametrize("kind", ["workers", "Dataset", "TensorDataset"])
def test_views_of_a_batch_that_is_moved_to_shared_memory(kind: str) -> None:
    """NumPy views made before ``share_memory_``, or before the batch is sent to a process, stay as they are."""
    rows = TensorDataset(torch.arange(48.0).repeat_interleave(17_000).reshape(48, 17_000))
    loader: Any = DataLoader(rows, 2, num_workers=2)
    if kind != "workers":
        loader = Feeder(Plain([row for (row,) in rows]) if kind == "Dataset" else rows, batch_size=2)
    kept = []
    for batch in loader:
        tensor = batch if kind == "Dataset" else batch[0]
        kept.append(tensor.numpy())
        tensor.share_memory_()
    assert [view[:, ::1000].tolist() for view in kept] == [[[n] * 17, [n + 1.0] * 17] for n in range(0, 48, 2)]


class Numbered(Plain):
    def __getitem__(self, index: int) -> Any:
        return torch.full((17_000,), float(index))


def test_a_list_of_many_batches() -> None:
    """``list(loader)`` of more batches than a process may map takes few descriptors."""
    descriptors = len(os.listdir("/proc/self/fd"))
    batches = list(DataLoader(Numbered(700), None, num_workers=1))
    assert len(os.listdir("/proc/self/fd")) < descriptors + 300
    assert all(bool((batch == number).all()) for number, batch in enumerate(batches))
    assert len(batches) == 700


def test_large_batches() -> None:
    """A batch of tens of MB arrives without a copy in the parent, and its memory is used again."""

    class Large(Plain):
        def __getitem__(self, index: int) -> Any:
            return torch.full((6_000_000,), float(index)), b"x" * 3_000_000

    addresses = set()
    for number, (batch, data) in enumerate(DataLoader(Large(12), None, num_workers=1)):
        assert bool((batch == number).all())
        assert len(data) == 3_000_000
        addresses.add(batch.data_ptr())
        del batch
    assert len(addresses) < 8


class Keeps(Plain):
    """Keeps the tensors of its batches, and changes them later."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.batches: list[Any] = []

    def collate(self, batch: Any) -> Any:
        collated = torch_data.default_collate([torch.full((20_000,), float(each)) for each in batch])
        for each in self.batches:
            assert len(each.unique()) == 1
            each += 100
        self.batches.append(collated)
        return collated


def test_a_collate_fn_that_keeps_its_batches() -> None:
    """Memory that a worker still refers to is not used for another batch, and its changes do not reach the parent."""
    dataset = Keeps(12)
    kept = []
    for number, batch in enumerate(DataLoader(dataset, 1, num_workers=1, collate_fn=dataset.collate)):
        assert bool((batch == number).all())
        if number % 2:
            kept.append(batch)
        del batch
    assert [batch.unique().tolist() for batch in kept] == [[number] for number in range(1, 12, 2)]


@pytest.mark.parametrize("kind", ["cuda", None])
def test_batches_of_workers_are_pinned(monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    """``pin_memory=True`` pins each batch once, for the kind of device that torch's iterator names (some name none)."""
    original, pinned = _BaseDataLoaderIter.__init__, []

    def with_accelerator(iterator: Any, loader: Any) -> None:
        original(iterator, loader)
        iterator._pin_memory, iterator._pin_memory_device = True, kind

    def pin_memory(batch: Any, device: str | None) -> Any:
        pinned.append((int(batch), device))
        return batch

    monkeypatch.setattr(_BaseDataLoaderIter, "__init__", with_accelerator)
    monkeypatch.setattr("aiofeed.loader.workers.batches.pin_memory", pin_memory)
    assert len(list(DataLoader(Plain(6), num_workers=2))) == 6
    assert pinned == [(number, kind) for number in range(6)]


class SlowFirst(Numbered):
    """Sample 0 is ready after sample 3 was requested, so that another worker sends sample 1 before it."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.requested = torch.multiprocessing.Event()

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            self.requested.set()
        if index == 0:
            self.requested.wait()
            self.requested.clear()
        return super().__getitem__(index)


def test_batches_of_epochs_that_were_left_are_freed() -> None:
    """Epochs that end by ``break`` use the same shared memory again and again, with persistent workers."""
    loader = DataLoader(SlowFirst(4), None, num_workers=2, persistent_workers=True)
    mappings = []
    for _ in range(12):
        next(iter(loader))
        mappings.append(shared_memory())
    assert max(mappings[6:]) <= max(mappings[:6])


def test_more_batches_are_kept_than_descriptors_are_left() -> None:
    """Batches that a script keeps use at most a quarter of the file descriptors that the process may open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64, limits[1]))
    try:
        kept = list(DataLoader(Numbered(200), None, num_workers=2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert all(bool((batch == number).all()) for number, batch in enumerate(kept))


# --- the loader as an object ---


@pytest.mark.parametrize("options", WORKERS)
def test_pickle_and_copy(options: dict[str, Any]) -> None:
    """A loader is pickled and copied before, during and after an epoch, and begins anew."""
    loader: DataLoader[Any] = DataLoader(Plain(8), 2, transform=abs, **options)
    expected = list(loader)
    iterator = iter(loader)
    next(iterator)
    for other in (pickle.loads(pickle.dumps(loader)), copy.copy(loader), copy.deepcopy(loader)):
        assert type(other) is DataLoader
        assert same(list(other), expected)
        assert other.transform is abs
        del other
    assert same(list(iterator), expected[1:])


def test_isinstance_and_signature() -> None:
    """It is torch's class with torch's parameters, in torch's order, and our own behind them."""
    loader = DataLoader(Plain(3))
    assert isinstance(loader, torch_data.DataLoader)
    assert issubclass(DataLoader, torch_data.DataLoader)
    assert isinstance(DataLoader[int](Plain(3)), DataLoader)
    ours = list(inspect.signature(DataLoader).parameters.values())
    theirs = list(inspect.signature(torch_data.DataLoader).parameters.values())
    for parameter in theirs:
        (mine,) = [each for each in ours if each.name == parameter.name]
        assert (mine.kind, mine.default) == (parameter.kind, parameter.default), parameter.name
    positional = [each.name for each in theirs if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [each.name for each in ours[: len(positional)]] == positional


def test_positional_arguments() -> None:
    loader = DataLoader(Plain(10), 4, False, None, None, 1, list, False, True, 30, None, "fork", None)
    assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_attributes_of_torch() -> None:
    """All public attributes of torch's loader have the same values."""
    for options in ({}, {"batch_size": 3, "shuffle": True, "num_workers": 2, "timeout": 3, "drop_last": True}):
        ours, theirs = DataLoader(Plain(9), **options), torch_data.DataLoader(Plain(9), **options)  # type: ignore
        for name, value in vars(theirs).items():
            mine = getattr(ours, name)
            assert type(mine) is type(value)
            if isinstance(value, int | float | str | None):
                assert mine == value, name


def test_attributes_that_scripts_set() -> None:
    """``collate_fn``, ``num_workers``, ``generator`` and ``worker_init_fn`` count from the next epoch on."""
    loader = DataLoader(Plain(6), 3)
    loader.collate_fn = sum  # type: ignore[assignment]
    assert list(loader) == [3, 12]
    loader.num_workers, loader.prefetch_factor = 1, 2
    loader.worker_init_fn = lambda worker: None
    assert list(loader) == [3, 12]
    loader.sampler_epoch = 3  # type: ignore[attr-defined]


def test_re_creation_from_its_own_attributes() -> None:
    """Lightning creates a loader anew from its attributes, with another sampler."""
    loader = DataLoader(Plain(10), 2, num_workers=1, persistent_workers=True, transform=abs, device=None)
    list(loader)
    attributes = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
    names = set(inspect.signature(type(loader).__init__).parameters) - {"self"}
    arguments = {name: value for name, value in attributes.items() if name in names}
    arguments["multiprocessing_context"] = loader.multiprocessing_context
    arguments.update(sampler=DistributedSampler(Plain(10), 2, 1, shuffle=False), shuffle=False, batch_sampler=None)
    other = type(loader)(**arguments)
    assert torch.cat(list(other)).tolist() == [1, 3, 5, 7, 9]
    assert other.transform is abs


def test_a_loop_of_epochs_and_validation() -> None:
    """Two loaders with persistent workers, one of which is left early, alternate as in a training script."""

    def script(cls: Any) -> list[Any]:
        seed_all(1)
        train = cls(Random(9), 2, shuffle=True, num_workers=1, persistent_workers=True, collate_fn=without_none)
        validation = cls(Random(4), 2, num_workers=1, persistent_workers=True, collate_fn=without_none)
        got = []
        for _ in range(3):
            for number, batch in enumerate(train):
                got.append(batch)
                if number == 2:
                    break
            got.extend(validation)
        return got

    assert same(script(DataLoader), script(torch_data.DataLoader))


async def _first(batches: AsyncIterator[Any]) -> Any:
    async for batch in batches:
        return batch
    return None


async def test_a_cancelled_task_closes_the_epoch() -> None:
    """A task that is cancelled while it waits for a batch leaves no process."""
    loader = DataLoader(Waits(), num_workers=1)

    async def consume() -> None:
        async for _ in loader:
            pass

    task = asyncio.create_task(consume())
    await asyncio.to_thread(until, lambda: children())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    gc.collect()
    for each in children():
        each.kill()
