"""Is aiofeed as fast as a bare pool of threads on a machine with more cores than this one?

A decoder that sleeps 1.28 ms an image takes the place of one in C; so two cores show what 128 would do, as far as the
framework is concerned (``benchmarks.simulated``); but not memory bandwidth, caches and threads of one core. aiofeed,
also with default limits on a machine that seems to have N cores, is beside a pool of whole batches. "chunks" are
decoded in one call, "items" one by one to tensors; "Pillow-like" holds the GIL for 0.3 ms of 1 ms, "pure Python" for
all of it; "slow reads" wait 20 ms for each sample. Then what else works in one thread; and what default limits reach
from the second second on, beside the right number of threads. Then whether the simulation tells the truth: the
framework's CPU time for JPEGs of 64x64, and for a decoder that sleeps for as long. Last, what a job costs: the CPU time
of batches of 16 samples that cost nothing, and small samples beside ``DataLoader`` without workers.

Targets: 0.97 of the bare pool with 16 and 64 threads, 0.9 with 128, at most 8 us of CPU time per image; default limits
0.9 of given threads; the framework's time of sleeping decoders at least 0.8 of that of real ones; 120 us of CPU time
for a batch whose samples cost nothing; 1.0 of ``DataLoader`` for small items of a Dataset in two threads, 1.3 for
thumbnails.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

import aiofeed
from benchmarks import gil, report, simulated
from benchmarks.contenders import as_array, fed, labelled, loaded, single_epochs
from benchmarks.data import files_below, jpeg_folder, tiny_folder
from benchmarks.datasets import DIGITS, LOADER, PAIRS, dataset
from benchmarks.figures import Figure, at_least, at_most, per
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.simulated import BARE, DEFAULT, LONG, OURS, SHORT, ideal

TITLE = "More cores than there are: a decoder that sleeps 1.28 ms an image, images per second"

THREADS, READING, LEAST_S = (2, 16, 64, 128), 64, 0.2
WAYS = (OURS, DEFAULT, BARE)
PROCESSES = ("aiofeed, process:4", "aiofeed, process:8")
PARTS = {
    "with the copy thread (a simulated device)": "aiofeed, copy thread",
    "`serve`, each of 8 consumers": "aiofeed, 8 consumers",
    'epochs after the first of `cache="host"`': 'aiofeed, cache="host"',
    f"`aiofeed.DataLoader`, {READING} workers": "aiofeed.DataLoader",
    f"torch's `DataLoader`, {READING} workers": "DataLoader",
}
"""What is measured with 64 threads only, with the words of the page."""
WORK = (("items", 64, 64), ("Pillow-like", 16, 64), ("pure Python", 16, 16), ("slow reads", 64, 64))
"""Kinds of samples besides "chunks", with batch size and threads."""
SECONDS = (
    ("chunks", 64, (16, 64, 128)),
    ("chunks", 256, (64, 128)),
    (SHORT, 64, (16, 64)),
    (LONG, 64, (16, 64)),
    ("Pillow-like", 64, (16, 64)),
    ("pure Python", 64, (16,)),
)
"""What default limits are measured with from the second second on: kind, batch size, threads."""
REAL, SLEEPING = "JPEGs of 64x64, real", "JPEGs of 64x64, sleeping"


def run(settings: Settings) -> list[Figure]:
    figures: list[Figure] = []
    few = replace(settings, rounds=min(settings.rounds, 3))
    for threads in THREADS if not settings.quick else (2,):
        for batch in (64, 32, 256) if threads >= 16 else (64,):
            figures += row(settings, threads, "chunks", batch, WAYS)
        for kind, batch, at in WORK:
            more = PROCESSES if kind == "Pillow-like" else ()
            figures += row(few, threads, kind, batch, (*WAYS, *more)) if at == threads else ()
        figures += row(few, threads, "chunks", 64, (*PROCESSES, *PARTS.values())) if threads == READING else ()
    for kind, batch, counts in SECONDS if not settings.quick else SECONDS[:1]:
        for threads in counts if not settings.quick else (2,):
            figures += settled(settings, kind, batch, threads)
    return [*figures, *reading(few), *truth(settings), *jobs(settings)]


def row(settings: Settings, threads: int, kind: str, batch: int, loaders: Sequence[str]) -> Iterator[Figure]:
    """The figures of loaders with as many threads."""
    name = f"{kind}, batch {batch}, {threads} threads"
    options = {"kind": kind, "threads": threads, "batch": batch, "least_s": 0.01 if settings.quick else LEAST_S}
    race = interleave([Contender(each, simulated.simulated, {"loader": each, **options}) for each in loaders], settings)
    for each in race:
        ours = each in (OURS, DEFAULT) and kind == "chunks" and threads >= 16
        yield Figure(f"{name}: {each}", race.rate(each), "/s")
        if each != BARE and BARE in race:
            target = at_least(0.97 if threads < 128 else 0.9) if ours else None
            yield Figure(f"{name}: {each} / {BARE}", per(race.rate(each), race.rate(BARE)), target=target)
        yield Figure(f"{name}: CPU, {each}", race.cpu_us(each), "us", at_most(8) if ours else None)


def settled(settings: Settings, kind: str, batch: int, threads: int) -> list[Figure]:
    """Default limits beside as many threads as there are cores, from the second second on."""
    options = {"kind": kind, "threads": threads, "batch": batch, "seconds": 0.02 if settings.quick else 2.0}
    race = interleave(
        [Contender(each, simulated.from_second, {"loader": each, **options}) for each in (DEFAULT, OURS)], settings
    )
    name = f"from the second second on, {kind}, batch {batch}, {threads} threads"
    return [race.speed(DEFAULT, OURS, 0.9, name), *race.rates("samples", name)]


def reading(settings: Settings) -> list[Figure]:
    """Small files in the page cache, without decoding."""
    options = {"folder": str(tiny_folder(settings.data, settings.size(20_000, 200))), "threads": READING}
    race = interleave([Contender(OURS, files, options), Contender(BARE, bare_files, options)], settings)
    name = f"files of 2 KB, {READING} threads"
    cpu = [Figure(f"{name}: CPU, {label}", race.cpu_us(label), "us") for label in race]
    return [race.speed(OURS, BARE, None, name), *race.rates("files", name), *cpu]


def files(folder: str, threads: int) -> Any:
    limits = aiofeed.Limits(decode_threads=threads)
    return fed(aiofeed.Feeder(aiofeed.Files(files_below(folder)), decode=as_array, batch_size=64, limits=limits))


@contextmanager
def bare_files(folder: str, threads: int) -> Iterator[Measure]:
    paths = [Path(path) for path in files_below(folder)]
    batches = [paths[start : start + 64] for start in range(0, len(paths), 64)]
    with ThreadPoolExecutor(threads) as pool:

        def measure() -> Mapping[str, float]:
            return {"items": sum(map(len, pool.map(lambda batch: [path.read_bytes() for path in batch], batches)))}

        measure()
        yield measure


def truth(settings: Settings) -> list[Figure]:
    """The framework's CPU time beside a real decoder, and beside one that sleeps for as long."""
    options = {"folder": str(jpeg_folder(settings.data, settings.size(6000, 24), 64, 64))}
    contenders = [Contender(name, framework, {**options, "sleep": name == SLEEPING}) for name in (REAL, SLEEPING)]
    race = interleave(contenders, settings)
    us = {name: race.column(name, "framework_us") for name in race}
    figures = [Figure(f"framework, {each}", us[each], "us") for each in race]
    ratio = Figure("framework: sleeping / real", per(us[SLEEPING], us[REAL]), target=at_least(0.8))
    return [*figures, *race.rates("images"), ratio]


