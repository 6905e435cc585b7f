"""Resident data: the same batches as with streaming, ownership of memory, and data that do not fit."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import pickle
import signal
import sys
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from aiofeed import Feeder, FromDataset, Limits, Tensors
from aiofeed.errors import DeviceCopyError, IteratorClosedError, StateError
from aiofeed.resident.batch_ranges import BatchRange
from aiofeed.resident.device_windows import QUEUED_WINDOWS, DeviceWindows
from aiofeed.resident.host_windows import WINDOW_BYTES, HostWindows
from tests.support.device_cases import ACCELERATORS, EVERY_DEVICE, LATENCIES, DeviceCase, on
from tests.support.examples import examples
from tests.support.simulated_device import SimulatedDevice
from tests.support.states import edited_state

EXAMPLES = examples(250)


def data(n: int, width: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows whose values identify them, and labels."""
    x = torch.arange(n * width, dtype=torch.float32).reshape(n, width)
    return x, torch.arange(n) * 7


def host(batch: Any) -> list[torch.Tensor]:
    """Return a host copy of a batch, made on the current stream."""
    return [tensor.cpu().clone() for tensor in batch]


def equal(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    """Return whether batches are equal bit for bit, with dtypes and strides."""
    return len(one) == len(other) and all(
        len(left) == len(right)
        and all(
            a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
            for a, b in zip(left, right, strict=True)
        )
        for left, right in zip(one, other, strict=True)
    )


def windows_of(feeder: Feeder[Any]) -> Any:
    """Return the object that makes the windows of a feeder."""
    return feeder._session.pipeline.data.open()  # type: ignore[union-attr]


# --- the same as streaming --------------------------------------------------------------------------------------------

configurations = st.fixed_dictionaries(
    {
        "n": st.integers(0, 60),
        "batch_size": st.integers(1, 9),
        "world_size": st.integers(1, 4),
        "rank": st.integers(0, 3),
        "seed": st.integers(0, 1000),
        "shuffle": st.sampled_from([False, True, "keyed"]),
        "drop_last": st.booleans(),
        "pad": st.booleans(),
        "in_order": st.booleans(),
        "epoch": st.integers(0, 3),
    }
)
window_limits = st.sampled_from([None, 1, 300, 900])
devices = st.one_of(st.none(), st.tuples(st.sampled_from(LATENCIES), st.integers(0, 99)))


def options_of(config: dict[str, Any]) -> dict[str, Any]:
    options = {name: config[name] for name in ("batch_size", "seed", "shuffle", "drop_last", "pad", "in_order")}
    return options | {"shard": (config["rank"] % config["world_size"], config["world_size"])}


def simulated(device: tuple[Any, int] | None) -> SimulatedDevice | None:
    return None if device is None else SimulatedDevice(device[1], latency=device[0])


@pytest.mark.timeout(3600)
@settings(max_examples=examples(35), suppress_health_check=list(HealthCheck))
@given(config=configurations, memory=window_limits, device=devices, cut=st.integers(0, 12), alias=st.booleans())
def test_batches_and_states_are_those_of_streaming(
    config: dict[str, Any], memory: int | None, device: tuple[Any, int] | None, cut: int, alias: bool
) -> None:
    """Batches, lengths and states equal those of streaming for any order, shard, window and device, over a resume."""
    x, y = data(config["n"])
    options = options_of(config) | {"in_order": True}
    streaming = Feeder(FromDataset(TensorDataset(x, y)), **options)
    limits = None if memory is None else Limits(memory_bytes=memory)
    backend = simulated(device)

    def resident() -> Feeder[Any]:
        return Feeder(Tensors(x, y, alias=alias), limits=limits, device=backend, **options)

    first = resident()
    assert len(first) == len(streaming)
    wanted, wanted_states = [], []
    with streaming:
        streaming.set_epoch(config["epoch"])
        for _ in range(2):
            for batch in streaming:
                wanted.append(host(batch))
                wanted_states.append(streaming.state_dict())
    found, states = [], []
    first.set_epoch(config["epoch"])
    begun = first.state_dict()
    for batch in itertools.islice(itertools.chain(first, first), cut):
        found.append(host(batch))
        states.append(first.state_dict())
    state = json.loads(json.dumps(first.state_dict())) if found else begun
    del first
    second = resident()
    second.load_state_dict(state)
    for _ in range(2 if wanted and len(found) < len(wanted) else 0):
        for batch in second if len(found) < len(wanted) else ():
            found.append(host(batch))
            states.append(second.state_dict())
    assert equal(found, wanted)
    for mine, theirs in zip(states, wanted_states, strict=True):
        source = {"fingerprint": "", "receipt": ""}
        assert {**mine, **source} == {**theirs, **source}


@settings(max_examples=max(EXAMPLES // 20, 30), suppress_health_check=list(HealthCheck))
@given(config=configurations, handed_out=st.sets(st.integers(0, 11), max_size=6), memory=window_limits)
def test_a_state_with_gaps_resumes_to_what_is_left(
    config: dict[str, Any], handed_out: set[int], memory: int | None
) -> None:
    """After a resume from a state with gaps, exactly the batches returned before are left out."""
    x, y = data(config["n"])
    options = options_of(config) | {"in_order": False}
    limits = None if memory is None else Limits(memory_bytes=memory)
    found = []
    for source in (FromDataset(TensorDataset(x, y)), Tensors(x, y)):
        with Feeder(source, limits=limits if isinstance(source, Tensors) else None, **options) as feeder:
            gaps = [number for number in handed_out if number < len(feeder)]
            feeder.load_state_dict(edited_state(feeder.state_dict(), handed_out=gaps))
            found.append(sorted((host(batch) for batch in feeder), key=lambda batch: batch[1].tolist()))
    assert equal(*found)


def test_another_world_goes_on_with_what_is_left() -> None:
    """A state of one rank, resumed by two ranks with another batch size, covers the remaining samples."""
    x, y = data(37)
    one = Feeder(Tensors(x, y), batch_size=4, shuffle=True, shard=(0, 1))
    seen = [batch[1] for batch in itertools.islice(one, 3)]
    state = one.state_dict()
    for rank in range(2):
        two = Feeder(Tensors(x, y), batch_size=3, shuffle=True, shard=(rank, 2))
        two.load_state_dict(state)
        seen += [batch[1] for batch in two]
    assert set(torch.cat(seen).tolist()) == set(y.tolist())


def test_a_sampler_is_respected_and_resumed() -> None:
    """A sampler's indices come in order, with repeats, and a resume restores its generator."""
    x, y = data(20)

    def feeder() -> Feeder[Any]:
        sampler = torch.utils.data.RandomSampler(y, replacement=True, generator=torch.Generator().manual_seed(3))  # type: ignore[arg-type]
        return Feeder(Tensors(x, y), batch_size=3, sampler=sampler)

    whole = [host(batch) for batch in feeder()]
    first = feeder()
    before = [host(batch) for batch in itertools.islice(first, 2)]
    second = feeder()
    second.load_state_dict(first.state_dict())
    assert equal(before + [host(batch) for batch in second], whole)
    assert [batch[1].tolist() for batch in Feeder(Tensors(y, y), batch_size=2, sampler=[4, 4, 1])] == [[28, 28], [7]]


DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "float16", "float32", "float64", "bfloat16"),
    *("float8_e4m3fn", "complex64", "complex128"),
]


@on("host", "late", *ACCELERATORS)
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_arrives_as_it_is(name: str, device: DeviceCase) -> None:
    """All dtypes keep their bytes, also dtypes that numpy or index_select does not support."""
    dtype = getattr(torch, name)
    x = torch.randint(0, 2, (11, 3, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator()).view(dtype)
    feeder = Feeder(Tensors(x), batch_size=4, shuffle=True, device=device.backend)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0))
    batches = [host(batch)[0] for batch in feeder]
    assert {batch.dtype for batch in batches} == {dtype}
    assert torch.equal(torch.cat([batch.view(torch.uint8) for batch in batches]), x.view(torch.uint8)[order])


