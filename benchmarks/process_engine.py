"""How much does ``engine="process"`` slow a training loop in Python, and how long does a batch take to arrive?

First, a step that holds the GIL all the time (a loop in Python, about 25 ms) while one thread decodes JPEGs, in the
training's process or in a worker process: its median time, compared with the same step alone on one core less, and
with the same step beside a bare process that decodes, which shows how much the cores slow each other; and the images
per second. Second, the time from the end of a 10 MB batch's decoding in the other process to the waiting consumer:
in total, and without the time of one copy, as measured by the reader of two bare processes (shared memory and a pipe);
the same for a worker of ``DataLoader`` and for the two bare processes. The engine delivers the batch in shared memory
without a copy, so its second figure may be negative.

Targets: a step at most 1.05 of the step alone; arrival at most 100 microseconds beyond the copy.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.data import files_below, jpeg_folder
from benchmarks.figures import Figure, at_most, column, per, rates
from benchmarks.harness import Contender, Measure, Settings, interleave

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

TITLE = 'engine="process"'

SIZE = 224
BATCH = 16
STEP_ROUNDS = 300_000
LARGE_BYTES = 10_000_000
DECODE_S = 0.015


def run(settings: Settings) -> list[Figure]:
    steps = settings.size(60, 3)
    options = {"folder": str(jpeg_folder(settings.data, settings.size(1024, 96))), "steps": steps}
    imports = ("torch", "aiofeed:Feeder", "aiofeed:DecodeImage")
    alone = Contender("alone", step_alone, {"steps": steps}, ("torch",))
    beside = [
        Contender(f'engine="{engine}"', step_beside, {**options, "engine": engine}, imports)
        for engine in ("process", "thread")
    ]
    bare = Contender("a bare decoding process", step_beside_bare, options, ("torch",))
    samples = interleave([alone, bare, *beside], settings)
    step = {label: column(rounds, "step_s") for label, rounds in samples.items()}
    large = {"batches": settings.size(40, 3)}
    contenders = [
        Contender('engine="process"', large_batches, large, ("torch", "aiofeed:Feeder")),
        Contender("DataLoader, 1 worker", large_batches_of_data_loader, large, ("torch.utils.data",)),
        Contender("two bare processes", two_bare_processes, large, ("numpy",)),
    ]
    transfers = interleave(contenders, settings)
    copy_s = column(transfers["two bare processes"], "copy_s")
    beyond_us = {
        label: tuple(1e6 * (late - copy) for late, copy in zip(column(rounds, "late_s"), copy_s, strict=True))
        for label, rounds in transfers.items()
    }
    ours = 'engine="process"'
    return [
        Figure(f"step beside {ours} / alone", per(step[ours], step["alone"]), target=at_most(1.05)),
        Figure(f"step beside {bare.label} / alone", per(step[bare.label], step["alone"])),
        Figure(f"step beside {ours} / beside {bare.label}", per(step[ours], step[bare.label])),
        Figure('step beside engine="thread" / alone', per(step['engine="thread"'], step["alone"])),
        *[Figure(f"images beside steps: {each.label}", rates(samples[each.label]), "/s") for each in beside],
        *[
            Figure(f"arrival of 10 MB: {label}", tuple(1e6 * late for late in column(rounds, "late_s")), "us")
            for label, rounds in transfers.items()
        ],
        *[
            Figure(f"arrival of 10 MB, beyond the copy: {label}", us, "us", at_most(100) if label == ours else None)
            for label, us in beyond_us.items()
        ],
        Figure("copy of 10 MB, by the reader of two bare processes", tuple(1e6 * copy for copy in copy_s), "us"),
    ]


def step() -> int:
    """Python code that never releases the GIL."""
    total = 0
    for number in range(STEP_ROUNDS):
        total += number & 3
    return total


def median_step(steps: int) -> float:
    """Median duration of a step in seconds."""
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@contextmanager
def step_alone(steps: int) -> Iterator[Measure]:
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if len(before) > 1:
        os.sched_setaffinity(0, sorted(before)[:-1])  # leave out one core, as a decoder would use it
    try:
        yield lambda: {"step_s": median_step(steps)}
    finally:
        if before:
            os.sched_setaffinity(0, before)


@contextmanager
def step_beside_bare(folder: str, steps: int) -> Iterator[Measure]:
    """The step beside a process that decodes all the time and sends nothing."""

    def measure() -> Mapping[str, float]:
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe()
        # The process runs during this measurement only, so that the other contenders have all cores.
        decoder = context.Process(target=decode_forever, args=(folder, sender), daemon=True)
        decoder.start()
        try:
            receiver.recv()
            return {"step_s": median_step(steps)}
        finally:
            decoder.kill()
            decoder.join()

    yield measure


def decode_forever(folder: str, started: Connection) -> None:
    import aiofeed

    decode = aiofeed.DecodeImage((SIZE, SIZE), scaled=False)
    out = np.empty(decode.row.shape, np.uint8)
    paths = [Path(path) for path in files_below(folder)]
    decode.decode_into(paths[0].read_bytes(), out)
    started.send(True)
    while True:
        for path in paths:
            decode.decode_into(path.read_bytes(), out)


@contextmanager
def step_beside(folder: str, steps: int, engine: str) -> Iterator[Measure]:
    import aiofeed

    decode = aiofeed.DecodeImage((SIZE, SIZE), scaled=False)
    limits = aiofeed.Limits(decode_threads=1)
    feeder: aiofeed.Feeder[Any] = aiofeed.Feeder(
        aiofeed.ImageFolder(folder), decode=decode, batch_size=BATCH, limits=limits, engine=engine
    )

    def endless_batches() -> Iterator[Any]:
        for _ in feeder.epochs(1 << 30):
            yield from feeder

    def measure() -> Mapping[str, float]:
        times, started = [], time.perf_counter()
        for _ in range(steps):
            next(batches)
            step_started = time.perf_counter()
            step()
            times.append(time.perf_counter() - step_started)
        wall_s = time.perf_counter() - started
        return {"step_s": statistics.median(times), "items": steps * BATCH, "wall_s": wall_s}

    with feeder:
        batches = endless_batches()
        for _ in range(4):
            next(batches)
        yield measure
        batches.close()


class LargeBatches:
    """A source without data, for a decoder that generates 10 MB."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def key(self, index: int) -> str:
        return str(index)

    async def read(self, index: int) -> bytes:
        return b"sample"


