"""The same small files by a decoder that hardly holds the GIL: who keeps its speed?

``small_files`` with simplejpeg for all, as ``DecodeImage(backend="turbo")`` has it. The framework's cost of a sample is
what a feeder of one thread uses of CPU beyond what one bare thread does.

Targets: threads at least 0.65 of two bare processes and above ``DataLoader``; two processes at least 0.85; at most 20
microseconds of the framework's own per sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.figures import Figure, at_most
from benchmarks.harness import Contender, Measure, Settings
from benchmarks.peers.adapters import bare
from benchmarks.peers.contest import Field, Found, race
from benchmarks.peers.same_decode import PROCESS, PROCESSES, THREAD
from benchmarks.peers.small_files import LOADER, WAYS, task
from benchmarks.peers.work import contender
from benchmarks.turbo import aiofeed_feeder

TITLE = "20,000 JPEGs of 2 KB, 64x64, simplejpeg, batch 64, second epoch"

NEEDS = ("simplejpeg",)
ONE = "aiofeed, one thread"


def run(settings: Settings, field: Field) -> Found:
    work = task(settings, "turbo")
    present, absent = field.divide(WAYS)
    contenders = [contender(*way, work) for way in present]
    single = Contender(
        ONE, one_thread, {"folder": work["folder"]}, ("torch", "aiofeed:Feeder", "aiofeed:DecodeImage", "simplejpeg")
    )
    one, two = bare.contender("threads", work, 1), bare.contender("processes", work)
    found = race([*contenders, single, one, two], settings, absent)
    added = tuple(a - b for a, b in zip(found.cpu_us(ONE), found.cpu_us(one.label), strict=True))
    targets = [
        *found.speed(THREAD, PROCESSES, 0.65),
        *found.speed(THREAD, LOADER, 1.0),
        *found.speed(PROCESS, PROCESSES, 0.85),
        Figure("framework's own CPU per sample, one thread", added, "us", at_most(20)),
        *[figure for peer in found.peers() for figure in found.speed(PROCESS, peer)],
    ]
    return Found(TITLE, "images", found.columns(), targets, found.absent)


@contextmanager
def one_thread(folder: str) -> Iterator[Measure]:
    with aiofeed_feeder(folder, 64, "turbo", threads=1) as measure:
        yield measure