@pytest.mark.parametrize("column", [torch.arange(24).reshape(12, 2)[:, 1], torch.tensor([7]).expand(12)])
def test_a_column_of_a_table_has_a_state(column: torch.Tensor) -> None:
    """A strided or expanded column has the same fingerprint as its contiguous copy."""
    feeder: Feeder[Any] = Feeder(Tensors(column), batch_size=5)
    assert feeder.state_dict() == Feeder(Tensors(column.clone()), batch_size=5).state_dict()


@pytest.mark.parametrize("device", [None, "simulated"])
def test_arrays_and_odd_strides_give_what_streaming_gives(device: str | None, tmp_path: Any) -> None:
    """Reversed, record-field and memory-mapped arrays, and strided, expanded and empty tensors equal streaming."""
    np.save(tmp_path / "rows.npy", np.arange(60, dtype=np.uint16).reshape(12, 5))
    tensors: list[Any] = [
        np.load(tmp_path / "rows.npy", mmap_mode="r"),
        np.arange(24.0).reshape(2, 12).T,
        np.arange(24.0).reshape(12, 2)[::-1, ::-1],
        np.array([(1, row) for row in range(12)], dtype="u1, i4")["f1"],
        torch.arange(24.0).reshape(12, 2)[:, 1],
        torch.arange(12 * 24).reshape(12, 4, 3, 2).to(memory_format=torch.channels_last),
        torch.arange(12).unsqueeze(1).expand(12, 4),
        torch.zeros(12, 0),
        torch.view_as_complex(torch.arange(24.0).reshape(12, 2)).conj(),
    ]

    class Rows:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> tuple[Any, ...]:
            return tuple(np.array(t[index]) if isinstance(t, np.ndarray) else t[index] for t in tensors)

    for shuffle in (False, True):
        with Feeder(Rows(), batch_size=5, shuffle=shuffle) as streaming:
            wanted = [host(batch) for batch in streaming]
        backend = device and SimulatedDevice(seed=3)
        found = [host(batch) for batch in Feeder(Tensors(*tensors), batch_size=5, shuffle=shuffle, device=backend)]
        assert equal(found, [[tensor.resolve_conj() for tensor in batch] for batch in wanted])
    gc.collect()


