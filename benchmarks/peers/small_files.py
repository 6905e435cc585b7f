"""Which loader has the least overhead for very small files?

20,000 JPEG files of 2 KB, 64 x 64, no resize, batch 64, in the page cache, epochs after the first; decoded by Pillow or
Pillow-SIMD, which hold the GIL for much of the time. tf.data uses its own decoder, without Python.

Targets: aiofeed in two processes at least 0.85 of two bare processes, 1.3 of ``DataLoader``, first among the peers in
Python; in threads at least 0.9 of one bare thread.
"""

from __future__ import annotations

from benchmarks.data import jpeg_folder
from benchmarks.figures import Figure
from benchmarks.harness import Settings
from benchmarks.peers.adapters import bare
from benchmarks.peers.contest import CaseResult, Participants, Way, race
from benchmarks.peers.same_decode import PROCESS, PROCESSES, THREAD
from benchmarks.peers.work import contender

TITLE = "20,000 JPEGs of 2 KB, 64x64, Pillow decode, batch 64, second epoch"

WAYS: tuple[Way, ...] = (
    ("feeder", "thread"),
    ("feeder", "process:2"),
    ("dataloader", "persistent"),
    ("nodes", "by batches"),
    ("spdl_threads", "by batches"),
    ("grain_threads", "whole batches"),
    ("webdataset_tars", "tars"),
    ("litdata_raw", "raw"),
    ("mosaicml", "MDS"),
    ("tfdata", "AUTOTUNE"),
)
LOADER = "DataLoader, persistent"


def task(settings: Settings, decoder: str) -> dict[str, object]:
    """The arguments of ``Work``."""
    return {
        "folder": str(jpeg_folder(settings.data, settings.size(20_000, 96), 64, 64)),
        "side": 64,
        "decoder": decoder,
    }


def run(settings: Settings, participants: Participants) -> CaseResult:
    work = task(settings, "pillow")
    present, absent = participants.divide(WAYS)
    contenders = [contender(*way, work) for way in present]
    one, two = bare.contender("threads", work, 1), bare.contender("processes", work)
    outcome = race([*contenders, one, two, bare.contender("threads", work)], settings, absent)
    in_python = [peer for peer in outcome.peers() if not peer.startswith("tf.data")]
    targets: list[Figure] = [
        *outcome.speed(PROCESS, PROCESSES, 0.85),
        *outcome.speed(PROCESS, LOADER, 1.3),
        *outcome.first(PROCESS, in_python, "the peers in Python"),
        *outcome.speed(THREAD, one.label, 0.9),
        *[figure for peer in outcome.peers() for figure in outcome.speed(PROCESS, peer) if peer != LOADER],
    ]
    return CaseResult(TITLE, "images", outcome.columns(), targets, outcome.absent)
