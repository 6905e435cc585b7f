"""Which loader is fastest with the same decoder?

JPEG files of 500 x 400 to 224 x 224, uint8, batch 64, Pillow or Pillow-SIMD at full scale (antialiased bilinear) in
every contender, files in the page cache, epochs after the first, two threads or processes that decode.

Targets: aiofeed's threads as fast as two bare threads, its two processes at least 0.97 of two bare processes; the
better of them at least 1.15 of every peer, 2.0 of SPDL per item; CPU time per image at most 1.03 of the bare ones'.
"""

from __future__ import annotations

from benchmarks.data import jpeg_folder
from benchmarks.figures import at_most
from benchmarks.harness import Settings
from benchmarks.peers.adapters import bare
from benchmarks.peers.contest import CaseResult, Participants, Way, race
from benchmarks.peers.work import contender

TITLE = "JPEG 500x400 to 224, the same Pillow decode for all, batch 64, second epoch"

WAYS: tuple[Way, ...] = (
    ("feeder", "thread"),
    ("feeder", "process:2"),
    ("dataloader", "persistent"),
    ("dataloader", "new workers"),
    ("nodes", "by batches"),
    ("nodes", "per item"),
    ("spdl_threads", "by batches"),
    ("spdl_threads", "per item"),
    ("grain_threads", "whole batches"),
    ("grain_threads", "per item"),
    ("webdataset_tars", "tars"),
    ("litdata_raw", "raw"),
    ("mosaicml", "MDS"),
)

THREAD, PROCESS = "aiofeed, thread", "aiofeed, process:2"
THREADS, PROCESSES = "two bare threads", "two bare processes"
TWICE = "SPDL, per item"


def task(settings: Settings) -> dict[str, object]:
    """The arguments of ``Work``."""
    return {"folder": str(jpeg_folder(settings.data, settings.size(1024, 96))), "side": 224, "decoder": "pillow"}


def run(settings: Settings, participants: Participants) -> CaseResult:
    work = task(settings)
    present, absent = participants.divide(WAYS)
    contenders = [contender(*way, work) for way in present]
    outcome = race([*contenders, bare.contender("threads", work), bare.contender("processes", work)], settings, absent)
    better = outcome.best(outcome.ours())
    targets = [
        *outcome.speed(THREAD, THREADS, 1.0),
        *outcome.speed(PROCESS, PROCESSES, 0.97),
        *[figure for peer in outcome.peers() for figure in outcome.speed(better, peer, 2.0 if peer == TWICE else 1.15)],
        *outcome.cpu(THREAD, THREADS, at_most(1.03)),
        *outcome.cpu(PROCESS, PROCESSES, at_most(1.03)),
    ]
    return CaseResult(TITLE, "images", outcome.columns(), targets, outcome.absent)
