"""engine="process" behaves as engine="thread"; only the place of the work differs."""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from aiofeed import DataLoader, DecodeImage, FailurePolicy, Feeder, FeedError, ImageFolder, Limits, Processes
from aiofeed.errors import CollateError, DecodeError, IteratorClosedError, ReadError, TooManyFailures
from aiofeed.ipc.ring import INLINE_BYTES
from tests.support import process_parts as parts
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import children, until

pytestmark = pytest.mark.usefixtures("forked_workers")


def numbers(feeder: Feeder[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in feeder]


def lines(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.exists() else []


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert left.stride() == right.stride() or not left.numel()
        # Dtypes without equality are compared in one that represents them exactly.
        assert torch.equal(left.to(torch.float64), right.to(torch.float64))
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for name in left:
            assert_same(left[name], right[name])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, parts.Record):
        assert_same(vars(left), vars(right))
    else:
        assert left == right


# --- batches ---


@pytest.mark.parametrize("engine", ["process", "process:3"])
def test_images_equal_those_of_the_thread_engine_bit_for_bit(engine: str, jpeg_folder: Path) -> None:
    """Order, augmentation, targets and memory layout, over two epochs."""

    def feeder(engine: str) -> Feeder[Any]:
        decode = DecodeImage(24, crop="random", flip=True)
        return Feeder(ImageFolder(jpeg_folder), decode=decode, batch_size=5, shuffle=True, seed=3, engine=engine)

    with feeder("thread") as threads, feeder(engine) as processes:
        for _ in range(2):
            expected, got = list(threads), list(processes)
            assert len(got) == 8
            for (images, targets), (others, other_targets) in zip(expected, got, strict=True):
                assert torch.equal(images, others)
                assert torch.equal(targets, other_targets)
                assert images.stride() == others.stride()
        assert processes.statistics(total=True).samples == 72


def test_a_decoders_random_numbers_are_the_same() -> None:
    """`rng` belongs to the sample, wherever it is decoded."""
    drawn = [
        torch.cat(list(Feeder(parts.Numbers(6), decode=parts.random_numbers, batch_size=4, seed=5, engine=engine)))
        for engine in ("thread", "process")
    ]
    assert torch.equal(*drawn)


def test_every_kind_of_batch_is_preserved() -> None:
    """Dicts, namedtuples, dataclasses, strings, bytes, dtypes that NumPy lacks, and memory orders."""
    expected, got = (
        list(
            Feeder(
                parts.Numbers(8), decode=parts.number, batch_size=4, collate_fn=parts.collate_structure, engine=engine
            )
        )
        for engine in ("thread", "process")
    )
    for one, other in zip(expected, got, strict=True):
        assert_same(one, other)


def test_an_object_that_cannot_be_sent_is_a_collate_error() -> None:
    """The message has its type, its place in the batch, and what to do."""
    feeder = Feeder(
        parts.Numbers(8), decode=parts.number, batch_size=4, collate_fn=parts.collate_opaque, engine="process"
    )
    with pytest.raises(CollateError, match=r"process_parts\.Opaque \(at batch\['extra'\]\[0\]\).*engine=\"thread\""):
        list(feeder)


def test_items_of_a_dataset_are_the_same() -> None:
    """Each worker has a copy of a map-style Dataset."""
    expected, got = (list(Feeder(parts.Squares(), batch_size=6, engine=engine)) for engine in ("thread", "process:2"))
    for one, other in zip(expected, got, strict=True):
        assert_same(one, other)


def test_batches_that_grow_and_shrink() -> None:
    """A batch that is larger than any slot gets new memory; all bytes are correct."""
    feeder = Feeder(parts.Numbers(150), decode=parts.growing, batch_size=1, engine="process:2", shuffle=True)
    for number, batch in zip(feeder._order.schedule().plans(feeder._checkpoint.next_position()), feeder, strict=True):
        index = number.indices[0]
        assert batch.shape == (1, (1 + index) * 1024)
        assert bool((batch == index % 251).all())


def test_large_batches_of_many_arrays_are_copied_in_a_thread() -> None:
    """Above the size that the loop copies itself; all bytes are correct, and slots are freed."""
    options = {"collate_fn": parts.collate_apart, "batch_size": 20, "engine": "process", "shuffle": True}
    with Feeder(parts.Numbers(100), decode=parts.large, **options) as feeder:
        for plan, batch in zip(feeder._order.schedule().plans(feeder._checkpoint.next_position()), feeder, strict=True):
            assert sum(array.nbytes for array in batch) > INLINE_BYTES
            assert [int(array[-1]) for array in batch] == plan.indices
            assert all(bool((array == array[0]).all()) for array in batch)
        assert feeder.statistics().copy_s > 0


def test_a_batch_that_is_kept_is_never_overwritten() -> None:
    """Each batch of two epochs has its own memory; writing into one changes no other."""
    with Feeder(parts.Numbers(24), decode=parts.large, batch_size=2, engine="process") as feeder:
        kept = [*feeder, *feeder]
        kept[3].fill_(255)
        for number, batch in enumerate(kept):
            if number != 3:
                assert [int(row[0]) for row in batch] == [number % 12 * 2, number % 12 * 2 + 1]
                assert bool((batch == batch[:, :1]).all())


def test_shards_state_and_epochs_do_not_depend_on_the_engine() -> None:
    """Rank, set_epoch, and a state saved in mid-epoch and loaded with another engine."""

    def feeder(engine: str, **more: Any) -> Feeder[Any]:
        return Feeder(
            parts.Numbers(41), decode=parts.number, batch_size=4, shuffle=True, shard=(1, 2), engine=engine, **more
        )

    with feeder("thread") as threads, feeder("process:2") as processes, feeder("process") as resumed:
        assert len(threads) == len(processes)
        for each in (threads, processes):
            each.set_epoch(3)
        whole = numbers(threads)
        assert [batch.tolist() for batch in itertools.islice(processes, 3)] == whole[:3]
        state = json.loads(json.dumps(processes.state_dict()))
        resumed.load_state_dict(state)
        assert numbers(resumed) == whole[3:]
        assert resumed.epoch == 3


@pytest.mark.parametrize("engine", ["thread", "process", "process:2"])
def test_out_of_order_slow_samples_delay_only_their_own_batches(engine: str, tmp_path: Path) -> None:
    """All other batches arrive first, although they are more than may be decoded at a time."""
    gate = tmp_path / "gate"
    feeder = Feeder(
        parts.SlowAt(40, (1, 5, 9), str(gate)),
        decode=parts.number,
        batch_size=4,
        in_order=False,
        engine=engine,
        limits=Limits(prefetch_batches=2),
    )
    iterator = iter(feeder)
    seen = [next(iterator).tolist() for _ in range(7)]
    slow = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert not [batch for batch in slow if batch in seen]
    gate.touch()
    assert sorted(batch.tolist() for batch in iterator) == slow
    feeder.close()


async def test_async_for() -> None:
    """The same feeder, in async code."""
    async with Feeder(parts.Numbers(12), decode=parts.number, batch_size=4, engine="process") as feeder:
        assert [batch.tolist() async for batch in feeder] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


# --- processes ---


def test_batches_are_spread_over_the_workers() -> None:
    """Each of several workers assembles some, and this process none."""
    with Feeder(parts.Numbers(64), decode=parts.process_id, batch_size=1, engine="process:3") as feeder:
        seen = {int(batch) for batch in feeder}
        assert seen == {each.pid for each in children()}
    assert os.getpid() not in seen
    assert len(seen) == 3


def test_workers_live_for_several_epochs(tmp_path: Path) -> None:
    """The source is opened and closed once, in the worker, for any number of epochs."""
    notes = tmp_path / "notes"
    feeder = Feeder(parts.LoggedSource(8, str(notes)), decode=parts.number, batch_size=4, engine="process")
    for _ in range(3):
        assert numbers(feeder) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    [child] = children()
    feeder.close()
    assert lines(notes) == [f"open {child.pid}", f"close {child.pid}"]


def test_limits_are_divided_and_statistics_are_sums(jpeg_folder: Path) -> None:
    """The statistics of an epoch are those of all workers."""
    limits = Limits(decode_threads=3, read_concurrency=8)
    feeder = Feeder(
        ImageFolder(jpeg_folder), decode=DecodeImage(16), batch_size=6, engine="process:2", limits=limits
    )  # fmt: skip
    with feeder:
        list(feeder)
        found = feeder.statistics()
    assert (found.samples, found.batches, found.failures) == (36, 6, 0)
    assert found.bytes_read == sum(path.stat().st_size for path in jpeg_folder.rglob("*.jpg"))
    assert (found.decode_threads, found.read_concurrency) == (3, 8)
    assert min(found.read_s, found.decode_s, found.collate_s, found.copy_s, found.first_batch_s) > 0
    assert found.chunk_size > 0


@pytest.mark.parametrize("name", ["read_concurrency", "decode_threads"])
@pytest.mark.parametrize(("given", "engines"), [(1, 2), (2, 4), (3, 4)])
def test_a_limit_below_the_number_of_workers_is_refused(name: str, given: int, engines: int) -> None:
    """Each worker reads at least one sample at a time and decodes in at least one thread."""
    limits = Limits(**{name: given})
    with pytest.raises(ValueError, match=rf"{name}={given}.*process:{engines}.*at least {engines}.*process:{given}"):
        Feeder(parts.Numbers(8), decode=parts.number, batch_size=4, engine=f"process:{engines}", limits=limits)


def test_read_limits_do_not_apply_to_a_dataset() -> None:
    """Its items are not read on the loop, and each worker has a copy and its own threads."""
    limits = Limits(read_concurrency=1, decode_threads=1)
    with Feeder(parts.Squares(8), batch_size=4, engine="process:2", limits=limits) as feeder:
        assert sum(len(numbers) for numbers, _ in feeder) == 8


def test_a_paused_consumer_bounds_the_work_ahead(tmp_path: Path) -> None:
    """No more than prefetch_batches are decoded ahead."""
    notes = tmp_path / "notes"
    limits = Limits(prefetch_batches=2, read_concurrency=8)
    feeder = Feeder(
        parts.Numbers(400), decode=parts.CountingDecode(str(notes)), batch_size=4, engine="process", limits=limits
    )  # fmt: skip
    iterator = iter(feeder)
    for taken in (1, 2, 3):
        next(iterator)
        until(lambda taken=taken: len(lines(notes)) >= (taken + 2) * 4)  # type: ignore[misc]
        # A batch too many would have been decoded by the time of several round trips to another thread.
        for _ in range(20):
            assert feeder._session.pipeline is not None
            feeder._session.pipeline.loop_thread.decode_pool.submit(int).result(10)
        assert len(lines(notes)) == (taken + 2) * 4
        assert feeder.statistics().queue_depth <= 2
    feeder.close()


# --- failures ---


@pytest.mark.parametrize("engine", ["process", "process:3"])
def test_a_read_error_is_raised_in_order(engine: str) -> None:
    """After all earlier batches; key, index, stage and cause are those of the thread engine."""
    feeder = Feeder(parts.Numbers(40, bad=(17, 30)), decode=parts.number, batch_size=4, engine=engine)
    seen: list[int] = []
    with pytest.raises(ReadError, match=r"cannot read 'number 17'.*input/output error") as caught:
        for batch in feeder:
            seen += batch.tolist()
    assert seen == list(range(16))
    assert (caught.value.key, caught.value.index, caught.value.stage) == ("number 17", 17, "read")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == 5
    assert "process_parts.py" in "".join(caught.value.__cause__.__notes__)
    assert feeder.statistics().failures == 1


def test_decode_errors_have_their_cause() -> None:
    """With the type of a Python exception, or the name of a user's type; the feeder can be iterated again."""
    feeder = Feeder(parts.Numbers(20), decode=parts.fails_at_seventeen, batch_size=4, engine="process")
    for _ in range(2):
        with pytest.raises(DecodeError, match=r"ZeroDivisionError: seventeen") as caught:
            list(feeder)
        assert type(caught.value.__cause__) is ZeroDivisionError
    feeder = Feeder(parts.Numbers(20), decode=parts.strange_at_seventeen, batch_size=4, engine="process")
    with pytest.raises(DecodeError, match="StrangeError: how strange") as caught:
        list(feeder)
    assert "process_parts.StrangeError" in str(caught.value.__cause__)


def test_an_exception_that_cannot_be_formatted_is_a_decode_error_of_its_sample() -> None:
    """Its ``__str__`` raises SystemExit, and it takes no notes: the worker survives, and the other samples arrive."""
    options: dict[str, Any] = {"decode": parts.unprintable_at_seventeen, "batch_size": 4, "engine": "process"}
    with Feeder(parts.Numbers(20), **options) as feeder, pytest.raises(DecodeError, match="number 17"):
        list(feeder)
    with Feeder(parts.Numbers(20), on_error="skip", **options) as feeder:
        assert sum(numbers(feeder), []) == [each for each in range(20) if each != 17]


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_an_exception_of_collate_fn_that_cannot_be_formatted_is_a_collate_error(engine: Any) -> None:
    """Its ``__str__`` raises SystemExit: the error names the samples, and the thread or worker survives."""
    options: dict[str, Any] = {"decode": parts.number, "collate_fn": parts.unprintable_collate, "engine": engine}
    with Feeder(parts.Numbers(12), batch_size=4, **options) as feeder:
        for _ in range(2):
            iterator = iter(feeder)
            assert next(iterator).tolist() == [0, 1, 2, 3]
            with pytest.raises(CollateError, match=r"raised Unprintable \(samples 'number 4' to 'number 7'\)"):
                next(iterator)


@pytest.mark.parametrize("action", ["skip", "replace"])
@pytest.mark.parametrize("collate_fn", [None, parts.collate_numbers])
def test_bad_samples_are_skipped_or_replaced_as_by_threads(action: Any, collate_fn: Any) -> None:
    """The same batches and the same failures, also if neighbours fail."""
    seen = []
    for engine in ("thread", "process:2"):
        with Feeder(
            parts.Numbers(60, bad=(7, 8, 9, 31)),
            decode=parts.fails_at_seventeen,
            batch_size=6,
            shuffle=True,
            seed=4,
            collate_fn=collate_fn,
            on_error=FailurePolicy(action, max_failures=10),
            engine=engine,
        ) as feeder:
            batches = [numbers(feeder) for _ in range(2)]
            failures = [(each.key, each.index, each.stage, each.epoch, str(each.error)) for each in feeder.failures]
            seen.append((batches, failures, feeder.statistics().failures, feeder.statistics().samples))
    assert seen[0] == seen[1]
    assert len(seen[0][1]) == 10


def test_too_many_failures_stop_the_feeder() -> None:
    """The failures of all workers are counted together."""
    policy = FailurePolicy("skip", max_failures=2)
    feeder = Feeder(
        parts.Numbers(60, bad=(5, 20, 40)), decode=parts.number, batch_size=6, on_error=policy, engine="process:2"
    )
    seen = []
    with pytest.raises(TooManyFailures, match="3 samples failed"):
        for batch in feeder:
            seen += batch.tolist()
    assert seen == [number for number in range(36) if number not in (5, 20)]


def test_timeouts_and_retries_apply_in_the_worker(tmp_path: Path) -> None:
    """A read that times out has failed, after the allowed retries."""
    policy = FailurePolicy("skip", retries=1, read_timeout_s=0.05)
    source = parts.SlowAt(12, (5,), str(tmp_path / "never"))
    with Feeder(source, decode=parts.number, batch_size=4, on_error=policy, engine="process") as feeder:
        assert numbers(feeder) == [[0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11]]
        assert (feeder.statistics().failures, feeder.statistics().retries) == (1, 1)


def test_an_error_of_open_is_raised_in_the_consumer() -> None:
    """It is the source's own error, with a note."""
    with pytest.raises(ConnectionError, match="no route") as caught:
        list(Feeder(parts.Unopenable(4), decode=parts.number, batch_size=2, engine="process:2"))
    assert "Unopenable.open()" in str(caught.value.__notes__)


def test_an_error_of_open_that_refuses_notes_is_raised_in_the_consumer() -> None:
    """A frozen dataclass, for example; as a ``FeedError`` with its name."""
    with pytest.raises(FeedError, match=r"process_parts\.FrozenError"):
        list(Feeder(parts.UnopenableFrozen(4), decode=parts.number, batch_size=2, engine="process"))


# --- devices ---


@pytest.mark.parametrize("latency", ["late", "early", "random"])
def test_a_slot_is_not_reused_before_its_copy_to_the_device_has_run(latency: Any, jpeg_folder: Path) -> None:
    """Images are correct, however late the device's work runs."""
    source, decode = ImageFolder(jpeg_folder), DecodeImage(16)
    expected = list(Feeder(source, decode=decode, batch_size=4))
    device = SimulatedDevice(7, latency=latency)
    with Feeder(source, decode=decode, batch_size=4, device=device, engine="process") as feeder:
        for _ in range(3):
            for (images, targets), (wanted, labels) in zip(feeder, expected, strict=True):
                assert torch.equal(images.cpu(), wanted)
                assert torch.equal(targets.cpu(), labels)
        assert device.pinned_bytes > 0
    del feeder, images, targets
    gc.collect()
    from aiofeed.kernel.devices.pinned import release_unused

    device.synchronize()
    until(lambda: (gc.collect(), release_unused(), device.pinned_bytes == 0)[-1])


def test_without_page_locked_memory_batches_are_correct(caplog: pytest.LogCaptureFixture) -> None:
    """They are copied through memory of the trainer; one log line says so."""
    device = SimulatedDevice(1, pin_fails=True)
    with Feeder(parts.Numbers(12), decode=parts.large, batch_size=4, device=device, engine="process") as feeder:
        assert [batch[:, 0].tolist() for batch in feeder] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert "cannot be pinned" in caplog.text


# --- batches of any type ---


class _Labels(UserDict):  # type: ignore[type-arg]
    """A container that is no dict."""


class _Marked(torch.Tensor):
    """A tensor subclass."""


def _odd(samples: list[Any]) -> dict[Any, Any]:
    n = int(samples[0])
    return {
        ("key", n): {n},
        "container": _Labels(large=torch.full((100, 200), n), small=torch.tensor(n)),
        "subclass": torch.full((3, 4), n).as_subclass(_Marked),
        "objects": np.array([n, "text", None], object),
    }


def _picture(samples: list[Any]) -> Any:
    return Image.new("RGB", (100, 200), (int(samples[0]), 2, 3))


def test_values_of_any_type_are_sent() -> None:
    """What pickle can send, a worker process sends, as torch's workers do; tensors in it lie in shared memory."""
    feeder = Feeder(parts.Numbers(6), decode=parts.number, batch_size=2, engine="process", collate_fn=_odd)
    with feeder:
        kept = list(feeder)
    for batch, expected in zip(kept, ([0, 1], [2, 3], [4, 5]), strict=True):
        wanted = _odd(expected)
        assert list(batch) == list(wanted)
        assert batch[("key", expected[0])] == {expected[0]}
        assert type(batch["container"]) is _Labels
        assert all(torch.equal(batch["container"][name], wanted["container"][name]) for name in ("large", "small"))
        assert type(batch["subclass"]) is _Marked
        assert torch.equal(batch["subclass"], wanted["subclass"])
        assert batch["objects"].tolist() == wanted["objects"].tolist()
    with Feeder(parts.Numbers(2), decode=parts.number, batch_size=2, engine="process", collate_fn=_picture) as feeder:
        assert next(iter(feeder)).getpixel((9, 9)) == (0, 2, 3)


class _LargeDataset:
    """A dataset with an array of 20 MB."""

    def __init__(self) -> None:
        self.table = np.arange(5_000_000, dtype=np.float32).reshape(-1, 5)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.table[index]


def test_a_dataset_with_a_large_array() -> None:
    """It is sent to the worker process."""
    with Feeder(_LargeDataset(), batch_size=4, engine="process") as feeder:
        assert torch.equal(next(iter(feeder)), torch.arange(20.0).reshape(4, 5))


# --- refused arguments ---


def test_an_argument_that_cannot_be_pickled_is_refused_by_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the argument, the reason and what to do."""
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(TypeError, match=r"decode=.*lambda.*cannot be sent.*top level of a module.*engine=\"thread\""):
        Feeder(parts.Numbers(4), decode=lambda data: data, batch_size=2, engine="process")
    source = parts.Numbers(4)
    source.lock = __import__("threading").Lock()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"source=.*lock"):
        Feeder(source, decode=parts.number, batch_size=2, engine="process")
    with pytest.raises(TypeError, match=r"collate_fn=.*<locals>.*install cloudpickle"):

        def local(samples: list[Any]) -> Any:
            return samples

        Feeder(parts.Numbers(4), decode=parts.number, batch_size=2, collate_fn=local, engine="process")


@pytest.mark.parametrize("engine", ["processes", "process:", "process:0", "process:-1", "process:x", ""])
def test_an_unknown_engine_is_refused(engine: str) -> None:
    """The message has the value and the allowed ones."""
    with pytest.raises(ValueError, match=r'expected "thread", "process", or "process:4"'):
        Feeder(parts.Numbers(4), decode=parts.number, batch_size=2, engine=engine)
    with pytest.raises(TypeError, match="engine must be a str"):
        Feeder(parts.Numbers(4), decode=parts.number, batch_size=2, engine=4)  # type: ignore[arg-type]


def test_processes_are_the_engine_of_the_string() -> None:
    """``Processes(2)`` is ``"process:2"``, for a ``DataLoader``, too; the number must be a positive int."""
    with Feeder(parts.Numbers(64), decode=parts.process_id, batch_size=1, engine=Processes(2)) as feeder:
        assert {int(batch) for batch in feeder} == {each.pid for each in children()}
        assert len(children()) == 2
        assert "engine='process:2'" in repr(feeder)
    with pytest.raises(ValueError, match=r"decode_threads=1.*process:2.*at least 2"):
        Feeder(
            parts.Numbers(4), decode=parts.number, batch_size=2, engine=Processes(2), limits=Limits(decode_threads=1)
        )
    batches = [batch.tolist() for batch in DataLoader(list(range(8)), batch_size=2, engine=Processes(2))]
    assert batches == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(ValueError, match=r"Processes\(number=...\).*got 0"):
        Processes(0)
    with pytest.raises(TypeError, match=r"Processes\(number=...\).*got '4'"):
        Processes("4")  # type: ignore[arg-type]


def test_a_forked_child_cannot_use_the_iterator() -> None:
    """As with threads; and the trainer can close the feeder although the fork has its sockets."""
    feeder = Feeder(parts.Numbers(400), decode=parts.number, batch_size=4, engine="process")
    iterator = iter(feeder)
    next(iterator)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            next(iterator)
        except IteratorClosedError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as error:
        assert b"belongs to the parent process" in error.read()
    os.waitpid(pid, 0)
    assert next(iterator).tolist() == [4, 5, 6, 7]
    feeder.close()


# --- concurrent reads ---


@pytest.mark.parametrize(("engine", "most"), [pytest.param("process", 512, marks=pytest.mark.slow), ("process:2", 256)])
def test_concurrent_reads_are_tuned_in_workers(engine: str, most: int) -> None:
    """Each worker tunes its share; the trainer plans for all of them, and statistics report the sum."""
    samples, reading = 6000, 0
    with Feeder(parts.RemoteNumbers(samples), decode=parts.number, batch_size=64, engine=engine) as feeder:
        assert feeder.statistics().read_concurrency == 64
        # Until an epoch is faster than 64 reads at a time allow; the timeout of the test bounds this.
        while reading <= 64 or feeder.statistics().wall_s >= samples / 64 * 0.020:
            reading = max(int(batch.max()) for batch in feeder)
            assert reading <= most
        assert 128 <= feeder.statistics().read_concurrency <= 512


def test_workers_respect_a_given_read_concurrency() -> None:
    """Each worker respects its share, however slow reads are."""
    limits = Limits(read_concurrency=16)
    with Feeder(
        parts.RemoteNumbers(600), decode=parts.number, batch_size=8, engine="process:2", limits=limits
    ) as feeder:
        assert max(int(batch.max()) for _ in range(2) for batch in feeder) == 8
        assert feeder.statistics().read_concurrency == 16


def test_fewer_large_samples_are_read_at_a_time() -> None:
    """Once a worker knows their size; a chunk that already waits is read all the same."""
    with Feeder(parts.Large(96), decode=parts.size, batch_size=48, engine="process:2") as feeder:
        assert [set(batch.tolist()) for batch in feeder] == [{10 << 20}] * 2
        assert feeder.statistics().read_concurrency < 64
