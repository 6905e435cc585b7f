"""Ctrl-C at every possible place: it loses no batch, leaves no thread, and the interrupted call can be repeated."""

from __future__ import annotations

import _thread
import contextlib
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

from aiofeed import Feeder, FeedError, Limits, Tensors, prefetch
from aiofeed.errors import IteratorClosedError
from aiofeed.kernel.runtime import event_loop, threads
from aiofeed.kernel.runtime.queue import BatchQueue
from aiofeed.kernel.runtime.threads import DaemonThread
from tests.support import process_parts as parts
from tests.support.interrupts import Interrupt, interrupted_next
from tests.support.paths import PACKAGE
from tests.support.process_parts import Numbers
from tests.support.simulated_device import SimulatedDevice


def number(data: bytes) -> torch.Tensor:
    return torch.tensor(int(data))


@pytest.mark.parametrize(
    "options",
    [{}, {"device": True}, {"in_order": False}, {"in_order": "samples"}, {"transform": lambda batch: batch + 0}],
)
@pytest.mark.parametrize("step", [0, 1, 3])
def test_an_interrupted_next_loses_no_batch(options: dict[str, Any], step: int) -> None:
    """After Ctrl-C anywhere in `next`, the state does not count the batch, and the next `next` returns it, once."""
    if options.get("device"):
        options = {"device": SimulatedDevice()}
    feeder: Feeder[torch.Tensor] = Feeder(Numbers(16), decode=number, batch_size=4, **options)
    for place in range(1000):
        iterator = iter(feeder)
        seen = [next(iterator) for _ in range(step)]
        interrupted, reached = interrupted_next(iterator, place, seen)
        if interrupted:
            state = feeder.state_dict()
            ahead = len(state["handed_out"]) * (1 if options.get("in_order") == "samples" else 4)
            assert (state["position"] + ahead) % 16 == 4 * step, place
        seen += iterator
        assert sorted(torch.cat([batch.cpu() for batch in seen]).tolist()) == list(range(16)), place
        if not reached:
            break
    assert place > 10
    feeder.close()


@pytest.mark.parametrize(
    ("device", "step"), [(False, 0), (False, 1), (False, 2), pytest.param(True, 1, marks=pytest.mark.slow)]
)
def test_an_interrupted_next_of_resident_data_gives_no_wrong_batch(device: bool, step: int) -> None:
    """After Ctrl-C anywhere in `next`, the iterator goes on exactly or, if it was making a window on a device, raises
    `IteratorClosedError`; `load_state_dict(state_dict())` then goes on exactly."""
    limits = Limits(memory_bytes=64)  # a window of the host has two batches, one of the device has one
    closed = 0
    for place in range(2000):
        backend = SimulatedDevice() if device else None
        feeder: Feeder[list[torch.Tensor]] = Feeder(
            Tensors(torch.arange(10)), batch_size=2, device=backend, limits=limits
        )
        iterator = iter(feeder)
        seen = [next(iterator) for _ in range(step)]
        with Interrupt(place) as interrupt:
            try:
                seen.append(next(iterator))
            except KeyboardInterrupt:
                interrupt.left = -1
        try:
            seen += iterator
        except IteratorClosedError:
            closed += 1
            feeder.load_state_dict(feeder.state_dict())
            seen += feeder
        assert [x.cpu().tolist() for [x] in seen] == [[n, n + 1] for n in range(0, 10, 2)], place
        if interrupt.left >= 0:
            break
    assert place > (2 if step == 1 and not device else 10)  # the second batch of a window is ready
    # A window on the host is made again.
    assert (closed > 0) == device


class BadNumbers(Numbers):
    async def read(self, index: int) -> bytes:
        if index == 5:
            raise FileNotFoundError(index)
        return await super().read(index)


def refuse(batch: torch.Tensor) -> torch.Tensor:
    if 5 in batch.tolist():
        raise ValueError("refused")
    return batch


def end_early(batch: torch.Tensor) -> torch.Tensor:
    if 5 in batch.tolist():
        raise StopIteration
    return batch