def test_async_for_lets_other_tasks_run() -> None:
    """`async for` gives the same batches, runs other tasks between windows, and a cancellation loses nothing."""
    x, y = data(40)
    limits = Limits(memory_bytes=1)
    feeder: Feeder[Any] = Feeder(Tensors(x, y), batch_size=4, shuffle=True, limits=limits)

    async def run() -> tuple[list[Any], int]:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        iterator = aiter(feeder)
        found = [host(await anext(iterator)) for _ in range(3)]
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        with pytest.raises(asyncio.CancelledError):
            await anext(iterator)
        found += [host(batch) async for batch in iterator]
        task.cancel()
        await feeder.aclose()
        return found, turns

    found, turns = asyncio.run(run())
    assert equal(found, [host(batch) for batch in Feeder(Tensors(x, y), batch_size=4, shuffle=True)])
    assert turns >= 10


@pytest.mark.parametrize("asynchronous", [False, True])
def test_waiting_for_the_device_can_be_interrupted(asynchronous: bool) -> None:
    """While ``next`` waits for the device, the event loop runs and Ctrl-C interrupts the wait; no batch is lost."""

    class Event:
        def __init__(self, of: Any) -> None:
            self.of = of

        def query(self) -> bool:
            return not closed and bool(self.of.query())

        def synchronize(self) -> None:
            assert not closed, "waited in one blocking call"
            self.of.synchronize()

    class Device(SimulatedDevice):
        def record(self, stream: Any, /) -> Any:
            event = super().record(stream)
            return event if stream is self.side_stream() else Event(event)

        def wait(self, stream: Any, event: Any, /) -> None:
            super().wait(stream, getattr(event, "of", event))

    x, y = data(64, 256)
    closed = True
    limits = Limits(memory_bytes=1)
    feeder: Feeder[Any] = Feeder(Tensors(x, y), batch_size=4, shuffle=True, device=Device(), limits=limits)
    wanted = [host(batch) for batch in Feeder(Tensors(x, y), batch_size=4, shuffle=True)]

    async def run() -> list[Any]:
        nonlocal closed
        iterator = aiter(feeder)
        found = [host(await anext(iterator)) for _ in range(QUEUED_WINDOWS)]
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    while True:
                        found.append(host(await anext(iterator)))
        closed = False
        return found + [host(batch) async for batch in iterator]

    if asynchronous:
        assert equal(asyncio.run(run()), wanted)
        return
    iterator = iter(feeder)
    found = [host(next(iterator)) for _ in range(QUEUED_WINDOWS)]
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            while True:
                found.append(host(next(iterator)))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    closed = False
    assert equal(found + [host(batch) for batch in iterator], wanted)


# --- ownership of memory ----------------------------------------------------------------------------------------------

BIG = 30_000
"""Floats in a row: windows are large enough for their memory to be reused."""


def device_of(kind: str | None, seed: int = 0) -> SimulatedDevice | None:
    return None if kind is None else SimulatedDevice(seed, latency=kind)  # type: ignore[arg-type]


