"""engine="process" keeps every promise of the thread engine; only where the work is done differs."""

from __future__ import annotations

import gc
import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed import (
    CollateError,
    DecodeError,
    DecodeImage,
    FailurePolicy,
    Feeder,
    ImageFolder,
    IteratorClosedError,
    Limits,
    ReadError,
    TooManyFailures,
)
from aiofeed.processes.ipc.ring import INLINE_BYTES
from aiofeed.testing import SimulatedDevice
from tests.support import process_parts as parts
from tests.support.waiting import children, until


def numbers(feeder: Feeder[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in feeder]


def lines(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.exists() else []


def same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert left.stride() == right.stride() or not left.numel()
        # Types that have no equality are compared as another that holds them exactly.
        assert torch.equal(left.to(torch.float64), right.to(torch.float64))
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for name in left:
            same(left[name], right[name])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            same(one, other)
    elif isinstance(left, parts.Record):
        same(vars(left), vars(right))
    else:
        assert left == right


# --- what comes out ---


@pytest.mark.parametrize("engine", ["process", "process:3"])
def test_images_are_those_of_the_thread_engine_bit_for_bit(engine: str, jpeg_folder: Path) -> None:
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


def test_a_decoders_own_random_numbers_are_the_same() -> None:
    """`rng` is the sample's own, wherever it is decoded."""
    drawn = [
        torch.cat(list(Feeder(parts.Numbers(6), decode=parts.random_numbers, batch_size=4, seed=5, engine=engine)))
        for engine in ("thread", "process")
    ]
    assert torch.equal(*drawn)


def test_every_kind_of_batch_crosses() -> None:
    """Dicts, namedtuples, dataclasses, texts, bytes, foreign dtypes and orders: as the thread engine gives them."""
    expected, got = (
        list(
            Feeder(
                parts.Numbers(8), decode=parts.number, batch_size=4, collate_fn=parts.collate_structure, engine=engine
            )
        )
        for engine in ("thread", "process")
    )
    for one, other in zip(expected, got, strict=True):
        same(one, other)


def test_what_cannot_cross_is_a_collate_error_with_the_way_out() -> None:
    """An object of a type that has no description: its type, its place, and what to do."""
    feeder = Feeder(
        parts.Numbers(8), decode=parts.number, batch_size=4, collate_fn=parts.collate_opaque, engine="process"
    )
    with pytest.raises(CollateError, match=r"process_parts\.Opaque \(at batch\['extra'\]\[0\]\).*engine=\"thread\""):
        list(feeder)


def test_a_datasets_items_come_as_ever() -> None:
    """Each process has a copy of a map-style Dataset."""
    expected, got = (list(Feeder(parts.Squares(), batch_size=6, engine=engine)) for engine in ("thread", "process:2"))
    for one, other in zip(expected, got, strict=True):
        same(one, other)


def test_batches_that_grow_and_shrink() -> None:
    """A batch that is larger than any slot gets new memory; bytes are right throughout."""
    feeder = Feeder(parts.Numbers(300), decode=parts.growing, batch_size=1, engine="process:2", shuffle=True)
    for number, batch in zip(feeder._order.schedule().plans(feeder._checkpoint.next_position()), feeder, strict=True):
        index = number.indices[0]
        assert batch.shape == (1, (1 + index) * 1024)
        assert bool((batch == index % 251).all())


def test_large_batches_of_many_arrays_are_copied_beside_the_loop() -> None:
    """Beyond what the loop copies itself: the same bytes, and the slot comes back."""
    options = {"collate_fn": parts.collate_apart, "batch_size": 20, "engine": "process", "shuffle": True}
    with Feeder(parts.Numbers(100), decode=parts.large, **options) as feeder:
        for plan, batch in zip(feeder._order.schedule().plans(feeder._checkpoint.next_position()), feeder, strict=True):
            assert sum(array.nbytes for array in batch) > INLINE_BYTES
            assert [int(array[-1]) for array in batch] == plan.indices
            assert all(bool((array == array[0]).all()) for array in batch)
        assert feeder.statistics().copy_s > 0


def test_a_batch_that_is_kept_is_never_overwritten() -> None:
    """All batches of two epochs are kept, each in memory of its own; and writing into one changes that one alone."""
    with Feeder(parts.Numbers(24), decode=parts.large, batch_size=2, engine="process") as feeder:
        kept = [*feeder, *feeder]
        kept[3].fill_(255)
        for number, batch in enumerate(kept):
            if number != 3:
                assert [int(row[0]) for row in batch] == [number % 12 * 2, number % 12 * 2 + 1]
                assert bool((batch == batch[:, :1]).all())


def test_shards_state_and_epochs_are_the_trainers() -> None:
    """Rank, set_epoch and a resume in mid-epoch with another engine go on where they were."""

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
def test_out_of_order_slow_samples_hold_up_their_own_batches_only(engine: str, tmp_path: Path) -> None:
    """All other batches come while they are waited for, though there are more of them than may be decoded at a time."""
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
    """The same object, from an event loop."""
    async with Feeder(parts.Numbers(12), decode=parts.number, batch_size=4, engine="process") as feeder:
        assert [batch.tolist() async for batch in feeder] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


# --- where it runs ---


def test_a_process_that_decodes_does_not_import_torch() -> None:
    """Neither aiofeed nor the script of the trainer brings it there."""
    with Feeder(parts.Numbers(4), decode=parts.modules, batch_size=4, engine="process") as feeder:
        [batch] = feeder
    assert batch.tolist() == [[False, True]] * 4


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say what a process has mapped")
def test_a_process_that_decodes_images_has_no_torch(jpeg_folder: Path) -> None:
    """Not even its libraries, which are hundreds of megabytes."""
    decode = DecodeImage(16)
    with Feeder(ImageFolder(jpeg_folder), decode=decode, batch_size=2, engine="process") as feeder:
        next(iter(feeder))
        [child] = children()
        assert "libtorch" in Path("/proc/self/maps").read_text()
        assert "libtorch" not in Path(f"/proc/{child.pid}/maps").read_text()


def test_batches_are_spread_over_the_processes() -> None:
    """Every one of several engines has its part, and none is this process."""
    with Feeder(parts.Numbers(64), decode=parts.process_id, batch_size=1, engine="process:3") as feeder:
        seen = {int(batch) for batch in feeder}
        assert seen == {each.pid for each in children()}
    assert os.getpid() not in seen
    assert len(seen) == 3


def test_processes_live_from_epoch_to_epoch(tmp_path: Path) -> None:
    """One open and one close of the source, in the process, however many epochs."""
    notes = tmp_path / "notes"
    feeder = Feeder(parts.Noted(8, str(notes)), decode=parts.number, batch_size=4, engine="process")
    for _ in range(3):
        assert numbers(feeder) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    [child] = children()
    feeder.close()
    assert lines(notes) == [f"open {child.pid}", f"close {child.pid}"]


def test_limits_are_divided_and_statistics_are_of_the_whole(jpeg_folder: Path) -> None:
    """Bytes, seconds and counts of all processes add up in the epoch's statistics."""
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
def test_a_limit_that_does_not_reach_for_all_processes_is_refused(name: str, given: int, engines: int) -> None:
    """Each reads at least one sample at a time, and decodes in at least one thread: fewer cannot be kept to."""
    limits = Limits(**{name: given})
    with pytest.raises(ValueError, match=rf"{name}={given}.*process:{engines}.*at least {engines}.*process:{given}"):
        Feeder(parts.Numbers(8), decode=parts.number, batch_size=4, engine=f"process:{engines}", limits=limits)


def test_a_limit_of_one_for_each_process_is_kept_to(tmp_path: Path) -> None:
    """As many reads as processes: never more of them under way in all."""
    limits = Limits(read_concurrency=2, decode_threads=2)
    source = parts.Followed(24, str(tmp_path / "notes"))
    with Feeder(source, decode=parts.number, batch_size=4, engine="process:2", limits=limits) as feeder:
        assert numbers(feeder) == [list(range(at, at + 4)) for at in range(0, 24, 4)]
        found = feeder.statistics()
    assert (found.read_concurrency, found.decode_threads) == (2, 2)
    under_way = most = 0
    for line in lines(tmp_path / "notes"):
        under_way += {"begins": 1, "ends": -1}.get(line, 0)
        most = max(most, under_way)
    assert 1 <= most <= 2


def test_limits_of_reads_mean_nothing_to_a_dataset() -> None:
    """Its items are not read on the loop, and each process has a copy with threads of its own."""
    limits = Limits(read_concurrency=1, decode_threads=1)
    with Feeder(parts.Squares(8), batch_size=4, engine="process:2", limits=limits) as feeder:
        assert sum(len(numbers) for numbers, _ in feeder) == 8


def test_a_consumer_that_stops_bounds_everything(tmp_path: Path) -> None:
    """With the consumer at its first batches no more than prefetch_batches are decoded ahead."""
    notes = tmp_path / "notes"
    limits = Limits(prefetch_batches=2, read_concurrency=8)
    feeder = Feeder(
        parts.Numbers(400), decode=parts.CountingDecode(str(notes)), batch_size=4, engine="process", limits=limits
    )  # fmt: skip
    iterator = iter(feeder)
    for taken in (1, 2, 3):
        next(iterator)
        until(lambda taken=taken: len(lines(notes)) >= (taken + 2) * 4)  # type: ignore[misc]
        # What could come too much would be on its way by the time a word has gone there and back, a few times over.
        for _ in range(20):
            assert feeder._session.pipeline is not None
            feeder._session.pipeline.loop_thread.decode_pool.submit(int).result(10)
        assert len(lines(notes)) == (taken + 2) * 4
        assert feeder.statistics().queue_depth <= 2
    feeder.close()


# --- failures ---


@pytest.mark.parametrize("engine", ["process", "process:3"])
def test_a_read_error_is_raised_in_its_batchs_turn(engine: str) -> None:
    """All batches before it come first; key, index, stage and cause are those of the thread engine."""
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


def test_decode_errors_come_with_their_cause() -> None:
    """One of Python's own by its type, one that only the process knows by its name; then the feeder starts again."""
    feeder = Feeder(parts.Numbers(20), decode=parts.fails_at_seventeen, batch_size=4, engine="process")
    for _ in range(2):
        with pytest.raises(DecodeError, match=r"ZeroDivisionError: seventeen") as caught:
            list(feeder)
        assert type(caught.value.__cause__) is ZeroDivisionError
    feeder = Feeder(parts.Numbers(20), decode=parts.strange_at_seventeen, batch_size=4, engine="process")
    with pytest.raises(DecodeError, match="StrangeError: how strange") as caught:
        list(feeder)
    assert "process_parts.StrangeError" in str(caught.value.__cause__)


@pytest.mark.parametrize("action", ["skip", "replace"])
@pytest.mark.parametrize("collate_fn", [None, parts.collate_numbers])
def test_bad_samples_are_skipped_or_replaced_as_ever(action: Any, collate_fn: Any) -> None:
    """The same batches, and the same failures of them, as the thread engine's; neighbours that fail included."""
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
    """Those of all processes count together."""
    policy = FailurePolicy("skip", max_failures=2)
    feeder = Feeder(
        parts.Numbers(60, bad=(5, 20, 40)), decode=parts.number, batch_size=6, on_error=policy, engine="process:2"
    )
    seen = []
    with pytest.raises(TooManyFailures, match="3 samples failed"):
        for batch in feeder:
            seen += batch.tolist()
    assert seen == [number for number in range(36) if number not in (5, 20)]


def test_time_outs_and_retries_are_the_processes(tmp_path: Path) -> None:
    """A read that does not end within its time has failed, after the retries that were allowed."""
    policy = FailurePolicy("skip", retries=1, read_timeout_s=0.05)
    source = parts.SlowAt(12, (5,), str(tmp_path / "never"))
    with Feeder(source, decode=parts.number, batch_size=4, on_error=policy, engine="process") as feeder:
        assert numbers(feeder) == [[0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11]]
        assert (feeder.statistics().failures, feeder.statistics().retries) == (1, 1)


def test_an_error_of_open_is_raised_at_the_for_line() -> None:
    """The source's own error, with a note."""
    with pytest.raises(ConnectionError, match="no route") as caught:
        list(Feeder(parts.Unopenable(4), decode=parts.number, batch_size=2, engine="process:2"))
    assert "Unopenable.open()" in str(caught.value.__notes__)


# --- devices ---


@pytest.mark.parametrize("latency", ["late", "early", "random"])
def test_copies_to_a_device_leave_the_ring_unharmed(latency: Any, jpeg_folder: Path) -> None:
    """A slot is filled again only once its copy has run: pictures are right, whatever runs when."""
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
    from aiofeed.processes.ipc.ring import release_unused

    device.synchronize()
    until(lambda: (gc.collect(), release_unused(), device.pinned_bytes == 0)[-1])


def test_without_page_locked_memory_copies_are_right(caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be registered goes through memory of the trainer's own; a line says so."""
    device = SimulatedDevice(1, pin_fails=True)
    with Feeder(parts.Numbers(12), decode=parts.large, batch_size=4, device=device, engine="process") as feeder:
        assert [batch[:, 0].tolist() for batch in feeder] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert "cannot be pinned" in caplog.text


# --- what cannot be done ---


def test_what_cannot_travel_is_refused_when_the_feeder_is_made() -> None:
    """The argument, the reason and the way out."""
    with pytest.raises(TypeError, match=r"decode=.*lambda.*cannot travel.*top level of a module.*engine=\"thread\""):
        Feeder(parts.Numbers(4), decode=lambda data: data, batch_size=2, engine="process")
    source = parts.Numbers(4)
    source.lock = __import__("threading").Lock()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"source=.*lock"):
        Feeder(source, decode=parts.number, batch_size=2, engine="process")
    with pytest.raises(TypeError, match=r"collate_fn=.*<locals>"):

        def local(samples: list[Any]) -> Any:
            return samples

        Feeder(parts.Numbers(4), decode=parts.number, batch_size=2, collate_fn=local, engine="process")


@pytest.mark.parametrize("engine", ["processes", "process:", "process:0", "process:-1", "process:x", ""])
def test_engines_that_are_none_are_refused(engine: str) -> None:
    """With what was given and what is allowed."""
    with pytest.raises(ValueError, match=r'expected "thread", "process", or "process:4"'):
        Feeder(parts.Numbers(4), decode=parts.number, batch_size=2, engine=engine)
    with pytest.raises(TypeError, match="engine must be a str"):
        Feeder(parts.Numbers(4), decode=parts.number, batch_size=2, engine=4)  # type: ignore[arg-type]


def test_a_forked_child_is_told_that_the_iterator_is_the_parents() -> None:
    """As with threads; and the fork holds up nobody's end."""
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
    with open(read, "rb") as told:
        assert b"belongs to the parent process" in told.read()
    os.waitpid(pid, 0)
    assert next(iterator).tolist() == [4, 5, 6, 7]
    feeder.close()


# --- how many samples are read at a time ---


@pytest.mark.parametrize(("engine", "most"), [("process", 512), ("process:2", 256)])
def test_slow_reads_become_more_in_processes_too(engine: str, most: int) -> None:
    """Each process finds it out for its share, the trainer plans for as many, and statistics say how many."""
    samples, under_way = 6000, 0
    with Feeder(parts.Far(samples), decode=parts.number, batch_size=64, engine=engine) as feeder:
        assert feeder.statistics().read_concurrency == 64
        # The test's limit on time ends what never comes. The second: what 64 at a time cannot do.
        while under_way <= 64 or feeder.statistics().wall_s >= samples / 64 * 0.020:
            under_way = max(int(batch.max()) for batch in feeder)
            assert under_way <= most
        assert 128 <= feeder.statistics().read_concurrency <= 512


def test_processes_never_pass_a_given_read_concurrency() -> None:
    """However slow reads are: each keeps to its share of it."""
    limits = Limits(read_concurrency=16)
    with Feeder(parts.Far(600), decode=parts.number, batch_size=8, engine="process:2", limits=limits) as feeder:
        assert max(int(batch.max()) for _ in range(2) for batch in feeder) == 8
        assert feeder.statistics().read_concurrency == 16


def test_samples_too_large_for_a_process_to_read_a_chunk_of_them_at_a_time() -> None:
    """Each process reads fewer once it has seen how large they are; a chunk that waits by then is read all the same."""
    with Feeder(parts.Large(96), decode=parts.size, batch_size=48, engine="process:2") as feeder:
        assert [set(batch.tolist()) for batch in feeder] == [{10 << 20}] * 2
        assert feeder.statistics().read_concurrency < 64
