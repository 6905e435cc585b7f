"""``in_order="samples"``: batches of whichever samples are ready, with exact states."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import pickle
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

from aiofeed import (
    Buckets,
    DataLoader,
    DecodeImage,
    DiskCache,
    FailurePolicy,
    Feeder,
    Files,
    FromDataset,
    HostCache,
    Limits,
    Tensors,
)
from aiofeed.errors import BatchFailedError, CollateError, ReadError, StateError, TooManyFailures
from aiofeed.kernel.engine.fetch.source import SourceFetcher
from aiofeed.kernel.feeder.pipeline import StreamingPipeline
from aiofeed.sample_order import sample_assembly as samples
from aiofeed.sample_order.sample_assembly import SampleAssembly
from tests.support.interrupts import Interrupt
from tests.support.simulated_device import SimulatedDevice
from tests.support.states import edited_state
from tests.support.waiting import until

SECONDS = 20


class Numbers:
    """A source of n samples; sample i is i. Reads of ``stuck`` samples wait until ``unblock``; ``broken`` ones fail."""

    def __init__(self, n: int, stuck: set[int] | None = None, broken: set[int] | None = None) -> None:
        self.n = n
        self.stuck = stuck or set()
        self.broken = broken or set()
        self._blocked: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def __len__(self) -> int:
        return self.n

    def key(self, index: int) -> str:
        return f"sample {index}"

    async def read(self, index: int) -> int:
        if index in self.broken:
            raise OSError("unreadable")
        if index in self.stuck:
            event = asyncio.Event()
            self._blocked.append((asyncio.get_running_loop(), event))
            await event.wait()
        return index

    def unblock(self) -> None:
        self.stuck = set()
        for loop, event in self._blocked:
            loop.call_soon_threadsafe(event.set)
        self._blocked.clear()


class Gate:
    """A decoder that blocks samples until ``open``."""

    def __init__(self, *stuck: int) -> None:
        self.stuck = set(stuck)
        self._open = threading.Event()

    def __call__(self, index: int) -> torch.Tensor:
        if index in self.stuck:
            assert self._open.wait(SECONDS)
        return torch.tensor(index)

    def open(self) -> None:
        self._open.set()


MakeFeeder = Callable[..., Feeder[Any]]


@pytest.fixture
def make() -> Iterator[MakeFeeder]:
    """`make(source, **options)`: a feeder with `in_order="samples"` and batches of two, closed after the test."""
    made: list[Feeder[Any]] = []

    def new(source: Any, **options: Any) -> Feeder[Any]:
        options = {"decode": torch.tensor, "batch_size": 2, "shard": None, "in_order": "samples", **options}
        made.append(Feeder(source, **options))
        return made[-1]

    yield new
    for feeder in made:
        feeder.close()
    made.clear()


def flat(batches: Any) -> list[int]:
    return [value for batch in batches for value in batch.tolist()]


def sizes(n: int, batch_size: int) -> list[int]:
    return [min(batch_size, n - at) for at in range(0, n, batch_size)]


# --- slow samples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
@pytest.mark.parametrize("stuck", [0, 7, 23])
def test_a_stuck_read_delays_its_own_group_only(make: MakeFeeder, batch_size: int, stuck: int, prefetch: int) -> None:
    """While one read is stuck, all samples but those that are read with it are returned in full batches."""
    source = Numbers(24, {stuck})
    limits = Limits(prefetch_batches=prefetch, read_concurrency=32, decode_threads=2)
    feeder = make(source, batch_size=batch_size, limits=limits)
    iterator = iter(feeder)
    got = [next(iterator).tolist() for _ in range(len(feeder) - 1)]
    assert all(len(batch) == batch_size for batch in got)
    assert stuck not in itertools.chain(*got)
    source.unblock()
    rest = next(iterator).tolist()
    assert stuck in rest
    assert sorted([*itertools.chain(*got), *rest]) == list(range(24))
    assert next(iterator, None) is None


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
@pytest.mark.parametrize("stuck", [0, 7, 23])
def test_a_stuck_decode_delays_its_own_chunk_only(make: MakeFeeder, batch_size: int, stuck: int, prefetch: int) -> None:
    """While one decode is stuck, all samples but those of its chunk are returned in full batches."""
    gate = Gate(stuck)
    limits = Limits(prefetch_batches=prefetch, decode_threads=2)
    feeder = make(Numbers(24), decode=gate, batch_size=batch_size, limits=limits)
    iterator = iter(feeder)
    got = [next(iterator).tolist() for _ in range(len(feeder) - 1)]
    assert all(len(batch) == batch_size for batch in got)
    assert stuck not in itertools.chain(*got)
    gate.open()
    assert sorted([*itertools.chain(*got), *flat(iterator)]) == list(range(24))


def test_stuck_chunks_do_not_use_up_the_look_ahead(make: MakeFeeder, monkeypatch: pytest.MonkeyPatch) -> None:
    """While all threads but one decode stuck chunks as large as batches, the last thread decodes the others."""
    monkeypatch.setattr(SourceFetcher, "job_sizes", lambda *_: (8, 8))
    gate = Gate(0, 8, 16)
    limits = Limits(prefetch_batches=1, decode_threads=4, read_concurrency=64)
    feeder = make(Numbers(64), decode=gate, batch_size=8, limits=limits)
    iterator = iter(feeder)
    assert sorted(flat(next(iterator) for _ in range(5))) == list(range(24, 64))
    gate.open()
    assert sorted(flat(iterator)) == list(range(24))


def test_slow_reads_are_read_one_by_one(make: MakeFeeder, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a group of reads that takes long, each sample is read alone, also by read_many."""
    monkeypatch.setattr(samples, "SLOW_GROUP_S", 0.0)
    monkeypatch.setattr(samples, "FAST_READ_S", 0.0)
    groups = []

    class Many(Numbers):
        async def read_many(self, indices: Sequence[int]) -> list[int]:
            groups.append(len(indices))
            return list(indices)

    feeder = make(Many(64), batch_size=8, limits=Limits(decode_threads=1, read_concurrency=8, prefetch_batches=1))
    assert sorted(flat(feeder)) == list(range(64))
    assert groups[0] > 1
    assert set(groups[-32:]) == {1}