@on("host", *EVERY_DEVICE)
def test_kept_batches_are_never_overwritten(device: DeviceCase) -> None:
    """Batches that are kept over epochs do not change, also if others of their window are overwritten."""
    x, y = data(12, BIG)
    kept: list[tuple[Any, torch.Tensor]] = []
    feeder: Feeder[Any] = Feeder(
        Tensors(x, y), batch_size=2, shuffle=True, device=device.backend, limits=Limits(memory_bytes=1 << 20)
    )
    for epoch in feeder.epochs(8):
        for number, (rows, labels) in enumerate(feeder):
            if (number + epoch) % 3 == 0:
                kept.append((rows, labels.cpu().clone()))
            else:
                rows.fill_(-1)
    for rows, labels in kept:
        assert torch.equal(rows.cpu(), x[labels // 7])


@pytest.mark.parametrize("derive", ["detach", "view", "numpy", "numpy of a slice", "memoryview"])
def test_what_is_derived_from_a_batch_keeps_its_memory(derive: str) -> None:
    """Views and arrays of a dropped batch tensor are not overwritten by later windows."""
    x, y = data(12, BIG)
    functions: dict[str, Any] = {
        "detach": lambda rows: rows.detach(),
        "view": lambda rows: rows[1:, 5:].t(),
        "numpy": lambda rows: rows.numpy(),
        "numpy of a slice": lambda rows: rows[0].detach().numpy()[7:],
        "memoryview": lambda rows: memoryview(rows.numpy()),
    }
    feeder: Feeder[Any] = Feeder(Tensors(x, y), batch_size=2, shuffle=True, limits=Limits(memory_bytes=1))

    def plain(derived: Any) -> Any:
        return derived.tolist()

    iterator = iter(feeder)
    rows, _ = next(iterator)
    derived = functions[derive](rows)
    before = plain(derived)
    del rows
    for batch in itertools.chain(iterator, feeder, feeder):
        batch[0].fill_(-1)
    assert plain(derived) == before


@pytest.mark.parametrize("kind", [None, *LATENCIES])
@pytest.mark.parametrize("shuffle", [False, True])
def test_writing_into_a_batch_changes_nothing_else(kind: str | None, shuffle: bool) -> None:
    """Writing into a batch changes neither the data, nor other batches of its window, nor later epochs."""
    x, y = data(20)
    before = x.clone()
    feeder: Feeder[Any] = Feeder(Tensors(x, y), batch_size=4, shuffle=shuffle, device=device_of(kind))
    for _ in range(3):
        batches = list(feeder)
        batches[1][0].fill_(-1)
        batches[1][1].zero_()
        for number, (rows, labels) in enumerate(batches):
            if number == 1:
                assert bool((rows == -1).all())
            else:
                assert torch.equal(rows.cpu(), before[labels.cpu() // 7])
    assert torch.equal(x, before)


def test_padding_is_not_shared() -> None:
    """A repeated sample is copied: writing into one copy does not change the other."""
    [[rows]] = Feeder(Tensors(torch.zeros(1, 2)), batch_size=3, sampler=[0, 0, 0])
    rows[0] = 1
    assert rows.tolist() == [[1, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize("device", [None, "device"])
def test_batches_have_their_own_version_counters(device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write into one batch does not invalidate gradients of another batch of the same window."""
    x, _ = data(8)
    if device is None:
        one, other, *_ = [rows for [rows] in Feeder(Tensors(x), batch_size=2)]
    else:
        windows = DeviceWindows(PlainDevice(), Tensors(x), 2, 1 << 20)
        _, window = windows.make(BatchRange(range(2), np.arange(4), 2, run=False))
        [one], [other] = window(0, 2), window(2, 4)
        assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    weights = torch.ones(5, 1, requires_grad=True)
    loss = (one @ weights).sum()
    other.mul_(2)
    loss.backward()
    assert not one._is_view()


class PlainDevice(SimulatedDevice):
    """A device with plain torch tensors, whose operations run at once."""

    def copy(self, tensor: torch.Tensor, /) -> torch.Tensor:
        return tensor.clone()

    def record_stream(self, tensor: torch.Tensor, stream: Any, /) -> None:
        pass


def test_saving_a_batch_saves_no_more_than_the_batch(tmp_path: Any) -> None:
    """On the host each batch has its own storage."""
    x, _ = data(64, 1000)
    [rows] = next(iter(Feeder(Tensors(x), batch_size=2, shuffle=True)))
    torch.save(rows, tmp_path / "batch.pt")
    assert (tmp_path / "batch.pt").stat().st_size < 20_000


@pytest.mark.parametrize("kind", [None, "random"])
def test_batches_made_under_inference_mode(kind: str | None) -> None:
    """Batches made under inference_mode are not inference tensors."""
    x, _ = data(16)
    feeder: Feeder[Any] = Feeder(Tensors(x), batch_size=4, device=device_of(kind), limits=Limits(memory_bytes=1))
    iterator = iter(feeder)
    with torch.inference_mode():
        next(iterator)
    [rows] = next(iterator)
    assert not rows.is_inference()


@pytest.mark.parametrize("kind", [None, *LATENCIES])
def test_with_alias_unshuffled_batches_are_the_data(kind: str | None) -> None:
    """With alias=True unshuffled batches are views of the data; shuffled, sharded and sampled ones are copies."""
    x, y = data(11)
    source = Tensors(x, y, alias=True)
    feeder: Feeder[Any] = Feeder(source, batch_size=4, device=device_of(kind))
    assert torch.equal(torch.cat([host(batch)[0] for batch in feeder]), x)
    for rows, _ in feeder:
        rows[0] = -1
    changed = torch.cat([host(batch)[0] for batch in feeder])
    assert changed[:, 0].tolist() == [-1, 5, 10, 15, -1, 25, 30, 35, -1, 45, 50]
    if kind is None:
        assert torch.equal(x, changed)
    x, y = data(11)
    for options in ({"shuffle": True}, {"shard": (0, 2)}, {"sampler": range(11)}):
        for rows, _ in Feeder(Tensors(x, y, alias=True), batch_size=4, **options):  # type: ignore[arg-type]
            rows.fill_(-1)
    assert torch.equal(x, data(11)[0])


def test_memory_is_flat_over_hundreds_of_epochs() -> None:
    """On the host a constant number of blocks is used; batches that the user keeps use more until they are dropped."""
    x, y = data(8, BIG)
    feeder: Feeder[Any] = Feeder(Tensors(x, y), batch_size=2, shuffle=True, limits=Limits(memory_bytes=1))
    batch = None
    for epoch in range(400):
        for batch in feeder:  # noqa: B007 - the last one is kept until the next is made
            pass
        if epoch == 2:
            memory = windows_of(feeder)._memory
            blocks = {id(block) for block in memory._free} | {id(block) for _, block in memory._lent._watched.values()}
    assert {id(block) for block in memory._free} | {id(block) for _, block in memory._lent._watched.values()} == blocks
    assert len(blocks) <= 3
    kept = list(feeder)
    assert len(memory._lent) >= 4
    del kept, batch
    memory.close()
    assert len(memory._lent) <= 1


@pytest.mark.parametrize("latency", LATENCIES)
def test_device_memory_is_flat_and_within_the_limit(latency: str) -> None:
    """With any latency, device memory holds the data once and windows within memory_bytes."""
    x, y = data(64, 256)
    backend = device_of(latency)
    assert backend is not None
    total = x.nbytes + y.nbytes
    limit = 32 * 1024
    feeder: Feeder[Any] = Feeder(
        Tensors(x, y), batch_size=4, shuffle=True, device=backend, limits=Limits(memory_bytes=limit)
    )
    assert backend.reserved_bytes == 0  # nothing is uploaded before the first epoch
    for epoch in feeder.epochs(30):
        for rows, labels in feeder:
            backend.sleep(20)
            backend.launch(lambda a, b: None, rows, labels)
        if epoch == 4:
            reserved = backend.reserved_bytes
    # Allow for indices and rounding.
    assert backend.reserved_bytes <= total + limit + 16 * 1024
    assert backend.reserved_bytes <= reserved + 8 * 1024
    del rows, labels
    feeder.close()
    backend.synchronize()
    assert backend.allocated_bytes == 0


@pytest.mark.parametrize("latency", LATENCIES)
def test_device_memory_is_flat_with_breaks(latency: Any) -> None:
    """The limit holds if every iteration is left after one batch and the host never synchronises."""
    x, y = data(64, 256)
    backend = SimulatedDevice(latency=latency)
    limit = 32 * 1024
    feeder: Feeder[Any] = Feeder(
        Tensors(x, y), batch_size=4, shuffle=True, device=backend, limits=Limits(memory_bytes=limit)
    )
    for _ in range(100):
        rows, labels = next(iter(feeder))
        backend.sleep(20)
        backend.launch(lambda a, b: None, rows, labels)
    assert backend.reserved_bytes <= x.nbytes + y.nbytes + limit + 16 * 1024


def test_indices_of_small_rows_count_as_memory() -> None:
    """Indices, which are larger than small rows, count against memory_bytes."""
    n, limit = 1 << 20, 1 << 16
    backend = SimulatedDevice()
    feeder: Feeder[Any] = Feeder(
        Tensors(torch.zeros(n, dtype=torch.uint8)),
        batch_size=64,
        shuffle=True,
        device=backend,
        limits=Limits(memory_bytes=limit),
    )
    for _ in zip(range(1000), feeder, strict=False):
        assert backend.pinned_bytes <= 2 * limit
        assert backend.reserved_bytes <= n + 2 * limit


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 20))])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("latency", LATENCIES)
def test_no_wrong_byte_behind_slow_kernels(latency: str, several: bool, seed: int) -> None:
    """Slow kernels on one or several streams read the right data from batches that are dropped at once."""
    x, y = data(40, 64)
    backend = SimulatedDevice(seed, latency=latency)  # type: ignore[arg-type]
    streams = [backend.current_stream(), *(backend.new_stream() for _ in range(2 * several))]
    feeder: Feeder[Any] = Feeder(
        Tensors(x, y), batch_size=3, shuffle=True, seed=seed, device=backend, limits=Limits(memory_bytes=1 << 14)
    )
    wrong: list[bool] = []

    def check(rows: torch.Tensor, labels: torch.Tensor) -> None:
        wrong.append(not torch.equal(rows, x[torch.clamp(labels // 7, 0, 39)]))

    for _ in feeder.epochs(4):
        iterator = iter(feeder)
        for number in range(14):
            with backend.use_stream(streams[number % len(streams)]):
                batch = next(iterator)
                if number % 2 or several:
                    backend.sleep()
                backend.launch(check, *batch)
                del batch
        assert next(iterator, None) is None
    backend.synchronize()
    assert len(wrong) == 4 * 14
    assert not any(wrong)


def test_data_on_the_device_are_not_copied() -> None:
    """Tensors on the device are not copied, and work queued for them runs first."""
    backend = SimulatedDevice(latency="late")
    x, y = data(20)
    source = Tensors(backend.copy(x) * 2, backend.copy(y))
    copies = backend.copies
    feeder: Feeder[Any] = Feeder(source, batch_size=5, device=backend)
    assert torch.equal(torch.cat([host(batch)[0] for batch in feeder]), x * 2)
    assert backend.copies == copies
    assert source.fingerprint() == Tensors(x * 2, y).fingerprint()


# --- uploading, and data that do not fit ------------------------------------------------------------------------------


def test_the_data_are_uploaded_once() -> None:
    """The data are uploaded once for all epochs, resumes and iterators, dropped by close and then uploaded again."""
    x, y = data(20)
    backend = SimulatedDevice()
    feeder: Feeder[Any] = Feeder(Tensors(x, y), batch_size=5, device=backend)
    assert backend.copies == 0
    list(feeder)
    assert backend.copies == 2
    next(iter(feeder))
    iter(feeder)
    feeder.load_state_dict(feeder.state_dict())
    list(feeder)
    list(feeder)
    assert backend.copies == 2
    feeder.close()
    backend.synchronize()
    assert backend.allocated_bytes == 0
    list(feeder)
    assert backend.copies == 4


def test_device_memory_goes_with_the_feeder() -> None:
    """Device memory is freed with the feeder, without the garbage collector."""
    x, y = data(20)
    backend = SimulatedDevice()
    gc.disable()
    try:
        feeder: Feeder[Any] = Feeder(Tensors(x, y), batch_size=5, shuffle=True, device=backend)
        list(feeder)
        next(iter(feeder))
        gone = weakref.ref(feeder)
        del feeder
        assert gone() is None
        backend.synchronize()
        assert backend.allocated_bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_of_every_dtype_and_size(on_device: bool, shuffle: bool) -> None:
    """Windows on a device, which are gathered as words, equal those on the host bit for bit."""
    dtypes = [torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.int64, torch.complex128]
    tensors = []
    for dtype in dtypes:
        for shape in ((), (3,), (8,), (2, 4), (5, 1, 3)):
            values = torch.randint(0, 2, (22, *shape), dtype=torch.uint8).to(dtype)
            tensors.append(values[1:])  # begins inside a word, for some
    backend = SimulatedDevice()
    given = [backend.copy(tensor.contiguous()) for tensor in tensors] if on_device else tensors
    backend.synchronize()
    wanted = list(Feeder(Tensors(*tensors), batch_size=4, shuffle=shuffle, seed=1))
    found = list(Feeder(Tensors(*given), batch_size=4, shuffle=shuffle, seed=1, device=backend))
    for batch, other in zip(found, wanted, strict=True):
        for rows, others in zip(batch, other, strict=True):
            assert (rows.dtype, rows.shape, rows.stride()) == (others.dtype, others.shape, others.stride())
            assert torch.equal(rows.cpu(), others)


class Foreign(SimulatedDevice):
    """A device whose tensors are in memory that ``record_stream`` does not know, as if received through CUDA IPC."""

    def record_stream(self, tensor: torch.Tensor, stream: Any, /) -> None:
        if tensor.dtype is not torch.int32:  # the data; batches are memory of this process
            super().record_stream(tensor, stream)


@pytest.mark.parametrize("how", ["close", "drop"])
def test_data_of_another_process_are_kept_until_windows_of_them_are_made(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If feeder and data are dropped while a window is gathered, its rows are right."""
    monkeypatch.setattr("aiofeed.resident.device_windows._is_torchs", lambda tensor: False)
    backend = Foreign(latency="late")
    x = backend.copy(host := torch.arange(4000.0).view(100, 40))
    backend.synchronize()
    feeder: Feeder[Any] = Feeder(Tensors(x), batch_size=100, shuffle=True, device=backend)
    wanted = list(Feeder(Tensors(host), batch_size=100, shuffle=True))
    side = backend.new_stream("consumer")
    with backend.use_stream(side):
        [rows] = next(iter(feeder))
    if how == "close":
        feeder.close()
        gone = weakref.ref(x)
        del x, feeder
        assert gone() is None
    else:
        del x, feeder
    # Memory of tensors that are gone is poisoned on their stream.
    backend.record(backend.current_stream()).synchronize()
    with backend.use_stream(side):
        assert torch.equal(rows.cpu(), wanted[0][0])


class UnknownMemory(SimulatedDevice):
    """A device that does not report its memory."""

    memory = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [SimulatedDevice, UnknownMemory])
def test_data_that_do_not_fit_are_refused_with_the_figures(kind: Any) -> None:
    """The error comes at the first ``for`` line with required and free bytes and an alternative; nothing is leaked."""
    x, y = data(1000, 1000)
    backend = kind(memory_bytes=3 << 20)
    feeder: Feeder[Any] = Feeder(Tensors(x, y), batch_size=64, shuffle=True, device=backend)
    with pytest.raises(DeviceCopyError) as error:
        next(iter(feeder))
    message = str(error.value)
    assert "Tensors(float32 [1000, 1000], int64 [1000]) does not fit on simulated:0" in message
    assert "the data take 3.8 MiB" in message
    assert "two windows of one batch each 501.0 KiB" in message
    assert "TensorDataset" in message
    if kind is not UnknownMemory:
        assert "has 3.0 MiB free of 3.0 MiB" in message
    assert backend.allocated_bytes == 0
    assert len(feeder) == 16
    assert feeder.state_dict()["position"] == 0


@pytest.mark.parametrize("kind", [SimulatedDevice, UnknownMemory])
@pytest.mark.parametrize("latency", LATENCIES)
def test_windows_shrink_to_what_is_free(kind: Any, latency: str) -> None:
    """If memory is short, windows are smaller, down to one batch; batches are the same."""
    x, y = data(512, 256)
    backend = kind(latency=latency, memory_bytes=x.nbytes + y.nbytes + 96 * 1024)
    feeder: Feeder[Any] = Feeder(Tensors(x, y), batch_size=8, shuffle=True, device=backend)
    found = [host(batch) for _ in range(2) for batch in feeder]
    host_feeder: Feeder[Any] = Feeder(Tensors(x, y), batch_size=8, shuffle=True)
    assert equal(found, [host(batch) for _ in range(2) for batch in host_feeder])
    assert windows_of(feeder).max_batches < 16


def test_a_window_that_no_longer_fits_is_an_error_with_the_figures() -> None:
    """If other code takes the memory, the iteration ends with an error, and a resume continues at that batch."""
    x, y = data(64, 1024)
    backend = SimulatedDevice(memory_bytes=x.nbytes + y.nbytes + (1 << 20))
    feeder: Feeder[Any] = Feeder(
        Tensors(x, y), batch_size=8, shuffle=True, device=backend, limits=Limits(memory_bytes=1)
    )
    iterator = iter(feeder)
    found = [host(next(iterator))]
    backend.synchronize()
    hog = backend.copy(torch.zeros(backend.memory()[0] // 512 * 512 - 4096, dtype=torch.uint8))  # type: ignore[index]
    with pytest.raises(DeviceCopyError, match="a window of one batch of Tensors"):
        found.extend(host(batch) for batch in iterator)
    state = feeder.state_dict()
    assert state["position"] == 8 * len(found)
    del hog, iterator
    feeder.load_state_dict(state)
    found += [host(batch) for batch in feeder]
    assert equal(found, [host(batch) for batch in Feeder(Tensors(x, y), batch_size=8, shuffle=True)])


def test_a_failed_upload_names_the_data() -> None:
    """The error of a failed upload names data and device; the feeder can be iterated again."""
    backend = SimulatedDevice(copy_fails_at=2)
    feeder: Feeder[Any] = Feeder(Tensors(*data(9)), batch_size=2, device=backend)
    with pytest.raises(
        DeviceCopyError, match=r"uploading Tensors\(float32 \[9, 5\], int64 \[9\]\) to simulated:0 failed"
    ):
        next(iter(feeder))
    assert len(list(feeder)) == 5


def test_memory_bytes_bounds_the_windows_of_the_host() -> None:
    """Two windows fit into memory_bytes, with at least one batch each."""
    for memory_bytes, batches in ((1, 1), (2 * 4 * 8 * 100, 4), (1 << 40, WINDOW_BYTES // 800)):
        assert HostWindows(Tensors(torch.zeros(10, 25)), 8, memory_bytes).max_batches == batches


# --- the feeder's other guarantees ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, "simulated"])
def test_an_epoch_after_a_break_is_complete(device: str | None) -> None:
    """The epoch after a ``break`` starts with its own first batch."""
    backend = None if device is None else SimulatedDevice()
    feeder: Feeder[Any] = Feeder(Tensors(torch.arange(6)), batch_size=2, device=backend)
    for [x] in feeder:
        assert x.tolist() == [0, 1]
        break
    assert [x.tolist() for [x] in feeder] == [[0, 1], [2, 3], [4, 5]]


def test_no_threads_and_no_global_random_state() -> None:
    """No thread is started, and the global random generators do not change."""
    import random
    import threading

    x, y = data(30)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    threads = set(threading.enumerate())
    feeder: Feeder[Any] = Feeder(Tensors(x, y), batch_size=4, shuffle=True)
    for _ in feeder:
        assert set(threading.enumerate()) <= threads
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # type: ignore[union-attr]


def test_break_close_and_a_second_iterator() -> None:
    """As with streaming, a newer iterator closes the older one, and the feeder can be iterated after close."""
    feeder: Feeder[Any] = Feeder(Tensors(*data(12)), batch_size=3, shuffle=True)
    older = iter(feeder)
    next(older)
    newer = iter(feeder)
    with pytest.raises(IteratorClosedError, match="newer iterator"):
        next(older)
    assert feeder.epoch == 1
    next(newer)
    feeder.close()
    feeder.close()
    with pytest.raises(IteratorClosedError, match="was closed"):
        next(newer)
    with feeder:
        assert len(list(feeder)) == 4
        assert feeder.epoch == 2
    iterator = iter(feeder)
    assert len(list(iterator)) == 4
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_consumer_that_counts_batches_completes_its_epochs() -> None:
    """A consumer that takes len() batches and never asks for the end gets the next epoch."""
    feeder: Feeder[Any] = Feeder(Tensors(*data(12)), batch_size=3, shuffle=True)
    whole: Feeder[Any] = Feeder(Tensors(*data(12)), batch_size=3, shuffle=True)
    for _ in range(3):
        iterator = iter(feeder)
        found = [host(next(iterator)) for _ in range(len(feeder))]
        assert equal(found, [host(batch) for batch in whole])


def test_statistics_count() -> None:
    """Statistics count samples, batches, the time to the first batch and the time of making windows."""
    for kind, stage in ((None, "collate_s"), ("random", "copy_s")):
        feeder: Feeder[Any] = Feeder(Tensors(*data(11, 1000)), batch_size=3, device=device_of(kind))
        for _ in range(2):
            list(feeder)
            statistics = feeder.statistics()
            assert (statistics.samples, statistics.batches, statistics.failures) == (11, 4, 0)
            assert 0 < statistics.first_batch_s <= statistics.wall_s
            assert 0 < getattr(statistics, stage) <= statistics.stall_s
        assert feeder.statistics(total=True).samples == 22
        assert feeder.failures == ()


def test_transform() -> None:
    """transform gets each batch on the host or the device; its errors are raised at the ``for`` line."""

    def double(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return batch[0] * 2, batch[1]

    x, y = data(11)
    for kind in (None, *LATENCIES):
        feeder: Feeder[Any] = Feeder(Tensors(x, y), batch_size=3, transform=double, device=device_of(kind))
        assert torch.equal(torch.cat([rows.cpu() for rows, _ in feeder]), x * 2)

    def fail(batch: Any) -> Any:
        raise KeyError("constant")

    with pytest.raises(KeyError) as error:
        next(iter(Feeder(Tensors(x), batch_size=3, transform=fail)))
    assert error.value.__notes__ == ["in transform= of batch 0: it gets whole batches, decode= gets samples"]
    with pytest.raises(DeviceCopyError, match="transform raised KeyError on simulated:0") as device_error:
        next(iter(Feeder(Tensors(x), batch_size=3, transform=fail, device=device_of("random"))))
    assert device_error.value.__notes__ == ["in transform= of batch 0: it gets whole batches, decode= gets samples"]


def test_a_pickled_feeder_resumes() -> None:
    """A pickled feeder continues from a state of the original."""
    feeder: Feeder[Any] = Feeder(Tensors(*data(20)), batch_size=3, shuffle=True)
    whole = [host(batch) for batch in feeder]
    again: Feeder[Any] = Feeder(Tensors(*data(20)), batch_size=3, shuffle=True)
    next(iter(again))
    state = again.state_dict()
    other = pickle.loads(pickle.dumps(again))
    other.load_state_dict(state)
    assert equal([host(batch) for batch in other], whole[1:])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("width", [2, BIG])
def test_a_forked_child_goes_on_by_itself(width: int) -> None:
    """In a forked child the parent's iterator raises; a new one works and does not change the parent's batches."""
    feeder: Feeder[Any] = Feeder(Tensors(*data(12, width)), batch_size=3, shuffle=True)
    iterator = iter(feeder)
    kept = next(iterator)
    before = host(kept)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(IteratorClosedError, match="parent process"):
                next(iterator)
            for rows, _ in feeder:
                rows.numpy()[...] = -1  # without torch's threads, which do not survive a fork
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert equal([host(kept)], [before])
    assert len(list(iterator)) == 3


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Tensors(), TypeError, "at least one tensor or array"),
        (lambda: Tensors([1, 2]), TypeError, "argument 0 of Tensors must be a tensor or a numpy array, got list"),
        (lambda: Tensors(torch.zeros(3), torch.tensor(1)), ValueError, "argument 1 of Tensors has no dimensions"),
        (lambda: Tensors(torch.zeros(3), np.zeros(4)), ValueError, r"differ in length: \[3, 4\]"),
        (lambda: Tensors(np.array(["a"])), TypeError, "which torch cannot convert"),
        (lambda: Tensors(np.array([None])), TypeError, "which torch cannot convert"),
        (lambda: Tensors(np.ma.zeros(3)), TypeError, "MaskedArray"),
        (lambda: Tensors(np.zeros(3, ">f4")), TypeError, "not in native byte order"),
        (lambda: Tensors(torch.zeros(3, requires_grad=True)), TypeError, "requires grad"),
        (lambda: Tensors(torch.eye(3).to_sparse()), TypeError, "to_dense"),
        (lambda: Tensors(torch.zeros(3), alias=1), TypeError, "alias"),  # type: ignore[arg-type]
        (lambda: Tensors(np.broadcast_to(np.zeros(1), (3,)), alias=True), ValueError, "read-only"),
        (lambda: Tensors(torch.eye(3)[:, :2], alias=True), ValueError, "not contiguous"),
        (
            lambda: Feeder(Tensors(torch.zeros(3)), batch_size=1, decode=len),
            TypeError,
            "^decode= is not possible with Tensors",
        ),
        (lambda: Feeder(Tensors(torch.zeros(3)), batch_size=1, num_workers=4), TypeError, "num_workers"),
    ],
)
def test_invalid_arguments(make: Any, error: type[Exception], message: str) -> None:
    """Invalid arguments of Tensors and Feeder are refused with a message."""
    with pytest.raises(error, match=message):
        make()


def test_the_fingerprint() -> None:
    """The fingerprint depends on dtype, shape and contents; a tensor and an array of the same data are equal."""
    x, y = data(3000)
    feeder: Feeder[Any] = Feeder(Tensors(x, y), batch_size=4)
    next(iter(feeder))
    state = feeder.state_dict()
    Feeder(Tensors(x.numpy(), y.clone()), batch_size=4).load_state_dict(state)
    for other in (Tensors(x + 1, y), Tensors(x), Tensors(x.double(), y), Tensors(x, y.reshape(-1, 1))):
        with pytest.raises(StateError, match="fingerprint"):
            Feeder(other, batch_size=4).load_state_dict(state)


def test_any_policy_is_accepted() -> None:
    """Every on_error policy is accepted; no sample can fail."""
    for policy in ("raise", "skip", "replace"):
        assert len(list(Feeder(Tensors(*data(9)), batch_size=2, on_error=policy))) == 5  # type: ignore[arg-type]


def test_repr() -> None:
    """The repr of Tensors lists dtypes and shapes."""
    source = Tensors(torch.zeros(3, 2), np.zeros(3, np.int16), alias=True)
    assert repr(source) == "Tensors(float32 [3, 2], int16 [3], alias=True)"
    assert source.key(2) == "Tensors[2]"
    assert len(source) == 3


def test_arrays_need_no_torch() -> None:
    """``Tensors`` of arrays imports numpy but not torch."""
    import subprocess

    code = (
        "import sys, aiofeed, numpy; aiofeed.Tensors(numpy.zeros(3)).fingerprint(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