class Encoded(simulated.Ready):
    """JPEGs in memory."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(len(paths))
        self._files = [Path(path).read_bytes() for path in paths]

    def read_now(self, indices: Sequence[int]) -> list[bytes]:
        return [self._files[index] for index in indices]


class Timed(simulated.Chunks):
    """``DecodeImage`` with a count of its CPU time; or a decoder that sleeps for ``sleep_us`` an image in its place."""

    def __init__(self, decode: Any, sleep_us: float) -> None:
        super().__init__("chunks")
        self.row, self._decode, self._sleep_us = decode.row, decode, sleep_us
        self.spent: list[float] = []

    def decode_into(self, data: Any, out: Any, seed: int | None = None) -> None:
        self.decode_many_into([data], out[None])

    def decode_many_into(self, data: Sequence[Any], out: Any, seeds: object = None) -> list[None]:
        started = time.thread_time()
        if self._sleep_us:
            simulated.usleep(int(self._sleep_us * len(data)))
        else:
            self._decode.decode_many_into(data, out, None)
        self.spent.append(time.thread_time() - started)
        return [None] * len(data)


@contextmanager
def framework(folder: str, sleep: bool) -> Iterator[Measure]:
    source, decode = Encoded(files_below(folder)), aiofeed.DecodeImage(64)
    out = np.empty((len(source), *decode.row.shape), np.uint8)
    started = time.thread_time()
    decode.decode_many_into(source.read_now(range(len(source))), out, None)
    timed = Timed(decode, (time.thread_time() - started) / len(source) * 1e6 if sleep else 0)
    limits = aiofeed.Limits(decode_threads=2)
    with aiofeed.Feeder(source, decode=timed, batch_size=64, shuffle=True, limits=limits) as feeder:
        epoch = single_epochs(feeder)

        def measure() -> Mapping[str, float]:
            timed.spent.clear()
            before = time.process_time()
            items = sum(map(len, epoch()))
            return {"items": items, "framework_us": (time.process_time() - before - sum(timed.spent)) / items * 1e6}

        measure()
        yield measure


THUMBNAILS = "JPEGs of 64x64"
SMALL = {PAIRS: 1.0, DIGITS: 1.0, THUMBNAILS: 1.3}
"""Small samples, and the least speed, of that of ``DataLoader`` without workers, in batches of 16."""


def jobs(settings: Settings) -> Iterator[Figure]:
    """What a batch of 16 costs whose samples cost nothing, and small samples beside ``DataLoader``; two threads."""
    least_s = 0.01 if settings.quick else LEAST_S
    contenders = [Contender(each, empty_jobs, {"ours": each == OURS, "least_s": least_s}) for each in (OURS, BARE)]
    race = interleave(contenders, settings)
    for each in race:
        name = f"16 samples that cost nothing, 2 threads: CPU of a batch, {each}"
        yield Figure(name, race.cpu_us(each), "us", at_most(120) if each == OURS else None)
    folder = str(jpeg_folder(settings.data, settings.size(6000, 24), 64, 64))
    for kind, least in SMALL.items():
        options = {"kind": kind, "samples": settings.size(8_000, 64), "folder": folder}
        contenders = [Contender(each, small, {**options, "ours": each == OURS}) for each in (OURS, LOADER)]
        yield interleave(contenders, settings).speed(OURS, LOADER, least, f"{kind}, batch 16, 2 threads")


class Free(simulated.Chunks):
    """Decodes chunks in no time."""

    def decode_many_into(self, data: Sequence[object], out: object, seeds: object = None) -> list[None]:
        return [None] * len(data)


@contextmanager
def empty_jobs(ours: bool, least_s: float) -> Iterator[Measure]:
    """Measures batches, not samples: of a feeder, or of a pool whose jobs make an empty tensor each."""
    limits = aiofeed.Limits(decode_threads=2)
    with (
        ThreadPoolExecutor(2) as pool,
        aiofeed.Feeder(simulated.Ready(), decode=Free("chunks"), batch_size=16, limits=limits) as feeder,
    ):
        made = iter(feeder) if ours else pooled(pool)

        def measure() -> Mapping[str, float]:
            count, until = 0, time.perf_counter() + least_s
            while time.perf_counter() < until:
                next(made)
                count += 1
            return {"items": count}

        measure()
        yield measure


def pooled(pool: ThreadPoolExecutor) -> Iterator[np.ndarray[Any, Any]]:
    waiting = [pool.submit(np.empty, (16, 3, simulated.SIDE, simulated.SIDE), np.uint8) for _ in range(6)]
    while True:
        yield waiting.pop(0).result()
        waiting.append(pool.submit(np.empty, (16, 3, simulated.SIDE, simulated.SIDE), np.uint8))


class Thumbnails(Encoded):
    """A Dataset of the JPEGs, decoded by Pillow."""

    def __getitem__(self, index: int) -> Any:
        from PIL import Image
        from torch import from_numpy

        [data] = self.read_now([index])
        with Image.open(io.BytesIO(data)) as image:
            return from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


def small(kind: str, samples: int, folder: str, ours: bool) -> Any:
    """A feeder that decodes in two threads, or ``DataLoader`` without workers."""
    thumbnails = Thumbnails(files_below(folder)) if kind == THUMBNAILS else None
    samples_in = labelled if thumbnails is None else len
    if not ours:
        return loaded(thumbnails or dataset(kind, samples), 16, samples_in=samples_in, shuffle=True)
    limits = aiofeed.Limits(decode_threads=2)
    if thumbnails is not None:
        decode = aiofeed.DecodeImage(64)
        return fed(aiofeed.Feeder(thumbnails, decode=decode, batch_size=16, shuffle=True, limits=limits))
    source = aiofeed.FromDataset(dataset(kind, samples), threads=2)
    return fed(aiofeed.Feeder(source, batch_size=16, shuffle=True), samples_in)


PAGE, PICTURE, MARGIN = "docs/performance.md", "docs/cores.svg", 14
Medians = Mapping[str, float]


def fill(project: Path, results: Mapping[str, report.Result]) -> Iterator[Path]:
    """Write the page's tables and the picture, of the results of ``cores`` and ``gil`` that there are."""
    page = project / PAGE
    if not page.exists():
        return
    text = page.read_text(encoding="utf-8")
    for name, tables in (("cores", core_tables), ("gil", gil_tables)):
        if name in results:
            medians = {figure.what: figure.median for figure in results[name].figures}
            for marker, table in tables(medians).items():
                text = report.replace_between(text, marker, table)
            if name == "cores":
                (project / PICTURE).write_text(picture(medians), encoding="utf-8", newline="\n")
    page.write_text(text, encoding="utf-8")
    yield from (page, project / PICTURE)