def test_a_small_last_batch_leaves_the_jobs_of_the_others_as_they_are(
    make: MakeFeeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are decoded after it has begun, and would be cut into jobs of one sample."""
    sizes: list[int] = []
    count = SampleAssembly._next_chunk
    monkeypatch.setattr(SampleAssembly, "_next_chunk", lambda assembly: sizes.append(count(assembly)) or sizes[-1])

    def decode(index: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.tensor(index)

    limits = Limits(decode_threads=2, prefetch_batches=4, read_concurrency=64)
    feeder = make(Numbers(161), decode=decode, batch_size=16, limits=limits)
    for _ in range(2):
        assert sorted(flat(feeder)) == list(range(161))
    assert sizes.count(1) < 10


def test_stuck_samples_use_a_place_each_and_no_more(make: MakeFeeder) -> None:
    """With several reads stuck, what is read ahead is bounded, and the others go on until the end of the epoch."""
    source = Watched(40, {0, 3, 9, 17})
    feeder = make(source, batch_size=4, limits=Limits(prefetch_batches=1, read_concurrency=16, decode_threads=1))
    iterator = iter(feeder)
    most = 1 + math.ceil(16 / 4) + 1
    for taken in range(1, 7):
        assert len(next(iterator)) == 4
        assert len(source.reads) <= (taken + most) * 4
    source.unblock()
    assert len(flat(iterator)) == 16


def test_a_stopped_consumer_bounds_decoding(make: MakeFeeder) -> None:
    """While the consumer keeps a batch, about prefetch_batches more are decoded."""
    decoded = 0
    lock = threading.Lock()

    def decode(index: int) -> torch.Tensor:
        nonlocal decoded
        with lock:
            decoded += 1
        return torch.tensor(index)

    feeder = make(Numbers(600), decode=decode, batch_size=10, limits=Limits(prefetch_batches=2, decode_threads=2))
    iterator = iter(feeder)
    for taken in (1, 2, 3):
        next(iterator)
        settle(feeder)
        # Beyond the limit: a chunk per thread that began while no batch waited.
        assert (taken + 2) * 10 <= decoded <= (taken + 2 + 2) * 10
        assert feeder.statistics().queue_depth == 2


def settle(feeder: Feeder[Any]) -> None:
    """Wait until the engine has done all that its limits allow."""
    pipeline = feeder._session.pipeline
    assert isinstance(pipeline, StreamingPipeline)
    engine = pipeline._engine
    assert engine is not None
    made = engine.assembly
    assert isinstance(made, SampleAssembly)
    last = None
    for _ in range(200):
        done = threading.Event()
        pipeline.loop_thread.call(done.set)
        assert done.wait(SECONDS)
        pipeline.loop_thread.decode_pool.submit(int).result(SECONDS)
        state = made._chunks, made._decoded, made._full, engine.buffer.waiting, engine.admission.reading
        if state == last and not made._chunks and not made._full:
            return
        last = state


def test_a_batch_that_is_taken_is_released_though_only_batches_are_put_together(make: MakeFeeder) -> None:
    """No chunk is decoded meanwhile, at whose end it would be released."""
    begun, released = threading.Semaphore(0), threading.Semaphore(0)

    def collate(values: list[torch.Tensor]) -> torch.Tensor:
        begun.release()
        assert released.acquire(timeout=SECONDS)
        return torch.stack(values)

    limits = Limits(decode_threads=1, prefetch_batches=3)
    feeder = make(Numbers(6), collate_fn=collate, limits=limits)
    released.release()
    iterator = iter(feeder)
    assert begun.acquire(timeout=SECONDS)
    assert begun.acquire(timeout=SECONDS)
    pipeline: Any = feeder._session.pipeline
    engine, pool = pipeline._engine, pipeline.loop_thread.decode_pool
    until(lambda: pool.backlog == 1 and engine.buffer.waiting == 1)
    next(iterator)
    assert pool.backlog == 1
    released.release(2)
    until(lambda: len(pipeline.queue) >= 2)
    until(lambda: engine.buffer.waiting == 2)
    released.release(100)


def test_memory_bytes_allows_one_batch(make: MakeFeeder) -> None:
    """The smallest memory limit allows one batch at a time, and the epoch is complete."""
    feeder = make(Jittery(50), batch_size=4, limits=Limits(memory_bytes=1))
    for _ in range(2):
        assert sorted(flat(feeder)) == list(range(50))


# --- states -----------------------------------------------------------------------------------------------------------


class Jittery(Numbers):
    """Samples are read after different numbers of cycles of the event loop, so that they overtake each other."""

    def __init__(self, n: int, seed: int = 0) -> None:
        super().__init__(n)
        self.random = random.Random(seed)

    async def read(self, index: int) -> int:
        for _ in range(self.random.choice((0, 0, 1, 3, 40))):
            await asyncio.sleep(0)
        return await super().read(index)


class Watched(Numbers):
    """Records reads."""

    def __init__(self, n: int, stuck: set[int]) -> None:
        super().__init__(n, stuck)
        self.reads: list[int] = []

    async def read(self, index: int) -> int:
        self.reads.append(index)
        return await super().read(index)


ORDERS: list[dict[str, Any]] = [
    {},
    {"shuffle": True, "seed": 3},
    {"shuffle": "keyed", "drop_last": True},
    {"drop_last": True, "pad": False},
    {"shuffle": True, "pad": False},
]


@pytest.mark.parametrize("options", ORDERS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
def test_resuming_after_each_batch_is_exact(
    make: MakeFeeder, options: dict[str, Any], world_size: int, batch_size: int
) -> None:
    """Each rank returns its samples once, in batches of the sizes of in_order=True, over a resume at each batch."""
    # Small groups of reads, so that many samples overtake others.
    limits = Limits(read_concurrency=8, prefetch_batches=2)
    options = {"batch_size": batch_size, **options}
    for rank in range(world_size):
        mine = options | {"shard": (rank, world_size)}
        ordered = make(Numbers(23), **mine, in_order=True)
        batches = [batch.tolist() for batch in ordered]
        wanted = Counter(itertools.chain(*batches))
        feeder = make(Jittery(23, rank), limits=limits, **mine)
        iterator = iter(feeder)
        got: list[list[int]] = []
        while True:
            state = json.loads(json.dumps(feeder.state_dict()))
            if state["epoch"]:
                assert (state["position"], state["handed_out"]) == (0, [])
                break
            assert state["position"] // world_size + len(state["handed_out"]) == len(list(itertools.chain(*got)))
            # Alternately by the same iterator, and by one of a new feeder.
            if len(got) % 2:
                feeder.close()
                feeder = make(Jittery(23, rank), limits=limits, **mine)
                feeder.load_state_dict(state)
                assert feeder.state_dict() == state
                iterator = iter(feeder)
            got.append(next(iterator).tolist())
        assert next(iterator, None) is None
        assert Counter(itertools.chain(*got)) == wanted
        assert list(map(len, got)) == list(map(len, batches))
        assert len(feeder) == len(ordered) == len(got)
        feeder.close()
        ordered.close()


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("other", [1, 3, 7])
def test_the_batch_size_may_change(make: MakeFeeder, other: int, drop_last: bool) -> None:
    """With another batch size after a resume, the rest of the samples comes exactly once."""
    source = Numbers(40, {5, 6})
    options = {"shuffle": False, "drop_last": drop_last}
    feeder = make(source, batch_size=2, limits=Limits(decode_threads=2), **options)
    iterator = iter(feeder)
    got = [value for _ in range(12) for value in next(iterator).tolist()]
    state = feeder.state_dict()
    source.unblock()
    assert state["handed_out"]
    resumed = make(Numbers(40), batch_size=other, **options)
    resumed.load_state_dict(state)
    rest = [batch.tolist() for batch in resumed]
    left = 16 - 16 % other if drop_last else 16
    assert list(map(len, rest)) == sizes(left, other)
    assert not set(got) & set(itertools.chain(*rest))
    assert len(set(itertools.chain(*rest))) == left
    assert resumed.state_dict()["epoch"] == 1


@pytest.mark.parametrize("saved", [True, False, "samples"])
@pytest.mark.parametrize("here", [True, False, "samples"])
def test_states_without_gaps_are_interchangeable(make: MakeFeeder, saved: Any, here: Any) -> None:
    """A state of the first batches can be loaded by a feeder with any in_order."""
    feeder = make(Numbers(20), in_order=saved, limits=Limits(decode_threads=1, read_concurrency=1, prefetch_batches=1))
    iterator = iter(feeder)
    assert flat(next(iterator) for _ in range(3)) == [0, 1, 2, 3, 4, 5]
    state = feeder.state_dict()
    assert (state["in_order"], state["position"], state["handed_out"]) == (saved, 6, [])
    other = make(Numbers(20), in_order=here)
    other.load_state_dict(state)
    assert sorted(flat(other)) == list(range(6, 20))


@pytest.mark.parametrize(
    ("saved", "here", "unit"),
    [("samples", True, "samples"), ("samples", False, "samples"), (False, "samples", "batches")],
)
def test_states_with_gaps_are_not(make: MakeFeeder, saved: Any, here: Any, unit: str) -> None:
    """Numbers of samples are no numbers of batches: the error has both values of in_order."""
    feeder = make(Numbers(20, {0}), in_order=saved, limits=Limits(decode_threads=2))
    next(iter(feeder))
    state = feeder.state_dict()
    assert state["handed_out"]
    other = make(Numbers(20), in_order=here)
    with pytest.raises(StateError, match=f"in_order: {saved!r} in the state, {here!r} here .*the {unit} that were"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("shard", "message"),
    [((0, 4), "world_size: 2 in the state, 4 here"), ((1, 2), "rank: 0 in the state, 1 here")],
)
def test_another_world_or_rank_is_refused(make: MakeFeeder, shard: tuple[int, int], message: str) -> None:
    """Each rank has a state of its own, with or without gaps."""
    feeder = make(Numbers(20), shard=(0, 2))
    next(iter(feeder))
    with pytest.raises(StateError, match=f'{message}.*in_order="samples" .* must load the state that it has saved'):
        make(Numbers(20), shard=shard).load_state_dict(feeder.state_dict())


def test_random_numbers_belong_to_positions(make: MakeFeeder) -> None:
    """A sample's random numbers are those of in_order=True, whichever batch it is in, also after a resume."""

    def decode(index: int, *, rng: torch.Generator) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand((), generator=rng)])

    options: dict[str, Any] = {"decode": decode, "batch_size": 4, "shuffle": True, "seed": 7}
    wanted = sorted(row for batch in make(Numbers(30), in_order=True, **options) for row in batch.tolist())
    feeder = make(Jittery(30), **options)
    iterator = iter(feeder)
    got = [row for _ in range(3) for row in next(iterator).tolist()]
    resumed = make(Jittery(30), **options)
    resumed.load_state_dict(feeder.state_dict())
    assert sorted([*got, *(row for batch in resumed for row in batch.tolist())]) == wanted