FAILING: dict[str, Callable[[], Feeder[torch.Tensor]]] = {
    "source": lambda: Feeder(BadNumbers(12), decode=number, batch_size=4),
    "source of a device": lambda: Feeder(BadNumbers(12), decode=number, batch_size=4, device=SimulatedDevice()),
    "transform": lambda: Feeder(Numbers(12), decode=number, batch_size=4, transform=refuse),
    "transform that raises StopIteration": lambda: Feeder(
        Numbers(12), decode=number, batch_size=4, transform=end_early
    ),
    "transform of resident data": lambda: Feeder(
        Tensors(torch.arange(12)), batch_size=4, transform=lambda rows: refuse(*rows)
    ),
}


@pytest.mark.parametrize("kind", FAILING)
def test_an_interrupted_error_is_raised_by_the_next_call(kind: str) -> None:
    """After Ctrl-C anywhere in the `next` that raises an error, the next `next` raises an error, not StopIteration."""
    for place in range(1000):
        feeder = FAILING[kind]()
        iterator = iter(feeder)
        next(iterator)
        iterator._queue.peek(30)
        with Interrupt(place) as interrupt:
            try:
                next(iterator)
            except KeyboardInterrupt:
                interrupt.left = -1
            except Exception:
                pass
        if interrupt.left == -1:
            try:
                next(iterator)
            except StopIteration:
                pytest.fail(f"the epoch ended without its error after Ctrl-C at place {place}")
            except (FeedError, ValueError, RuntimeError):
                pass
        with pytest.raises((StopIteration, IteratorClosedError)):
            next(iterator)
        feeder.close()
        if interrupt.left >= 0:
            break
    assert place > 10


class InterruptedTransform:
    """Adds 100 to a batch in place; the second call is interrupted after that."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: Any) -> Any:
        tensor = batch[0] if isinstance(batch, list) else batch
        tensor += 100
        self.calls += 1
        if self.calls == 2:
            raise KeyboardInterrupt
        return tensor


TRANSFORMED: dict[str, Callable[[InterruptedTransform], Feeder[Any]]] = {
    "threads": lambda transform: Feeder(parts.Numbers(16), decode=parts.number, batch_size=4, transform=transform),
    "process": lambda transform: Feeder(
        parts.Numbers(16), decode=parts.number, batch_size=4, transform=transform, engine="process"
    ),
    "Tensors": lambda transform: Feeder(Tensors(torch.arange(16)), batch_size=4, transform=transform),
    "cached": lambda transform: Feeder(
        parts.Numbers(16), decode=parts.number, batch_size=4, transform=transform, cache="device"
    ),
}


@pytest.mark.parametrize("kind", TRANSFORMED)
def test_an_interrupted_transform_gives_no_wrong_batch(kind: str) -> None:
    """A batch whose transform was interrupted is an error, not transformed again; `state_dict` stands before it."""
    transform = InterruptedTransform()
    with TRANSFORMED[kind](transform) as feeder:
        iterator = iter(feeder)
        seen = [next(iterator)]
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        with pytest.raises(FeedError, match=r"interrupted at batch 1, .*load_state_dict\(feeder.state_dict\(\)\)"):
            next(iterator)
        feeder.load_state_dict(feeder.state_dict())
        seen += feeder
        assert torch.cat(seen).tolist() == list(range(100, 116))
        if kind == "cached":  # the second epoch is resident
            transform.calls = 0
            iterator = iter(feeder)
            next(iterator)
            with pytest.raises(KeyboardInterrupt):
                next(iterator)
            with pytest.raises(FeedError, match="interrupted at batch 1"):
                next(iterator)


def test_an_interrupted_transform_of_prefetch_gives_no_wrong_batch() -> None:
    """The next `next` raises an error."""
    batches = torch.arange(16).view(4, 4)
    iterator = iter(prefetch([batch.clone() for batch in batches], transform=InterruptedTransform()))
    assert next(iterator).tolist() == [100, 101, 102, 103]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(FeedError, match="interrupted at batch 1"):
        next(iterator)


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
async def test_a_transform_that_raises_stop_iteration_does_not_end_the_loop(kind: type[Exception]) -> None:
    """As in a generator, it becomes a `RuntimeError`, in `for` and in `async for`."""

    def transform(batch: Any) -> Any:
        raise kind

    feeder: Feeder[Any] = Feeder(Numbers(16), decode=number, batch_size=4, transform=transform)
    with pytest.raises(RuntimeError, match=kind.__name__):
        list(feeder)
    with pytest.raises(RuntimeError, match=kind.__name__):
        _ = [batch async for batch in feeder]
    await feeder.aclose()


def consume(iterator: Any, seen: list[int], errors: list[str]) -> None:
    try:
        for batch in iterator:
            seen.extend(batch.cpu().tolist())
    except RuntimeError as error:
        errors.append(str(error))


@pytest.mark.parametrize("device", [False, True])
def test_two_threads_in_next(device: bool) -> None:
    """A thread that meets another in `next` gets a `RuntimeError` at once; every batch is returned once."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(10):
            with Feeder(
                Numbers(400), decode=number, batch_size=4, device=SimulatedDevice() if device else None
            ) as feeder:
                iterator = iter(feeder)
                seen: list[int] = []
                errors: list[str] = []

                consumers = [
                    threading.Thread(target=consume, args=(iterator, seen, errors), daemon=True) for _ in range(2)
                ]
                for consumer in consumers:
                    consumer.start()
                for consumer in consumers:
                    consumer.join(30)
                    assert not consumer.is_alive()
                assert sorted(seen) == list(range(400))
                assert all("another thread is in next()" in error for error in errors)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("device", [False, True])