def cell(medians: Medians, what: str, unit: str = "") -> str:
    return report.number(medians[what], unit).removesuffix(unit).strip() if what in medians else ""


def core_tables(medians: Medians) -> dict[str, str]:
    header = ["threads", "images/s", "of the bare pool", "by default", "batch 32", "batch 256", "CPU, us"]
    rows = []
    for threads in THREADS:
        of = f"chunks, batch {{}}, {threads} threads: {{}} / {BARE}".format
        name = f"chunks, batch 64, {threads} threads"
        ratios = [(64, OURS), (64, DEFAULT), (32, DEFAULT), (256, DEFAULT)]
        rows.append([f"{threads}", cell(medians, f"{name}: {OURS}", "/s")])
        rows[-1] += [cell(medians, of(*each)) for each in ratios] + [cell(medians, f"{name}: CPU, {OURS}", "us")]
    columns = (DEFAULT, OURS, BARE, *PROCESSES)
    work = [
        [kind, f"{at}", *(cell(medians, f"{kind}, batch {batch}, {at} threads: {each}", "/s") for each in columns)]
        for kind, batch, at in WORK
    ]
    name, small = f"chunks, batch 64, {READING} threads", f"files of 2 KB, {READING} threads"
    parts = {"a feeder, for comparison": (name, "", OURS)} | {words: (name, "", each) for words, each in PARTS.items()}
    parts |= {"files of 2 KB in the page cache": (small, "files, ", OURS)}
    parts |= {"the same, by the bare pool": (small, "files, ", BARE)}
    cells = [
        [words, cell(medians, f"{of}: {items}{each}", "/s"), cell(medians, f"{of}: CPU, {each}", "us")]
        for words, (of, items, each) in parts.items()
    ]
    for words, each in (("a decoder of 64x64 JPEGs", REAL), ("sleeping as long", SLEEPING)):
        measured = cell(medians, f"images, {each}", "/s"), cell(medians, f"framework, {each}", "us")
        cells.append([f"2 threads: aiofeed itself, beside {words}", *measured])
    kinds = ["work", "threads", "by default", "`decode_threads=N`", "bare pool", "`process:4`", "`process:8`"]
    return {
        "cores": report.markdown_table(header, rows),
        "cores-work": report.markdown_table(kinds, work),
        "cores-parts": report.markdown_table(["64 threads", "samples/s", "CPU, us"], cells),
    }