def test_no_sample_of_the_next_epoch_comes_before_the_end_of_this_one(make: MakeFeeder) -> None:
    """While a sample of this epoch is stuck, the next one is read ahead, but its samples stay in their epoch."""
    source = Watched(8, {2})
    feeder = make(source, limits=Limits(decode_threads=2, read_concurrency=16))
    for epoch in feeder.epochs(2):
        iterator = iter(feeder)
        if epoch == 0:
            got = flat(next(iterator) for _ in range(3))
            source.unblock()
            got += flat(iterator)
        else:
            got = flat(iterator)
        assert sorted(got) == list(range(8))


# --- failed samples ---------------------------------------------------------------------------------------------------

SKIP = FailurePolicy("skip", max_failures=4)


def test_a_failed_sample_is_raised_and_the_rest_is_exact(make: MakeFeeder) -> None:
    """The error names the sample; after a resume without the fault all samples not returned come once."""
    source = Jittery(20)
    source.broken = {9}
    feeder = make(source, batch_size=3)
    got: list[int] = []
    with pytest.raises(ReadError, match="sample 9"):
        for batch in feeder:
            got += batch.tolist()
    assert 9 not in got
    source.broken = set()
    feeder.load_state_dict(feeder.state_dict())
    assert sorted(got + flat(feeder)) == list(range(20))


