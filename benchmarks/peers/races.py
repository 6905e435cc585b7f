"""The cases in which loaders decode JPEG files that are in the page cache, in two threads or processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from statistics import median
from typing import Any

from benchmarks.data import jpeg_folder
from benchmarks.figures import Figure, at_most, per
from benchmarks.harness import BenchmarkError, Contender, Measure, Settings, measure_memory
from benchmarks.jpeg import aiofeed_feeder, has_native
from benchmarks.peers.contest import OURS, CaseResult, Participants, bare, check, contender, race

THREAD, PROCESS = "aiofeed, thread", "aiofeed, process:2"
THREADS, PROCESSES = "two bare threads", "two bare processes"
LOADER = "DataLoader, persistent"

SAME = (
    *(THREAD, PROCESS, LOADER, "DataLoader, new workers", "torchdata.nodes, by batches", "torchdata.nodes, per item"),
    *("SPDL, by batches", "SPDL, per item", "Grain, whole batches", "Grain, per item"),
    *("WebDataset, tars", "LitData, raw", "MosaicML, MDS"),
)
BEST = (
    *(THREAD, PROCESS, LOADER, "torchdata.nodes, by batches", "SPDL, by batches", "SPDL, ffmpeg"),
    *("Grain, whole batches", "WebDataset, tars", "LitData, raw", "MosaicML, MDS"),
    *("tf.data, AUTOTUNE", "tf.data, pool of 8", "tf.data, antialiased", "DALI, CPU", "FFCV, .beton"),
)
SCALED = (THREAD, PROCESS, LOADER, "SPDL, by batches", "Grain, whole batches")
OWN_SCALE = ("tf.data, AUTOTUNE", "tf.data, at 1/4", "tf.data, at 1/8", "DALI, CPU", "SPDL, ffmpeg")
SMALL = (
    *(THREAD, PROCESS, LOADER, "torchdata.nodes, by batches", "SPDL, by batches", "Grain, whole batches"),
    *("WebDataset, tars", "LitData, raw", "MosaicML, MDS", "tf.data, AUTOTUNE"),
)


def medium(settings: Settings) -> dict[str, Any]:
    """The arguments of ``Work`` for files of 500 x 400."""
    return {"folder": str(jpeg_folder(settings.data, settings.size(1024, 96))), "side": 224, "decoder": "pillow"}


def small(settings: Settings, decoder: str) -> dict[str, Any]:
    """The arguments of ``Work`` for files of 64 x 64."""
    folder = jpeg_folder(settings.data, settings.size(20_000, 96), 64, 64)
    return {"folder": str(folder), "side": 64, "decoder": decoder}


def same_decode(settings: Settings, participants: Participants) -> CaseResult:
    """Which loader is fastest with the same decoder?

    JPEG files of 500 x 400 to 224 x 224, uint8, batch 64, Pillow or Pillow-SIMD at full scale (antialiased bilinear) in
    every contender, epochs after the first.

    Targets: aiofeed's threads as fast as two bare threads, its two processes at least 0.97 of two bare processes; the
    better of them at least 1.15 of every peer, 2.0 of SPDL per item; CPU time per image at most 1.03 of the bare ones'.
    """
    work = medium(settings)
    present, absent = participants.divide(SAME)
    contenders = [contender(label, work) for label in present]
    outcome = race([*contenders, bare("threads", work), bare("processes", work)], settings, absent)
    better = outcome.best(outcome.ours())
    least = {peer: 2.0 if peer == "SPDL, per item" else 1.15 for peer in outcome.peers()}
    targets = [
        *outcome.faster(THREAD, THREADS, 1.0),
        *outcome.faster(PROCESS, PROCESSES, 0.97),
        *[figure for peer in outcome.peers() for figure in outcome.faster(better, peer, least[peer])],
        *outcome.cheaper(THREAD, THREADS, at_most(1.03)),
        *outcome.cheaper(PROCESS, PROCESSES, at_most(1.03)),
    ]
    title = "JPEG 500x400 to 224, the same Pillow decode for all, batch 64, second epoch"
    return CaseResult(title, "images", outcome.columns(), targets, outcome.absent)


EPOCHS, SOME = 20, 2
"""Epochs after the first, over which memory is measured."""


def footprint(settings: Settings, participants: Participants) -> CaseResult:
    """How long until the first batch, and how much memory?

    The work of ``same_decode``, each contender alone in a new process after its imports, with the system's malloc as it
    is. The time of the first batch includes the loader's construction. Memory is the peak of the whole process tree
    above its level after the imports, sampled every 20 ms, over three epochs; then over 20 epochs.

    Targets: aiofeed's first batch before every peer's; at most 60 MB; at most 5 MB more after 20 epochs.
    """
    present, absent = participants.divide(SAME)
    contenders = [contender(label, medium(settings)) for label in present]
    first: dict[str, list[float]] = {label: [] for label in present}
    memory: dict[str, list[float]] = {label: [] for label in present}
    long: dict[str, list[float]] = {label: [] for label in present if label.startswith(OURS)}
    dropped: dict[str, str] = {}
    for number in range(min(3, settings.rounds)):
        for each in contenders[number:] + contenders[:number]:
            label = each.label
            if label in dropped:
                continue
            settings.progress(f"round {number + 1}: {label}")
            try:
                (peak,), samples = measure_memory(each, settings, (SOME,))
                if label in long:
                    (later,), _ = measure_memory(each, settings, (settings.size(EPOCHS, 3),))
                    long[label].append(later / 1e6)
            except BenchmarkError as error:
                dropped[label] = str(error).strip().splitlines()[-1]
                continue
            first[label].append(1e3 * samples[0]["first_s"])
            memory[label].append(peak / 1e6)
    check(dropped)
    labels = sorted((label for label in present if label not in dropped), key=lambda label: median(first[label]))
    columns = {
        label: [Figure("first batch", tuple(first[label]), "ms"), Figure("memory", tuple(memory[label]), "MB")]
        for label in labels
    }
    targets = []
    if peers := [label for label in labels if not label.startswith(OURS)]:
        what = f"first batch: {THREAD} / fastest of the peers ({peers[0]})"
        targets.append(Figure(what, per(first[THREAD], first[peers[0]]), target=at_most(1.0)))
    for label, peaks in long.items():
        grown = tuple(after - before for after, before in zip(peaks, memory[label], strict=True))
        targets.append(Figure(f"memory above the imports: {label}", tuple(memory[label]), "MB", at_most(60)))
        targets.append(Figure(f"memory, {EPOCHS} epochs beyond {1 + SOME}: {label}", grown, "MB", at_most(5)))
    title = "First batch and memory, JPEG 500x400 to 224, the same Pillow decode for all, batch 64"
    return CaseResult(title, "", columns, targets, {**absent, **dropped})


def best_decoder(settings: Settings, participants: Participants) -> CaseResult:
    """Which loader is fastest with the fastest decoder available for it?

    The work of ``same_decode``, but loaders that accept a decoder use simplejpeg (libjpeg-turbo) and OpenCV's
    ``INTER_LINEAR``, which does not antialias; the others use their own, aiofeed its native library. The worst PSNR
    against Pillow at full scale shows the quality of the pictures.

    Targets: aiofeed first; at least 0.95 of two bare processes with that decoder; 1.4 of two with Pillow.
    """
    plain = medium(settings)
    work = {**plain, "decoder": "linear" if find_spec("cv2") and find_spec("simplejpeg") else "pillow"}
    own = {**work, "decoder": "native"} if has_native() else work
    present, absent = participants.divide(BEST)
    contenders = [contender(each, own if each.startswith(OURS) else work, judged=True) for each in present]
    pillow = replace(bare("processes", plain), label=f"{PROCESSES}, Pillow")
    outcome = race([*contenders, bare("processes", own), pillow], settings, absent)
    better = outcome.best(outcome.ours())
    targets = [
        *outcome.first(better, outcome.peers(), "the peers"),
        *outcome.faster(better, PROCESSES, 0.95),
        *outcome.faster(better, pillow.label, 1.4),
        *[figure for peer in outcome.peers() for figure in outcome.faster(better, peer)],
    ]
    title = "JPEG 500x400 to 224, each with its fastest decoder, batch 64, second epoch"
    return CaseResult(title, "images", outcome.columns(), targets, outcome.absent)


QUALITY_DB = 0.5


def large_files(settings: Settings, participants: Participants) -> CaseResult:
    """Which loader is fastest for files much larger than the result?

    JPEG files of 3000 x 2000 to 224 x 224, batch 16, epochs after the first. "pillow" decodes them at full scale;
    "draft" (Pillow) and "turbo" (simplejpeg) at a quarter, the smallest scale of at least twice the side, then resize
    with antialiasing; "native" is aiofeed's native library; tf.data, DALI and SPDL's ffmpeg use their own decoders.
    Quality is the worst PSNR against Pillow at full scale; loaders more than half a dB below aiofeed's are of lower
    quality. The other loaders do not get the native library, although their datasets could call it.

    Targets: at least 4.5 times ``DataLoader`` with a plain Pillow decode, 5 with simplejpeg; 0.95 of two bare processes
    with the same scaled decode; first among all of the same quality.
    """
    folder = str(jpeg_folder(settings.data, settings.size(192, 12), 3000, 2000))
    work = {"folder": folder, "side": 224, "batch": settings.size(16, 4)}
    shared = ["draft", "turbo"] if find_spec("simplejpeg") else ["draft"]
    least = {**dict.fromkeys(shared, 5.0), "draft": 4.5} | ({"native": 5.0} if has_native() else {})
    scaled, absent = participants.divide(SCALED)
    own, not_own = participants.divide(OWN_SCALE)

    def named(label: str, decoder: str) -> Contender:
        each = contender(label, {**work, "decoder": decoder}, judged=True)
        return replace(each, label=f"{label}, {decoder}")

    contenders = [
        named(LOADER, "pillow"),
        *[named(label, decoder) for decoder in shared for label in scaled],
        *[named(label, "native") for label in (THREAD, PROCESS) if "native" in least],
        *[contender(label, {**work, "decoder": "draft"}, judged=True) for label in own],
    ]
    for decoder in least:
        each = bare("processes", {**work, "decoder": decoder})
        contenders.append(replace(each, label=f"{each.label}, {decoder}"))
    outcome = race(contenders, settings, {**absent, **not_own})
    plain = f"{LOADER}, pillow"
    better = {decoder: outcome.best((f"{THREAD}, {decoder}", f"{PROCESS}, {decoder}")) for decoder in least}
    best = outcome.best(better.values())
    comparable = [peer for peer in outcome.peers() if outcome.db(peer) >= outcome.db(best) - QUALITY_DB]
    targets = [
        *[figure for name, ours in better.items() for figure in outcome.faster(ours, plain, least[name])],
        *[figure for name, ours in better.items() for figure in outcome.faster(ours, f"{PROCESSES}, {name}", 0.95)],
        *outcome.first(best, comparable, "those of the same quality"),
        *[figure for peer in outcome.peers() for figure in outcome.faster(best, peer) if peer != plain],
    ]
    title = "JPEG 3000x2000 to 224, batch 16, second epoch"
    return CaseResult(title, "images", outcome.columns(), targets, outcome.absent)


def small_files(settings: Settings, participants: Participants) -> CaseResult:
    """Which loader has the least overhead for very small files?

    20,000 JPEG files of 2 KB, 64 x 64, no resize, batch 64, epochs after the first; decoded by Pillow or Pillow-SIMD,
    which hold the GIL for much of the time. tf.data uses its own decoder, without Python.

    Targets: aiofeed in two processes at least 0.85 of two bare processes, 1.3 of ``DataLoader``, first among the peers
    in Python; in threads at least 0.9 of one bare thread.
    """
    work = small(settings, "pillow")
    present, absent = participants.divide(SMALL)
    one = bare("threads", work, 1)
    others = [one, bare("processes", work), bare("threads", work)]
    outcome = race([*(contender(label, work) for label in present), *others], settings, absent)
    in_python = [peer for peer in outcome.peers() if not peer.startswith("tf.data")]
    targets = [
        *outcome.faster(PROCESS, PROCESSES, 0.85),
        *outcome.faster(PROCESS, LOADER, 1.3),
        *outcome.first(PROCESS, in_python, "the peers in Python"),
        *outcome.faster(THREAD, one.label, 0.9),
        *[figure for peer in outcome.peers() for figure in outcome.faster(PROCESS, peer) if peer != LOADER],
    ]
    title = "20,000 JPEGs of 2 KB, 64x64, Pillow decode, batch 64, second epoch"
    return CaseResult(title, "images", outcome.columns(), targets, outcome.absent)


def small_files_simplejpeg(settings: Settings, participants: Participants) -> CaseResult:
    """Which loader is fastest for very small files with a decoder that hardly holds the GIL?

    ``small_files`` with simplejpeg for all, like ``DecodeImage(backend="turbo")``. The framework's cost of a sample is
    the CPU time of a feeder with one thread beyond that of one bare thread.

    Targets: threads at least 0.65 of two bare processes and above ``DataLoader``; two processes at least 0.85; at most
    20 microseconds of the framework's own per sample.
    """
    work = small(settings, "turbo")
    present, absent = participants.divide(SMALL)
    imports = ("torch", "aiofeed:Feeder", "aiofeed:DecodeImage", "simplejpeg")
    single = Contender("aiofeed, one thread", one_thread, {"folder": work["folder"]}, imports)
    one = bare("threads", work, 1)
    contenders = [*(contender(label, work) for label in present), single, one, bare("processes", work)]
    outcome = race(contenders, settings, absent)
    pairs = zip(outcome.cpu_us(single.label), outcome.cpu_us(one.label), strict=True)
    added = tuple(ours - decoding for ours, decoding in pairs)
    targets = [
        *outcome.faster(THREAD, PROCESSES, 0.65),
        *outcome.faster(THREAD, LOADER, 1.0),
        *outcome.faster(PROCESS, PROCESSES, 0.85),
        Figure("framework's own CPU per sample, one thread", added, "us", at_most(20)),
        *[figure for peer in outcome.peers() for figure in outcome.faster(PROCESS, peer)],
    ]
    title = "20,000 JPEGs of 2 KB, 64x64, simplejpeg, batch 64, second epoch"
    return CaseResult(title, "images", outcome.columns(), targets, outcome.absent)


@contextmanager
def one_thread(folder: str) -> Iterator[Measure]:
    with aiofeed_feeder(folder, 64, threads=1, backend="turbo") as measure:
        yield measure
