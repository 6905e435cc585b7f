"""Is ``Limits()`` as fast as the best manual setting?

Six kinds of work, each with ``Limits()`` and with every setting of a small grid, interleaved: files of 2 KB with a
trivial decoder, JPEGs of 64x64 with Pillow and with simplejpeg, JPEGs of 500x400, reads of 20 ms, files of 8 MB. Each
has 20 batches to settle; then epochs are measured. ``Limits()`` is compared with the setting with the best median,
which is selected after the measurement and so profits from chance.

Target: at least 0.97 of the best setting, for each kind of work.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from benchmarks.data import fat_folder, files_below, jpeg_folder, tiny_folder
from benchmarks.figures import Figure, at_least, per, rates
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.overlap import WaitingSource
from benchmarks.single_epochs import single_epochs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TITLE = "Limits() and the best of a grid, after 20 batches"

SETTLE = 20
READ_S = 0.020
THREADS: tuple[dict[str, int], ...] = tuple({"decode_threads": threads} for threads in (1, 2, 4))
READS: tuple[dict[str, int], ...] = tuple({"read_concurrency": reads} for reads in (64, 128, 256, 512))
FAT: tuple[dict[str, int], ...] = (*THREADS, {"read_concurrency": 2}, {"read_concurrency": 8})


def run(settings: Settings) -> list[Figure]:
    figures: list[Figure] = []
    settle = settings.size(SETTLE, 2)
    for name, options, grid in works(settings):
        contenders = [
            Contender(
                label(limits), feeding, {**options, "settle": settle, "limits": limits}, ("torch", "aiofeed:Feeder")
            )
            for limits in ({}, *grid[: settings.size(len(grid), 1)])
        ]
        samples = interleave(contenders, settings)
        rate = {name: rates(rounds) for name, rounds in samples.items()}
        best = max(list(rate)[1:], key=lambda name: statistics.median(rate[name]))
        ratio = per(rate[label({})], rate[best])
        figures.append(Figure(f"{name}: Limits() / best ({best})", ratio, target=at_least(0.97)))
        figures += [Figure(f"{name}: {label}", values, "/s") for label, values in rate.items()]
        for chosen in ("threads", "reads", "chunk", "gil_us"):
            values = tuple(sample[chosen] for sample in samples[label({})])
            if any(values):
                figures.append(Figure(f"{name}: Limits() chose, {chosen}", values))
    return figures


def works(settings: Settings) -> Iterator[tuple[str, dict[str, Any], tuple[dict[str, int], ...]]]:
    """Name, options of ``feeding``, grid."""
    tiny = str(tiny_folder(settings.data, settings.size(20_000, 200)))
    yield "2 KB files", {"kind": "files", "folder": tiny, "batch": 64}, THREADS
    small = str(jpeg_folder(settings.data, settings.size(6000, 24), 64, 64))
    jpegs: dict[str, Any] = {"kind": "pillow", "folder": small, "side": 64, "batch": settings.size(64, 4)}
    yield "64x64, Pillow", jpegs, THREADS
    if find_spec("simplejpeg"):
        yield "64x64, simplejpeg", {**jpegs, "kind": "turbo"}, THREADS
    large = str(jpeg_folder(settings.data, settings.size(1024, 24)))
    yield "500x400", {**jpegs, "kind": "auto", "folder": large, "side": 224}, THREADS
    yield "reads of 20 ms", {"kind": "waiting", "folder": str(settings.size(40_000, 256)), "batch": 64}, READS
    fat = str(fat_folder(settings.data, settings.size(64, 2)))
    yield "8 MB files", {"kind": "files", "folder": fat, "batch": settings.size(8, 1)}, FAT


def label(limits: Mapping[str, int]) -> str:
    return f"Limits({', '.join(f'{name}={value}' for name, value in limits.items())})"


def decode(data: bytes | bytearray) -> NDArray[np.uint8]:
    import numpy as np

    return np.frombuffer(data, np.uint8)


@contextmanager
def feeding(
    kind: str, folder: str, batch: int, limits: dict[str, int], settle: int, side: int = 0
) -> Iterator[Measure]:
    import aiofeed

    source: Any = WaitingSource(int(folder), READ_S) if kind == "waiting" else aiofeed.Files(files_below(folder))
    images = kind in ("pillow", "turbo", "auto")
    decoder: Any = aiofeed.DecodeImage((side, side), backend=kind) if images else decode  # type: ignore[arg-type]
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