@pytest.mark.parametrize("batch_size", [2, 3, 8])
@pytest.mark.parametrize("broken", [{0}, {3, 4}, {0, 10, 19}])
def test_a_skipped_sample_leaves_a_batch_shorter(make: MakeFeeder, batch_size: int, broken: set[int]) -> None:
    """Skipped samples occupy a place: the number of batches stays, and the state counts them."""
    source = Jittery(20)
    source.broken = broken
    feeder = make(source, batch_size=batch_size, on_error=SKIP)
    got = []
    for batch in feeder:
        got.append(batch.tolist())
        state = feeder.state_dict()
        if state["epoch"] == 0:
            planned = len(got) + feeder.statistics().batches_left_out
            assert state["position"] + len(state["handed_out"]) == planned * batch_size
    assert len(got) + feeder.statistics().batches_left_out == len(feeder)
    assert sorted(itertools.chain(*got)) == sorted(set(range(20)) - broken)
    assert {failure.index for failure in feeder.failures} == broken
    assert feeder.statistics().failures == len(broken)


def test_a_batch_of_which_nothing_is_left_fails_on_several_ranks(make: MakeFeeder) -> None:
    """A batch all of whose samples failed raises `BatchFailedError`."""
    one, rank = Limits(decode_threads=1), (0, 2)
    feeder = make(Numbers(6, broken={2}), batch_size=1, on_error=SKIP, limits=one, shard=rank)
    with pytest.raises(BatchFailedError, match=r"the only sample of batch \d failed.*unreadable"):
        list(feeder)