def gil_tables(medians: Medians) -> dict[str, str]:
    ours = medians[f"GIL: {gil.ITSELF}"]
    rows = []
    for what, us in medians.items():
        kind, _, label = what.partition(": ")
        if kind == "GIL":
            most = report.number(float(f"{1e6 / (us + ours * (label != gil.ITSELF)):.2g}"), "/s").removesuffix("/s")
            rows.append([label, cell(medians, f"CPU: {label}", "us"), cell(medians, what, "us"), most])
    header = ["decoder", "CPU, us", "holds the GIL, us", "a process at most, samples/s"]
    return {"gil": report.markdown_table(header, rows)}


LINES = {
    BARE: ("bare", "a bare pool of whole batches"),
    DEFAULT: ("f", "aiofeed, default limits"),
    OURS: ("a", "aiofeed"),
}
STYLE = (
    "text{fill:#1f2328}.small{fill:#59636e;font-size:12px}.card{fill:#fff}.grid{stroke:#d1d9e0}path{fill:none}"
    ".line{stroke-width:2}.bare{stroke:#aab2bb;stroke-width:7}.a{stroke:#1f6fd0}.f{stroke:#7cc4ec}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9aa4b0}.card{fill:#161b22}.grid{stroke:#30363d}"
    ".bare{stroke:#5a636d}.a{stroke:#4c8ed9}.f{stroke:#4d93ba}}"
)


