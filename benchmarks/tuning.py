"""Is ``Limits()`` as fast as the best manual setting, and how much of a sample's time is the framework's?

Six kinds of work, each with ``Limits()`` and with every setting of a small grid, after 20 batches to settle.
``Limits()`` is compared with the setting with the best median, which is selected after the measurement and so profits
from chance. Then the CPU time of a sample, stage by stage, in epochs after the first, with one decode thread. Reading
and decoding alone are measured in a loop right before and after. The other work of the decode thread is less than the
decode varies; so it is measured with a second feeder of the same files and rows, whose decoder does nothing.

Targets: 0.97 of the best setting, for each kind of work; at most 20 us a sample for the framework, at 64x64.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import aiofeed
from benchmarks.contenders import WaitingSource, as_array, single_epochs
from benchmarks.data import default_folder, fat_folder, files_below, jpeg_folder, tiny_folder
from benchmarks.figures import Figure, at_least, at_most, per
from benchmarks.harness import Contender, Measure, Settings, interleave

TITLE = "Limits() and the best of a grid, after 20 batches; CPU time of a sample, stage by stage"

SETTLE = 20
READ_S = 0.020
THREADS: tuple[dict[str, int], ...] = tuple({"decode_threads": threads} for threads in (1, 2, 4))
# Fewer in flight read fewer: half as many, half as fast.
READS: tuple[dict[str, int], ...] = tuple({"read_concurrency": reads} for reads in (256, 512))
FAT: tuple[dict[str, int], ...] = (*THREADS, {"read_concurrency": 2}, {"read_concurrency": 8})
BATCH = 64
STAGES = {
    "read_us": "read the file",
    "decode_us": "decode it into its row",
    "thread_us": "other work of the decode thread: chunk, target, batch",
    "loop_us": "the event loop's thread: plan, prefetch, deliver",
    "consumer_us": "the consumer's thread: next()",
    "framework_us": "the framework: the last three",
}


def run(settings: Settings) -> list[Figure]:
    figures: list[Figure] = []
    settle = settings.size(SETTLE, 2)
    for name, options, grid in works(settings):
        contenders = [
            Contender(label(limits), feeding, {**options, "settle": settle, "limits": limits})
            for limits in ({}, *grid[: settings.size(len(grid), 1)])
        ]
        race = interleave(contenders, settings)
        rate = {name: race.rate(name) for name in race}
        best = max(list(rate)[1:], key=lambda name: statistics.median(rate[name]))
        ratio = per(rate[label({})], rate[best])
        figures.append(Figure(f"{name}: Limits() / best ({best})", ratio, target=at_least(0.97)))
        figures += [Figure(f"{name}: {label}", values, "/s") for label, values in rate.items()]
        for chosen in ("threads", "reads", "chunk", "gil_us"):
            if any(values := race.column(label({}), chosen)):
                figures.append(Figure(f"{name}: Limits() chose, {chosen}", values))
    small, large = small_jpegs(settings), str(jpeg_folder(settings.data, settings.size(512, 24)))
    kinds = {"64x64, Pillow": (small, 64, "pillow"), "500x400": (large, 224, "auto")}
    if find_spec("simplejpeg"):
        kinds = {"64x64, simplejpeg": (small, 64, "turbo"), **kinds}
    for name, (folder, side, backend) in kinds.items():
        race = interleave([Contender(name, stages, {"folder": folder, "side": side, "backend": backend})], settings)
        for stage, what in STAGES.items():
            target = at_most(20.0) if stage == "framework_us" and side == 64 else None
            figures.append(Figure(f"{name}: {what}", race.column(name, stage), "us", target))
    return figures


def small_jpegs(settings: Settings) -> str:
    return str(jpeg_folder(settings.data, settings.size(6000, 24), 64, 64))


def works(settings: Settings) -> Iterator[tuple[str, dict[str, Any], tuple[dict[str, int], ...]]]:
    """Name, options of ``feeding``, grid."""
    tiny = str(tiny_folder(settings.data, settings.size(10_000, 200)))
    yield "2 KB files", {"kind": "files", "folder": tiny, "batch": 64}, THREADS
    jpegs: dict[str, Any] = {"kind": "pillow", "side": 64, "batch": settings.size(64, 4)}
    jpegs["folder"] = small_jpegs(settings)
    yield "64x64, Pillow", jpegs, THREADS
    if find_spec("simplejpeg"):
        yield "64x64, simplejpeg", {**jpegs, "kind": "turbo"}, THREADS
    large = str(jpeg_folder(settings.data, settings.size(512, 24)))
    yield "500x400", {**jpegs, "kind": "auto", "folder": large, "side": 224}, THREADS
    yield "reads of 20 ms", {"kind": "waiting", "folder": str(settings.size(10_000, 256)), "batch": 64}, READS
    fat = str(fat_folder(settings.data, settings.size(64, 2)))
    yield "8 MB files", {"kind": "files", "folder": fat, "batch": settings.size(8, 1)}, FAT


def label(limits: Mapping[str, int]) -> str:
    return f"Limits({', '.join(f'{name}={value}' for name, value in limits.items())})"


@contextmanager
def feeding(
    kind: str, folder: str, batch: int, limits: dict[str, int], settle: int, side: int = 0
) -> Iterator[Measure]:
    source: Any = WaitingSource(int(folder), READ_S) if kind == "waiting" else aiofeed.Files(files_below(folder))
    images = kind in ("pillow", "turbo", "auto")
    decoder: Any = aiofeed.DecodeImage((side, side), backend=kind) if images else as_array  # type: ignore[arg-type]
    with aiofeed.Feeder(source, decode=decoder, batch_size=batch, limits=aiofeed.Limits(**limits)) as feeder:
        one_epoch = single_epochs(feeder)
        settled = 0
        while settled < settle:
            epoch = one_epoch()
            settled += sum(1 for _ in itertools.islice(epoch, settle - settled))
            epoch.close()  # type: ignore[attr-defined]

        def measure() -> Mapping[str, float]:
            for _ in one_epoch():
                pass
            stats = feeder.statistics()
            chosen = {"threads": stats.decode_threads, "reads": stats.read_concurrency, "chunk": stats.chunk_size}
            return {"items": len(source), **chosen, "gil_us": stats.gil_us}

        yield measure


@contextmanager
def stages(folder: str, side: int, backend: str) -> Iterator[Measure]:
    decoder = aiofeed.DecodeImage((side, side), backend=backend)  # type: ignore[arg-type]
    paths = files_below(folder)
    source = aiofeed.Files(paths, targets=list(range(len(paths))))
    alone = aiofeed.Files(paths)
    rows = np.empty((BATCH, side, side, 3), np.uint8)

    class Nothing:
        row = decoder.row
        takes_seed = False

        def __call__(self, data: bytes) -> object:
            raise NotImplementedError

        def decode_into(self, data: bytes, out: object, seed: int | None = None) -> None:
            pass

    def bare() -> tuple[float, float]:
        """Seconds of reading and of decoding, in the feeder's chunks."""
        read_s = decode_s = 0.0
        for start in range(0, len(paths), BATCH):
            started = time.thread_time()
            encoded = alone.read_now(range(start, min(start + BATCH, len(paths))))
            read = time.thread_time()
            for row, data in zip(rows, encoded, strict=False):
                decoder.decode_into(data, row)
            decode_s += time.thread_time() - read
            read_s += read - started
        return read_s, decode_s

    def spent_in(one_epoch: Callable[[], Iterator[object]]) -> tuple[float, float, float]:
        """Microseconds per sample in the threads that read and decode, on the loop, and in the consumer."""
        before = by_thread()
        for _ in one_epoch():
            pass
        us = {name: (after - before.get(name, 0.0)) / len(paths) * 1e6 for name, after in by_thread().items()}
        # The other feeder's threads are idle meanwhile.
        working = sum(value for name, value in us.items() if "-decode-" in name or "-read-" in name)
        return working, us["aiofeed-engine"], us[threading.current_thread().name]

    limits = aiofeed.Limits(decode_threads=1)
    with (
        aiofeed.Feeder(source, decode=decoder, batch_size=BATCH, limits=limits) as feeder,
        aiofeed.Feeder(source, decode=Nothing(), batch_size=BATCH, limits=limits) as idle,
    ):
        one_epoch, nothing = single_epochs(feeder), single_epochs(idle)

        def measure() -> Mapping[str, float]:
            first = bare()
            _, loop_us, consumer_us = spent_in(one_epoch)
            working, _, _ = spent_in(nothing)
            second = bare()
            read_us, decode_us = ((a + b) / 2 / len(paths) * 1e6 for a, b in zip(first, second, strict=True))
            parts = {"thread_us": working - read_us, "loop_us": loop_us, "consumer_us": consumer_us}
            return {"read_us": read_us, "decode_us": decode_us, **parts, "framework_us": sum(parts.values())}

        bare()
        spent_in(one_epoch)
        spent_in(nothing)
        yield measure


def by_thread() -> dict[str, float]:
    """CPU seconds of the threads, by name; threads of one name are added up."""
    seconds: dict[str, float] = {}
    for thread in threading.enumerate():
        spent = int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
        seconds[thread.name] = seconds.get(thread.name, 0.0) + spent
    return seconds


def main(count: int = 12) -> None:
    """Run only the hot path, for a profiler; docs/performance.md has the command."""
    paths = files_below(jpeg_folder(default_folder(), 20_000, 64, 64))
    source = aiofeed.Files(paths, targets=list(range(len(paths))))
    limits = aiofeed.Limits(decode_threads=1)
    with aiofeed.Feeder(source, decode=aiofeed.DecodeImage((64, 64)), batch_size=BATCH, limits=limits) as feeder:
        for _ in feeder.epochs(count):
            for _ in feeder:
                pass


if __name__ == "__main__":
    main()
