"""Which loader is fastest for very small files with a decoder that hardly holds the GIL?

``small_files`` with simplejpeg for all, like ``DecodeImage(backend="turbo")``. The framework's cost of a sample is the
CPU time of a feeder with one thread beyond that of one bare thread.

Targets: threads at least 0.65 of two bare processes and above ``DataLoader``; two processes at least 0.85; at most 20
microseconds of the framework's own per sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.figures import Figure, at_most
from benchmarks.harness import Contender, Measure, Settings
from benchmarks.jpeg_backends import aiofeed_feeder
from benchmarks.peers.adapters import bare
from benchmarks.peers.contest import CaseResult, Participants, race
from benchmarks.peers.same_decode import PROCESS, PROCESSES, THREAD
from benchmarks.peers.small_files import LOADER, WAYS, task
from benchmarks.peers.work import contender

TITLE = "20,000 JPEGs of 2 KB, 64x64, simplejpeg, batch 64, second epoch"

NEEDS = ("simplejpeg",)
ONE = "aiofeed, one thread"


def run(settings: Settings, participants: Participants) -> CaseResult:
    work = task(settings, "turbo")
    present, absent = participants.divide(WAYS)
    contenders = [contender(*way, work) for way in present]
    single = Contender(
        ONE, one_thread, {"folder": work["folder"]}, ("torch", "aiofeed:Feeder", "aiofeed:DecodeImage", "simplejpeg")
    )
    one, two = bare.contender("threads", work, 1), bare.contender("processes", work)
    outcome = race([*contenders, single, one, two], settings, absent)
    added = tuple(a - b for a, b in zip(outcome.cpu_us(ONE), outcome.cpu_us(one.label), strict=True))
    targets = [
        *outcome.speed(THREAD, PROCESSES, 0.65),
        *outcome.speed(THREAD, LOADER, 1.0),
        *outcome.speed(PROCESS, PROCESSES, 0.85),
        Figure("framework's own CPU per sample, one thread", added, "us", at_most(20)),
        *[figure for peer in outcome.peers() for figure in outcome.speed(PROCESS, peer)],
    ]
    return CaseResult(TITLE, "images", outcome.columns(), targets, outcome.absent)


@contextmanager
def one_thread(folder: str) -> Iterator[Measure]:
    with aiofeed_feeder(folder, 64, "turbo", threads=1) as measure:
        yield measure