class Stamped:
    """Fills a row with 10 MB and writes the time into it last."""

    takes_seed = False

    def __init__(self) -> None:
        from aiofeed.core.types import Row

        self.row = Row((LARGE_BYTES // 8,), "int64")

    def __call__(self, data: bytes, /) -> NDArray[np.int64]:
        out = np.empty(LARGE_BYTES // 8, np.int64)
        self.decode_into(data, out)
        return out

    def decode_into(self, data: object, out: NDArray[np.int64], seed: int | None = None) -> None:
        out[:] = 1
        time.sleep(DECODE_S)  # so that the consumer waits for the batch
        out[0] = time.perf_counter_ns()


def lateness(batch: Any) -> float:
    """Seconds since a batch was stamped."""
    return (time.perf_counter_ns() - int(batch.flatten()[0])) / 1e9


def median_lateness(batches: Iterator[Any], count: int) -> dict[str, float]:
    """Median time from a batch's stamp to its arrival."""
    return {"late_s": statistics.median(lateness(next(batches)) for _ in range(count))}


def write_on_request(memory: Any, connection: Connection) -> None:
    """The writer of two bare processes."""
    out, decoder = np.frombuffer(memory, np.int64), Stamped()
    while connection.recv_bytes() == b"go":
        decoder.decode_into(b"", out)
        connection.send_bytes(b"done")


@contextmanager
def two_bare_processes(batches: int) -> Iterator[Measure]:
    context = multiprocessing.get_context("spawn")
    memory = context.RawArray("b", LARGE_BYTES)
    reader, writer = context.Pipe()
    process = context.Process(target=write_on_request, args=(memory, writer), daemon=True)
    process.start()
    shared = np.frombuffer(memory, np.int64)
    private = np.zeros_like(shared)

    def measure() -> Mapping[str, float]:
        late, copying = [], []
        for _ in range(batches):
            reader.send_bytes(b"go")
            reader.recv_bytes()
            started = time.perf_counter()
            np.copyto(private, shared)
            copying.append(time.perf_counter() - started)
            late.append(lateness(private))
        return {"late_s": statistics.median(late), "copy_s": statistics.median(copying)}

    measure()
    yield measure
    reader.send_bytes(b"stop")
    process.join()


@contextmanager
def large_batches(batches: int) -> Iterator[Measure]:
    import aiofeed

    limits = aiofeed.Limits(decode_threads=1, prefetch_batches=1)
    source = LargeBatches(1 << 30)
    with aiofeed.Feeder(source, decode=Stamped(), batch_size=1, limits=limits, engine="process") as feeder:
        iterator = iter(feeder)
        for _ in range(5):
            next(iterator)
        yield lambda: median_lateness(iterator, batches)


class LargeDataset:
    """A Dataset with the same batches."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Any:
        import torch

        out = np.empty(LARGE_BYTES // 8, np.int64)
        Stamped().decode_into(b"", out)
        return torch.from_numpy(out)


@contextmanager
def large_batches_of_data_loader(batches: int) -> Iterator[Measure]:
    from torch.utils.data import DataLoader

    # Without collation, which would copy once more; prefetches one batch, like the feeder.
    loader: Any = DataLoader(
        LargeDataset(),  # type: ignore[arg-type]
        batch_size=None,
        num_workers=1,
        prefetch_factor=1,
        sampler=range(1 << 20),
        multiprocessing_context="spawn",
    )
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    yield lambda: median_lateness(iterator, batches)