def test_a_chunk_of_which_nothing_is_left_is_no_failure(make: MakeFeeder) -> None:
    """If the samples that are decoded together all fail, their batch is shorter."""
    broken = {0, 1}
    feeder = make(Numbers(8, broken=broken), batch_size=4, on_error=SKIP, limits=Limits(decode_threads=2))
    assert sorted(flat(feeder)) == [2, 3, 4, 5, 6, 7]
    assert len(feeder.failures) == 2


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_a_replaced_sample_keeps_the_sizes(make: MakeFeeder, batch_size: int) -> None:
    """Replacements are the next good samples of the epoch's order, as with in_order=True."""
    source = Jittery(20)
    source.broken = {4, 5, 19}
    options: dict[str, Any] = {"batch_size": batch_size, "on_error": FailurePolicy("replace", max_failures=4)}
    wanted = sorted(flat(make(Numbers(20, broken=source.broken), in_order=True, **options)))
    got = [batch.tolist() for batch in make(source, **options)]
    assert list(map(len, got)) == sizes(20, batch_size)
    assert sorted(itertools.chain(*got)) == wanted


def test_too_many_failures_end_the_epoch(make: MakeFeeder) -> None:
    """`max_failures` counts as with in_order=True."""
    policy = FailurePolicy("skip", max_failures=2)
    with pytest.raises(TooManyFailures):
        list(make(Numbers(40, broken={3, 8, 20}), batch_size=8, on_error=policy))


def test_a_sample_over_its_time_limit_is_skipped(make: MakeFeeder) -> None:
    """A decode that hangs fails after decode_timeout_s, and its chunk goes on after it."""
    gate = Gate(7)
    policy = FailurePolicy("skip", decode_timeout_s=0.2)
    feeder = make(Numbers(24), decode=gate, batch_size=4, on_error=policy)
    assert sorted(flat(feeder)) == [value for value in range(24) if value != 7]
    gate.open()
    assert [failure.index for failure in feeder.failures] == [7]