def test_a_close_from_another_thread_at_any_moment(device: bool) -> None:
    """`next` returns a batch, ends, or raises `IteratorClosedError`; nothing else, and never a batch twice."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number_of_run in range(100):
            feeder: Feeder[Any] = Feeder(
                Numbers(40), decode=number, batch_size=4, device=SimulatedDevice() if device else None
            )
            iterator = iter(feeder)
            closer = threading.Timer(number_of_run * 2e-5, feeder.close)
            seen: list[int] = []
            closer.start()
            with contextlib.suppress(IteratorClosedError):
                for batch in iterator:
                    seen.extend(batch.cpu().tolist())
            closer.join(30)
            assert seen == list(range(len(seen)))
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("device", [False, True])
def test_a_queue_emptied_while_its_batch_is_handed_out(device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If `close` drops the batch that `next` is about to return, `next` returns it; then the iterator is closed."""
    feeder: Feeder[Any] = Feeder(Numbers(40), decode=number, batch_size=4, device=SimulatedDevice() if device else None)
    iterator = iter(feeder)
    take = iterator._delivery.take

    def close_meanwhile(item: Any) -> Any:
        batch = take(item)
        closer = threading.Thread(target=feeder.close)
        closer.start()
        closer.join(30)
        return batch

    monkeypatch.setattr(iterator._delivery, "take", close_meanwhile)
    assert next(iterator).cpu().tolist() == [0, 1, 2, 3]
    with pytest.raises(IteratorClosedError):
        next(iterator)


FEEDERS: dict[str, Callable[[], Feeder[Any]]] = {
    "host": lambda: Feeder(Numbers(12), decode=number, batch_size=4),
    "device": lambda: Feeder(Numbers(12), decode=number, batch_size=4, device=SimulatedDevice()),
    "resident": lambda: Feeder(Tensors(torch.arange(12)), batch_size=4),
}


@pytest.mark.usefixtures("quick_collector")
@pytest.mark.parametrize("kind", FEEDERS)
def test_a_close_from_another_thread_during_iter(kind: str) -> None:
    """The iterator is then closed, or `close` came before `iter`; the next `iter` begins the same epoch."""
    closed = 0
    for place in range(0, 1000, 8):
        feeder = FEEDERS[kind]()
        with Interrupt(place, partial(feeder._session.stop, "the feeder was closed")) as meanwhile:
            iterator = iter(feeder)
        if meanwhile.left >= 0:
            feeder.close()
            break
        if not iterator.live:
            with pytest.raises(IteratorClosedError, match=r"^the feeder was closed$"):
                next(iterator)
            closed += 1
            iterator = iter(feeder)
        assert sum(1 for _ in iterator) == 3
        assert feeder.state_dict()["epoch"] == 1
        feeder.close()
    assert closed > 10


