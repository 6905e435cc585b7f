"""The cases: files in the page cache in two threads or processes, slow storage, and a training step that is fed."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from itertools import repeat
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import jpeg, slow_reads
from benchmarks.contenders import as_array, epochs
from benchmarks.data import jpeg_folder
from benchmarks.figures import Figure, at_least, at_most, per
from benchmarks.harness import BenchmarkError, Contender, Measure, Settings, measure_memory
from benchmarks.peers.adapters import ADAPTERS
from benchmarks.peers.contest import OURS, CaseResult, Participants, bare, check, contender, epochs_of, race
from benchmarks.peers.work import Work, quiet_helpers
from benchmarks.slow_reads import READ_S

if TYPE_CHECKING:
    import torch

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

    JPEG files of 500 x 400 to 224 x 224, uint8, batch 64, Pillow at full scale (antialiased bilinear) in every
    contender, epochs after the first.

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

    The work of ``same_decode``, each contender alone in a new process. The first batch includes the loader's
    construction. Memory is the peak of the process tree above its level after the imports, over three epochs and 20.

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

    Loaders that accept a decoder use simplejpeg and OpenCV's ``INTER_LINEAR``, which does not antialias; the others use
    their own, aiofeed its native library. The worst PSNR against Pillow at full scale shows the quality.

    Targets: aiofeed first; at least 0.95 of two bare processes with that decoder; 1.4 of two with Pillow.
    """
    plain = medium(settings)
    work = {**plain, "decoder": "linear" if find_spec("cv2") and find_spec("simplejpeg") else "pillow"}
    own = {**work, "decoder": "native"} if jpeg.has_native() else work
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

    JPEG files of 3000 x 2000 to 224 x 224, batch 16. "pillow" decodes them at full scale; "draft" (Pillow) and "turbo"
    (simplejpeg) at a quarter, then resize with antialiasing; "native" is aiofeed's library; tf.data, DALI and SPDL's
    ffmpeg use their own. Loaders whose worst PSNR is half a dB below aiofeed's are of lower quality.

    Targets: at least 4.5 times ``DataLoader`` with a plain Pillow decode, 5 with simplejpeg; 0.95 of two bare processes
    with the same scaled decode; first among all of the same quality.
    """
    folder = str(jpeg_folder(settings.data, settings.size(192, 12), 3000, 2000))
    work = {"folder": folder, "side": 224, "batch": settings.size(16, 4)}
    shared = ["draft", "turbo"] if find_spec("simplejpeg") else ["draft"]
    least = {**dict.fromkeys(shared, 5.0), "draft": 4.5} | ({"native": 5.0} if jpeg.has_native() else {})
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


def one_thread(folder: str) -> AbstractContextManager[Measure]:
    return jpeg.aiofeed_feeder(folder, 64, threads=1, backend="turbo")


IN_FLIGHT = {128: 0.95, 512: 0.85}
"""Reads in flight, and the target as a share of the ideal."""
READS = {128: 12_800, 512: 25_600}


def slow_storage(settings: Settings, participants: Participants) -> CaseResult:
    """Which loader keeps the most reads of slow storage in flight?

    Reads of 20 ms, awaited if a loader supports it (aiofeed, SPDL), else slept in a thread, 128 or 512 at a time, then
    batches of 64; ``DataLoader`` with two workers has two at a time. The ideal is in flight / latency.

    Targets: aiofeed at least 0.95 of that with 128 in flight, 0.85 with 512; at most 25 microseconds of CPU per read.
    """
    present, absent = participants.divide(PEERS)
    contenders = []
    for count in IN_FLIGHT:
        options = {"reads": settings.size(READS[count], 256), "in_flight": count}
        contenders.append(
            Contender(f"aiofeed, {count}", slow_reads.aiofeed_feeder, options, ("torch", "aiofeed:Feeder"))
        )
        contenders += [Contender(f"{name}, {count}", PEERS[name], options, ADAPTERS[name].imports) for name in present]
    few = {"reads": settings.size(2 * slow_reads.BATCH, 4), "batch": settings.size(slow_reads.BATCH, 2)}
    contenders.append(Contender("DataLoader, 2 workers", slow_reads.data_loader, few, ("torch.utils.data",)))
    outcome = race(contenders, settings, absent)
    targets: list[Figure] = []
    for count, least in IN_FLIGHT.items():
        for label in (f"aiofeed, {count}", *(peer for peer in outcome.peers() if peer.endswith(f", {count}"))):
            share = tuple(rate / (count / READ_S) for rate in outcome.rate(label))
            target = at_least(least) if label.startswith(OURS) else None
            targets.append(Figure(f"reads/s / in flight by latency: {label}", share, target=target))
            if target:
                targets.append(Figure(f"CPU per read: {label}", outcome.cpu_us(label), "us", at_most(25)))
    return CaseResult(
        "Reads of 20 ms, 128 and 512 in flight, batch 64", "reads", outcome.columns(), targets, outcome.absent
    )


def spdl(reads: int, in_flight: int) -> AbstractContextManager[Measure]:
    """Its asynchronous pipe, with as many tasks as reads may be in flight."""
    import numpy as np
    import torch
    from spdl.pipeline import PipelineBuilder

    async def read(index: int) -> bytes:
        await asyncio.sleep(READ_S)
        return b"sample"

    def collate(data: list[bytes]) -> Any:
        return torch.from_numpy(np.stack([as_array(each) for each in data]))

    def batches() -> Iterator[Any]:
        builder: Any = PipelineBuilder().add_source(range(reads))
        builder = (
            builder.pipe(read, concurrency=in_flight, output_order="input").aggregate(slow_reads.BATCH).pipe(collate)
        )
        pipeline: Any = builder.add_sink(2).build(num_threads=2)
        with pipeline.auto_stop():
            yield from pipeline

    return epochs(batches)


def read_in_thread(index: int) -> Any:
    time.sleep(READ_S)
    return as_array(b"sample")


def grain(reads: int, in_flight: int) -> AbstractContextManager[Measure]:
    """Its read threads, as many as reads may be in flight, and twice as many samples read ahead."""
    import grain as package

    dataset: Any = package.MapDataset.range(reads).map(read_in_thread)
    options = package.ReadOptions(num_threads=in_flight, prefetch_buffer_size=2 * in_flight)
    batched = dataset.to_iter_dataset(options).batch(slow_reads.BATCH, drop_remainder=False)
    return epochs(lambda: batched)


def nodes(reads: int, in_flight: int) -> AbstractContextManager[Measure]:
    """``ParallelMapper`` in threads, as many as reads may be in flight."""
    from torch.utils.data import SequentialSampler, default_collate
    from torchdata.nodes import Batcher, Loader, Mapper, ParallelMapper, Prefetcher, SamplerWrapper

    sampler: Any = SamplerWrapper(SequentialSampler(range(reads)))
    node: Any = ParallelMapper(sampler, read_in_thread, num_workers=in_flight, method="thread")
    node = Prefetcher(Mapper(Batcher(node, slow_reads.BATCH, drop_last=False), default_collate), 2)
    loader: Any = Loader(node)
    return epochs(lambda: loader)


PEERS = {"SPDL": spdl, "Grain": grain, "torchdata.nodes": nodes}


FED = (THREAD, PROCESS, LOADER, "SPDL, by batches", "Grain, whole batches")
BATCH = 32
ALONE = "step bare of loading"
"""The word "bare" makes it one of the bare contenders."""


def training_step(settings: Settings, participants: Participants) -> CaseResult:
    """How much slower is a training step that is fed than one on a batch in memory?

    A small transformer on the CPU, one thread of torch: mostly Python. Batches of 32 JPEGs, 500 x 400 to 224 x 224,
    Pillow decode. The time per step includes the wait for the batch. Decoding's share of the cores is the CPU time of
    one bare thread for as many images, divided by the number of cores.

    Target: a step fed by aiofeed is longer by at most that.
    """
    work = {**medium(settings), "batch": settings.size(BATCH, 8)}
    present, absent = participants.divide(FED)
    imports = ("torch", "numpy", "PIL.Image")
    contenders = [Contender(ALONE, steps, {"label": ALONE, "work": work}, imports)]
    for label in present:
        loader = contender(label, work).imports
        contenders.append(Contender(label, steps, {"label": label, "work": work}, (*loader, *imports)))
    decoding = bare("threads", work, 1)
    outcome = race([*contenders, decoding], settings, absent)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = tuple(us * 1e-6 * work["batch"] / cores for us in outcome.cpu_us(decoding.label))
    step_s = {label: outcome.column(label, "step_s") for label in (ALONE, *outcome.ours(), *outcome.peers())}
    columns = {label: [Figure("step", tuple(1e3 * each for each in values), "ms")] for label, values in step_s.items()}
    without = step_s.pop(ALONE)
    targets = []
    for label, values in step_s.items():
        added = tuple((mine - alone) / most for mine, alone, most in zip(values, without, share, strict=True))
        target = at_most(1.0) if label.startswith(OURS) else None
        targets.append(Figure(f"added time per step / decoding's share of the cores: {label}", added, target=target))
    targets.append(Figure("decoding's share of the cores, per step", tuple(1e3 * each for each in share), "ms"))
    title = "A training step in Python on the CPU, fed with 32 JPEGs of 500x400 to 224 each"
    return CaseResult(title, "", columns, targets, outcome.absent)


class Step:
    """A training step on images, uint8 [B, 3, H, W], and class numbers."""

    def __init__(self) -> None:
        import torch
        from torch import nn

        layers = [nn.TransformerEncoderLayer(48, 2, 96, dropout=0.0, batch_first=True) for _ in range(12)]
        self._cut = nn.Conv2d(3, 48, 32, 32)
        self._model = nn.Sequential(*layers)
        self._head = nn.Linear(48, 16)
        parts = nn.ModuleList([self._cut, self._model, self._head])
        self._optimizer = torch.optim.Adam(parts.parameters(), foreach=False)
        self._loss = nn.CrossEntropyLoss()

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        tokens = self._cut(images.float().div_(255)).flatten(2).transpose(1, 2)
        loss = self._loss(self._head(self._model(tokens).mean(1)), labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


@contextmanager
def steps(label: str, work: Mapping[str, Any]) -> Iterator[Measure]:
    """Steps on the batches of a loader, or for ``ALONE`` as many on one batch, with torch limited to one thread."""
    import torch

    task = Work(**work)
    images = torch.randint(0, 256, (task.batch, 224, 224, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    batch = images, torch.zeros(task.batch, dtype=torch.int64)
    alone = nullcontext(lambda: repeat(batch, len(task.paths) // task.batch))
    quiet_helpers()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    step = Step()
    try:
        with alone if label == ALONE else epochs_of(label, task) as epoch:

            def measure() -> Mapping[str, float]:
                count, started = 0, time.perf_counter()
                for images, labels in epoch():
                    step(torch.as_tensor(images), torch.as_tensor(labels))
                    count += 1
                return {"step_s": (time.perf_counter() - started) / count, "items": len(task.paths)}

            measure()
            yield measure
    finally:
        torch.set_num_threads(threads)