def test_samples_that_do_not_fit_together_are_named(make: MakeFeeder) -> None:
    """Samples of different structure in a batch are a `CollateError` that names one."""
    feeder = make(Numbers(8), decode=lambda index: [index] * (1 + index // 7), batch_size=8)
    with pytest.raises(CollateError, match=r"do not fit together.*'sample \d'"):
        list(feeder)


# --- batches ----------------------------------------------------------------------------------------------------------


def nested(index: int) -> dict[str, Any]:
    return {
        "array": np.full((3, 2), index, np.float32),
        "tensor": torch.full((2,), index),
        "number": index,
        "pair": (str(index), float(index)),
    }


@pytest.mark.parametrize("device", [False, True])
def test_batches_are_those_of_default_collate(make: MakeFeeder, device: bool) -> None:
    """Types, dtypes and values of batches of nested samples are those of in_order=True."""
    options: dict[str, Any] = {"decode": nested, "batch_size": 5, "device": SimulatedDevice() if device else None}
    [wanted], [got] = list(make(Numbers(5), in_order=True, **options)), list(make(Numbers(5), **options))
    assert list(got) == list(wanted)
    order = got["number"].tolist()
    for name in ("array", "tensor", "number"):
        assert got[name].dtype == wanted[name].dtype
        assert torch.equal(got[name].cpu(), wanted[name].cpu()[order])
    assert got["pair"][0] == tuple(map(str, order))
    assert got["pair"][1].dtype == torch.float64


def test_a_decoder_may_reuse_its_memory(make: MakeFeeder) -> None:
    """A sample's arrays are copied before the decoder is called again."""
    memory = threading.local()

    def decode(index: int) -> Any:
        if not hasattr(memory, "array"):
            memory.array, memory.tensor = np.zeros(4, np.int64), torch.zeros(4, dtype=torch.int64)
        memory.array[:] = index
        memory.tensor[:] = index
        return memory.array, [memory.tensor]

    rows = [
        row
        for array, [tensor] in make(Jittery(30), decode=decode, batch_size=4)
        for row in zip(array, tensor, strict=True)
    ]
    assert sorted(int(array[0]) for array, _ in rows) == list(range(30))
    assert all(array.tolist() == tensor.tolist() == [int(array[0])] * 4 for array, tensor in rows)


def test_collate_fn_gets_the_samples_of_a_batch(make: MakeFeeder) -> None:
    """A collate_fn gets a list of samples, which are not copied."""
    made = {}

    def decode(index: int) -> Any:
        made[index] = sample = np.array([index])
        return sample

    feeder = make(Jittery(21), decode=decode, collate_fn=list, batch_size=4)
    batches = list(feeder)
    assert list(map(len, batches)) == sizes(21, 4)
    seen = list(itertools.chain(*batches))
    assert all(made[int(sample[0])] is sample for sample in seen)
    assert len(seen) == 21


@pytest.fixture
def pictures(tmp_path: Path) -> Files:
    """Files with pictures; the label is the number, and the pictures differ in brightness."""
    from PIL import Image

    paths = []
    for number in range(12):
        paths.append(tmp_path / f"{number}.png")
        Image.new("RGB", (16, 16), (number * 10, 0, 255 - number)).save(paths[-1])
    return Files(paths, list(range(12)))


@pytest.mark.parametrize("cache", [None, "host", "disk", "device"])
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_images_stay_channels_last(
    make: MakeFeeder, pictures: Files, tmp_path: Path, cache: Any, device: bool, on_error: Any
) -> None:
    """Batches of decoded pictures are uint8 [N, 3, H, W] in channels_last memory with their labels, with any cache."""
    cache = DiskCache(tmp_path / "cache") if cache == "disk" else cache
    backend = SimulatedDevice() if device else None
    feeder = make(
        pictures, decode=DecodeImage(size=8), batch_size=5, cache=cache, device=backend, shuffle=True, on_error=on_error
    )
    for _ in range(3):
        seen = []
        for images, labels in feeder:
            images, labels = images.cpu(), labels.cpu()
            assert images.dtype == torch.uint8
            assert images.shape[1:] == (3, 8, 8)
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert images[:, 0, 4, 4].tolist() == [label * 10 for label in labels.tolist()]
            seen += labels.tolist()
        assert sorted(seen) == list(range(12))


@pytest.mark.parametrize("cache", ["host", "disk", "device"])
@pytest.mark.parametrize("device", [False, True])
def test_cached_samples(make: MakeFeeder, tmp_path: Path, cache: Any, device: bool) -> None:
    """With a cache every epoch has every sample, over a resume within the first and the second epoch."""
    backend = SimulatedDevice() if device else None
    caches = {"host": HostCache(), "disk": DiskCache(tmp_path / "cache"), "device": "device"}

    def new() -> Feeder[Any]:
        return make(Jittery(22), decode=row, batch_size=4, cache=caches[cache], device=backend, shuffle=True)

    feeder = new()
    for epoch in range(3):
        iterator = iter(feeder)
        got = [int(value) for _ in range(3) for value in next(iterator)[:, 0].cpu()]
        state = feeder.state_dict()
        assert state["epoch"] == epoch
        whole = got + [int(value) for batch in iterator for value in batch[:, 0].cpu()]
        assert sorted(whole) == list(range(22))
        resumed = new()
        resumed.load_state_dict(state)
        got += [int(value) for batch in resumed for value in batch[:, 0].cpu()]
        assert sorted(got) == list(range(22))


def row(index: int) -> np.ndarray[Any, Any]:
    return np.full(6, index, np.float32)


class Squares(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), index * index), index


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cache", [None, "host"])
def test_items_of_a_dataset(make: MakeFeeder, threads: int, cache: Any) -> None:
    """A Dataset's items each come exactly once, in batches of default_collate."""
    feeder = make(FromDataset(Squares(), threads=threads), decode=None, batch_size=4, cache=cache)
    for _ in range(2):
        batches = list(feeder)
        assert list(map(len, (labels for _, labels in batches))) == sizes(30, 4)
        assert sorted(label for _, labels in batches for label in labels.tolist()) == list(range(30))
        assert all(torch.equal(values[:, 0], labels**2) for values, labels in batches)


def test_tensors_never_wait_and_are_in_order(make: MakeFeeder) -> None:
    """Tensors give the batches of in_order=True, and go on from a state with gaps."""
    data = torch.arange(11)
    feeder = make(Tensors(data), decode=None)
    assert [batch.tolist() for [batch] in feeder] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
    feeder.load_state_dict(edited_state(feeder.state_dict(), epoch=0, position=2, handed_out=[1, 4]))
    iterator = iter(feeder)
    assert next(iterator)[0].tolist() == [2, 4]
    state = feeder.state_dict()
    assert (state["position"], state["handed_out"]) == (5, [1])
    assert [batch.tolist() for [batch] in iterator] == [[5, 7], [8, 9], [10]]
    feeder.load_state_dict(state)
    assert [batch.tolist() for [batch] in feeder] == [[5, 7], [8, 9], [10]]


def test_a_device_cache_goes_on_from_a_state_with_gaps(make: MakeFeeder) -> None:
    """Resident batches leave out the samples that were returned ahead."""
    feeder = make(Numbers(12), decode=row, batch_size=3, cache="device")
    list(feeder)
    feeder.load_state_dict(edited_state(feeder.state_dict(), epoch=1, position=1, handed_out=[2, 3, 9]))
    assert [batch[:, 0].tolist() for batch in feeder] == [[1, 2, 5], [6, 7, 8], [9, 11]]
    assert feeder.state_dict()["epoch"] == 2


def test_static_batches(make: MakeFeeder) -> None:
    """Batches in the same tensors."""
    feeder = make(Jittery(20), decode=row, batch_size=4, static_batches=True)
    seen, addresses = [], set()
    for batch in feeder:
        seen += batch[:, 0].tolist()
        addresses.add(batch.data_ptr())
    assert sorted(seen) == list(range(20))
    assert len(addresses) == 1


def test_two_devices(make: MakeFeeder) -> None:
    """Each batch is split among devices."""
    feeder = make(Jittery(20), decode=row, batch_size=4, device=[SimulatedDevice(), SimulatedDevice()])
    assert sorted(value for parts in feeder for part in parts for value in part[:, 0].cpu().tolist()) == list(range(20))


# --- consumers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"on_error": "skip"}])
def test_hundreds_of_short_epochs(make: MakeFeeder, options: dict[str, Any]) -> None:
    """Short epochs follow each other, each complete; no object is left."""
    feeder = make(Numbers(5), **options)
    before = 0
    for epoch in feeder.epochs(700):
        assert sorted(flat(feeder)) == [0, 1, 2, 3, 4]
        if epoch == 100:
            gc.collect()
            before = len(gc.get_objects())
    gc.collect()
    assert len(gc.get_objects()) < before + 500


def test_an_empty_source_has_empty_epochs(make: MakeFeeder) -> None:
    """Epochs without samples, or with all of them dropped, have no batches."""
    for feeder in (make(Numbers(0)), make(Numbers(3), batch_size=4, drop_last=True)):
        assert [(epoch, list(feeder)) for epoch in feeder.epochs(3)] == [(0, []), (1, []), (2, [])]


@pytest.mark.parametrize("way", ["break", "error", "close"])
def test_a_loop_that_is_left_goes_on_from_its_state(make: MakeFeeder, way: str) -> None:
    """After break, an exception in the loop's body or close, the state continues with the samples not returned."""
    for stop in range(1, 6):
        feeder = make(Jittery(21, stop), batch_size=4)
        got: list[int] = []
        try:
            for number, batch in enumerate(feeder, 1):
                got += batch.tolist()
                if number == stop:
                    if way == "error":
                        raise KeyError
                    break
        except KeyError:
            pass
        if way == "close":
            feeder.close()
        feeder.load_state_dict(feeder.state_dict())
        assert sorted(got + flat(feeder)) == list(range(21))


def test_ctrl_c_at_any_place_loses_and_repeats_nothing(make: MakeFeeder) -> None:
    """After Ctrl-C anywhere in a loop, the state continues with exactly the samples that were not returned."""
    feeder = make(Jittery(16), batch_size=4)
    place = 0
    while True:
        place += 7
        feeder.set_epoch(0)
        got: list[int] = []
        iterator = iter(feeder)
        with Interrupt(place) as interrupt:
            try:
                while True:
                    batch = next(iterator, None)
                    if batch is None:
                        break
                    got += batch.tolist()
            except KeyboardInterrupt:
                interrupt.left = -1
        if interrupt.left >= 0:
            break
        state = feeder.state_dict()
        feeder.load_state_dict(state)
        handed_out = state["position"] + len(state["handed_out"]) + 16 * state["epoch"]
        # Ctrl-C may come between `next` and the line that adds its batch to the list.
        assert handed_out - len(got) in (0, 4)
        rest = flat(feeder) if state["epoch"] == 0 else []
        assert len(set(got) | set(rest)) == len(got) + len(rest) == len(got) + 16 - handed_out
    assert place > 100


@pytest.mark.parametrize("kind", ["Dataset", "source"])
def test_a_copy_has_the_same_order(make: MakeFeeder, kind: str) -> None:
    """A pickled feeder fills batches with ready samples, too."""
    feeder = make(Squares(), decode=None) if kind == "Dataset" else make(Numbers(8))
    copy = pickle.loads(pickle.dumps(feeder))
    assert copy.state_dict() == feeder.state_dict()
    assert copy.state_dict()["in_order"] == "samples"
    assert len(list(copy)) == len(feeder)
    copy.close()


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"in_order": "sample"}, TypeError, "in_order must be True, False or \"samples\", got 'sample'"),
        ({"in_order": 1}, TypeError, "in_order must be True, False or .*got 1"),
        ({"engine": "process"}, ValueError, 'workers send whole batches: pass engine="thread", or in_order=F'),
        (
            {"batch_size": None, "batch_sampler": [[0, 1]]},
            ValueError,
            "moves samples to other batches: .*in_order=False",
        ),
        ({"batch_size": Buckets([1] * 8, [], [2])}, ValueError, "moves samples to other batches: .*in_order=False"),
    ],
)
def test_what_cannot_be_is_refused(
    make: MakeFeeder, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The message says why and what to write instead."""
    with pytest.raises(error, match=message):
        make(Numbers(8), **options)


def test_a_data_loader_refuses_it() -> None:
    """`aiofeed.DataLoader` takes what torch's takes; the error names `Feeder`."""
    with pytest.raises(TypeError, match=r"got 'samples'.*Feeder takes in_order="):
        DataLoader(Squares(), in_order="samples")  # type: ignore[arg-type]


@pytest.mark.parametrize("sampler", [[3, 1, 4, 1, 5, 9, 2, 6], DistributedSampler(range(16), 2, 1, shuffle=True)])
def test_a_sampler(make: MakeFeeder, sampler: Any) -> None:
    """The indices of a sampler each come exactly once, over a resume."""
    feeder = make(Jittery(16), sampler=sampler, batch_size=3)
    iterator = iter(feeder)
    got = next(iterator).tolist()
    state = feeder.state_dict()
    assert Counter(got + flat(iterator)) == Counter(sampler)
    feeder.load_state_dict(state)
    assert Counter(got + flat(feeder)) == Counter(sampler)