@pytest.mark.parametrize("kind", ["host", "device"])
def test_two_threads_in_iter(kind: str) -> None:
    """Of two threads that begin an epoch together, one gets all its batches and the other `IteratorClosedError`."""
    for _ in range(5):
        feeder = FEEDERS[kind]()
        together = threading.Barrier(2)
        ends: list[int | str] = []

        def consume_epoch(feeder: Feeder[Any], together: threading.Barrier, ends: list[int | str]) -> None:
            together.wait(10)
            iterator = iter(feeder)
            together.wait(10)
            try:
                ends.append(sum(1 for _ in iterator))
            except IteratorClosedError as error:
                ends.append(str(error))

        consumers = [
            threading.Thread(target=consume_epoch, args=(feeder, together, ends), daemon=True) for _ in range(2)
        ]
        for consumer in consumers:
            consumer.start()
        for consumer in consumers:
            consumer.join(10)
            assert not consumer.is_alive()
        feeder.close()
        assert 3 in ends
        assert any("newer iterator" in str(end) for end in ends)


@pytest.fixture
def quick_collector() -> Iterator[None]:
    """Exclude all existing objects from the hundreds of garbage collections."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("quick_collector")
@pytest.mark.parametrize("device", [False, True])
def test_an_interrupted_iter_leaves_no_threads(device: bool) -> None:
    """After Ctrl-C anywhere in `iter`, the threads of the epoch end, and the feeder can be iterated again."""
    feeder: Feeder[torch.Tensor] = Feeder(
        Numbers(12), decode=number, batch_size=4, device=SimulatedDevice() if device else None
    )
    before = set(threading.enumerate())
    for place in range(1000):
        with Interrupt(place) as interrupt:
            try:
                iterator = iter(feeder)
            except KeyboardInterrupt:
                interrupt.left = -1
        if interrupt.left >= 0:
            break
        gone(before)
    assert place > 10
    assert sum(1 for _ in iterator) == 3
    assert sum(1 for _ in feeder) == 3
    feeder.close()


@pytest.mark.usefixtures("quick_collector")
def test_an_interrupted_prefetch_leaves_no_threads() -> None:
    """After Ctrl-C anywhere in `iter` of `prefetch`, its threads end, and it can be iterated again."""
    before = set(threading.enumerate())
    batches = prefetch([torch.zeros(2)] * 3, device=SimulatedDevice())
    for place in range(1000):
        with Interrupt(place) as interrupt:
            try:
                iterator = iter(batches)
            except KeyboardInterrupt:
                interrupt.left = -1
        if interrupt.left >= 0:
            break
        gone(before)
    assert place > 10
    assert sum(1 for _ in iterator) == 3


def gone(before: set[threading.Thread]) -> None:
    """Wait until all threads except those in ``before`` have ended."""
    deadline = time.monotonic() + 10
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, left
        gc.collect()
        with contextlib.suppress(RuntimeError):  # a thread that is just being started cannot be joined
            next(iter(left)).join(0.05)


def interrupt_when(ready: Callable[[], bool]) -> threading.Thread:
    """Interrupt the main thread once `ready()`, without waking it, like a signal that comes just before it blocks."""

    def main() -> None:
        deadline = time.monotonic() + 10
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.001)
        _thread.interrupt_main()

    thread = threading.Thread(target=main)
    thread.start()
    return thread


def waits_in(name: str) -> Callable[[], bool]:
    """Return a function that tells whether the main thread is in a function of that name."""
    main = threading.main_thread().ident
    assert main is not None

    def ready() -> bool:
        frame: FrameType | None = sys._current_frames().get(main)
        while frame is not None and frame.f_code.co_name != name:
            frame = frame.f_back
        return frame is not None

    return ready


def test_a_signal_just_before_the_wait_is_handled() -> None:
    """A signal just before the main thread blocks in a queue does not wake it, so the queue polls for signals."""
    thread = interrupt_when(waits_in("_wait"))
    with pytest.raises(KeyboardInterrupt):
        BatchQueue[int]().get(20)
    thread.join()


@contextlib.contextmanager
def stuck_feeder() -> Iterator[tuple[Feeder[torch.Tensor], threading.Event]]:
    """A feeder whose decoder blocks until the event is set."""
    stuck, release = threading.Event(), threading.Event()

    def decode(data: bytes) -> torch.Tensor:
        stuck.set()
        release.wait()
        return number(data)

    feeder: Feeder[torch.Tensor] = Feeder(
        Numbers(12), decode=decode, batch_size=4, limits=Limits(decode_threads=1, prefetch_batches=1)
    )
    iterator = iter(feeder)
    try:
        assert stuck.wait(10)
        yield feeder, release
    finally:
        release.set()
        iterator.close()


def test_an_interrupted_close_can_be_repeated() -> None:
    """After Ctrl-C in close(), a second close() waits for the thread again."""
    with stuck_feeder() as (feeder, release):
        for _ in range(2):
            thread = interrupt_when(waits_in("join"))
            with pytest.raises(KeyboardInterrupt):
                feeder.close()
            thread.join()
        assert feeder._session.pipeline is not None
        assert not feeder._session.delivery.join(0.01)
        release.set()
        feeder.close()
        running = {thread.name for thread in threading.enumerate() if thread.name.startswith("aiofeed")}
        assert running <= {"aiofeed-decode-dataset"}  # of a dataset that another test keeps


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_leaving_a_with_block_on_exit_waits_only_the_exit_time(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On Ctrl-C or sys.exit, `with` waits EXIT_S for a stuck decoder, and the exit does not wait for it again."""
    monkeypatch.setattr(threads, "EXIT_S", 0.05)
    with stuck_feeder() as (feeder, _), contextlib.suppress(error), feeder:
        assert feeder._session.pipeline is not None
        assert feeder._session.pipeline.loop_thread in threads._registered()
        raise error
    assert "left behind" in caplog.text
    assert feeder._session.pipeline.loop_thread not in threads._registered()