def picture(medians: Medians) -> str:
    """One line for each loader, threads to images a second, on logarithmic scales, in both colour schemes."""
    left, right, top, bottom = 62, 446, 52, 262
    least, most = math.log(1000), math.log(ideal("chunks", THREADS[-1]))

    def x(threads: float) -> float:
        return round(left + (right - left) * math.log(threads / 2) / math.log(THREADS[-1] / 2), 1)

    def y(rate: float) -> float:
        return round(bottom - (bottom - top) * (math.log(max(rate, 1000)) - least) / (most - least), 1)

    def label(across: float, down: float, words: str, anchor: str) -> str:
        return f'<text class="small" x="{across:g}" y="{down:g}" text-anchor="{anchor}">{words}</text>'

    shapes: list[str] = []
    for rate in (1_000, 3_000, 10_000, 30_000, 100_000):
        shapes.append(f'<path class="grid" d="M{left} {y(rate):g}H{right}"/>')
        shapes.append(label(left - 6, y(rate) + 4, f"{rate:,}", "end"))
    shapes += [label(x(threads), bottom + 18, f"{threads}", "middle") for threads in THREADS]
    shown = 0
    for loader, (kind, words) in LINES.items():
        what = {threads: f"chunks, batch 64, {threads} threads: {loader}" for threads in THREADS}
        points = [(x(threads), y(medians[each])) for threads, each in what.items() if each in medians]
        if points:
            at, down = MARGIN + shown % 2 * 224, bottom + 42 + shown // 2 * 19
            path = "L".join(f"{across:g} {up:g}" for across, up in points)
            shapes.append(f'<path class="line {kind}" d="M{path}"/><path class="line {kind}" d="M{at} {down - 4}h26"/>')
            shapes.append(label(at + 34, down, escape(words), "start"))
            shown += 1
    subtitle = "1.28 ms of decoding an image, without the GIL; batches of 64"
    title, height = "Images a second by decode threads, simulated", bottom + 42 + (shown + 1) // 2 * 19
    return report.svg(title, subtitle, height, STYLE, shapes)
