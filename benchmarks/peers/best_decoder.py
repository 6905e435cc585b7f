"""Which loader is fastest with the fastest decoder available for it?

The work of ``same_decode``, but loaders that accept a decoder use simplejpeg (libjpeg-turbo) and OpenCV's
``INTER_LINEAR``, which does not antialias; the others use their own, aiofeed its native library. The worst PSNR against
Pillow at full scale shows the quality of the pictures.

Targets: aiofeed first; at least 0.95 of two bare processes with that decoder; 1.4 of two bare processes with Pillow.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from benchmarks.harness import Settings
from benchmarks.jpeg_backends import has_native
from benchmarks.peers.adapters import bare
from benchmarks.peers.contest import CaseResult, Participants, Way, race
from benchmarks.peers.same_decode import PROCESSES, task
from benchmarks.peers.work import contender

TITLE = "JPEG 500x400 to 224, each with its fastest decoder, batch 64, second epoch"

WAYS: tuple[Way, ...] = (
    ("feeder", "thread"),
    ("feeder", "process:2"),
    ("dataloader", "persistent"),
    ("nodes", "by batches"),
    ("spdl_threads", "by batches"),
    ("spdl_threads", "ffmpeg"),
    ("grain_threads", "whole batches"),
    ("webdataset_tars", "tars"),
    ("litdata_raw", "raw"),
    ("mosaicml", "MDS"),
    ("tfdata", "AUTOTUNE"),
    ("tfdata", "pool of 8"),
    ("tfdata", "antialiased"),
    ("dali", "CPU"),
    ("ffcv_beton", ".beton"),
)

PILLOW = f"{PROCESSES}, Pillow"


def run(settings: Settings, participants: Participants) -> CaseResult:
    work = {**task(settings), "decoder": fastest_decoder()}
    own = {**work, "decoder": "native"} if has_native() else work
    present, absent = participants.divide(WAYS)
    contenders = [contender(*way, own if way[0] == "feeder" else work, judged=True) for way in present]
    pillow = bare.contender("processes", {**work, "decoder": "pillow"})
    fast = bare.contender("processes", own)
    outcome = race([*contenders, fast, replace(pillow, label=PILLOW)], settings, absent)
    better = outcome.best(outcome.ours())
    targets = [
        *outcome.first(better, outcome.peers(), "the peers"),
        *outcome.speed(better, PROCESSES, 0.95),
        *outcome.speed(better, PILLOW, 1.4),
        *[figure for peer in outcome.peers() for figure in outcome.speed(better, peer)],
    ]
    return CaseResult(TITLE, "images", outcome.columns(), targets, outcome.absent)


def fastest_decoder() -> str:
    """The fastest decoder that is installed."""
    return "linear" if find_spec("cv2") and find_spec("simplejpeg") else "pillow"