def test_join_waits_for_a_thread_whose_start_was_interrupted() -> None:
    """A thread whose start raised KeyboardInterrupt may run, and join waits for it."""
    release = threading.Event()
    thread = DaemonThread(release.wait, "interrupted")
    real = thread.thread.start

    def start() -> None:
        real()
        raise KeyboardInterrupt

    thread.thread.start = start  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        thread.start()
    assert not thread.join(0.01)
    release.set()
    assert thread.join(10)


def test_threads_and_the_loop_are_created_where_no_signal_handler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread, where Ctrl-C may raise anywhere, neither waits in Thread.start nor creates an event loop."""
    callers = []
    start, new_loop = threading.Thread.start, event_loop.new_event_loop

    def recording_start(self: threading.Thread) -> None:
        callers.append(threading.current_thread())
        start(self)

    def recording_new_loop() -> Any:
        callers.append(threading.current_thread())
        return new_loop()

    monkeypatch.setattr(threading.Thread, "start", recording_start)
    monkeypatch.setattr(event_loop, "new_event_loop", recording_new_loop)
    with Feeder(Numbers(12), decode=number, batch_size=4, device=SimulatedDevice()) as feeder:
        list(feeder)
    assert len(callers) >= 3
    assert threading.main_thread() not in callers


def test_join_does_not_wait_for_a_thread_that_was_never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """If start was interrupted before the thread existed, join returns long before its timeout."""
    monkeypatch.setattr(threads, "BEGIN_S", 0.01)
    thread = DaemonThread(lambda: None, "never made")

    def start() -> None:
        raise KeyboardInterrupt

    thread.thread.start = start  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        thread.start()
    assert thread.join(1000)
    assert DaemonThread(lambda: None, "not started").join(1000)


def test_the_collector_runs_no_python_code_of_aiofeed() -> None:
    """Collecting a feeder runs no Python code, in which a Ctrl-C would be printed and lost."""
    feeder: Feeder[torch.Tensor] = Feeder(Numbers(12), decode=number, batch_size=4)
    list(feeder)
    feeder.close()
    called = []

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename.startswith(PACKAGE) or "_weakrefset" in frame.f_code.co_filename:
            called.append(frame.f_code.co_qualname)

    sys.setprofile(trace)
    try:
        del feeder
        gc.collect()
    finally:
        sys.setprofile(None)
    # asyncio keeps its tasks in a WeakSet, and threading its threads.
    assert not [name for name in called if "WeakSet" not in name]


def test_signal_handlers_are_not_changed() -> None:
    """Iterating does not change the signal handlers."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    feeder: Feeder[torch.Tensor] = Feeder(Numbers(12), decode=number, batch_size=4)
    list(feeder)
    feeder.close()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
