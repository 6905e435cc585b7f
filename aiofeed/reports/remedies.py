"""Advice for a bottleneck: changes that help, each with its predicted gain. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, inf
from typing import Any

from aiofeed.kernel.core.formatting import format_bytes
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.reports.bottleneck import (
    COLLATE,
    COPY,
    DECODE,
    FIRST,
    HAND_OVER,
    KEEPS_UP,
    LEAST_BATCHES,
    READ,
    SAMPLER,
    STEP,
    Bottleneck,
    FeedMeasurements,
)
from aiofeed.reports.explanation import Advice, Explanation, format_seconds

# A change that is predicted to bring less is not advised.
LEAST_GAIN = 1.05
# A larger gain is not predicted: costs that no stage measures are the limit then.
MOST_GAIN = 10.0
# Threads and reads are advised for so many times the rate of the other stages: at the same rate, both wait at times.
SPARE = 1.25
# Threads that wait, not compute, may be more than the cores, up to so many times as many.
WAITING_THREADS = 8
# Decoded samples may fill this part of the free memory.
CACHE_SHARE = 0.5

_ALIKE = "the calls wait, perhaps for each other when there are more, as for a lock or a server"

# Fewer probes do not show how often the GIL is held. If it is held more often, threads do less than two processes.
LEAST_PROBES = 10
THREADS_FIT = 0.5

# The stages of what is not a feeder.
_NAMES = {
    "loader": {DECODE: "dataset", READ: "hand-over", HAND_OVER: "transform"},
    "prefetch": {DECODE: "source", COLLATE: "pinned copy"},
    "attached": {DECODE: "server", COLLATE: "hand-over", HAND_OVER: "transform"},
}
# Stages and limits that no threads share.
_ALONE = {COPY, HAND_OVER, "the iterable"}
_SUBJECTS = {READ: "Reading", DECODE: "Decoding", COLLATE: "Collating", COPY: "Copying to the device"}


def explain(measured: FeedMeasurements) -> Explanation:
    """Return the verdict, the table of stages and the advice for an epoch."""
    stats = measured.stats
    if stats.batches < LEAST_BATCHES or not stats.samples:
        return Explanation(
            f"Too few batches: {stats.batches} of this epoch were returned, and it takes {LEAST_BATCHES} to tell "
            f"where the time goes. Iterate over the feeder first.",
            stage="",
            resource="",
        )
    found = Bottleneck(measured)
    lines = [advice for advice in _advise(found) if advice.gain is None or advice.at_most or advice.gain >= LEAST_GAIN]
    names, unit = _NAMES.get(measured.kind, {}), "batches" if measured.kind == "prefetch" else "samples"
    return Explanation(
        f"{_verdict(found).replace('samples/s', f'{unit}/s')}{_gil_share(found)}",
        names.get(found.stage, found.stage),
        found.resource,
        found.rate,
        found.waiting,
        tuple(replace(stage, name=names.get(stage.name, stage.name)) for stage in found.stages),
        tuple(lines),
        unit=unit,
    )


def explain_loader(stats: EpochStats, *, batch_size: int | None, workers: int, **settings: Any) -> Explanation:
    """Explain an epoch of a ``DataLoader``; ``settings``: fields of ``FeedMeasurements``."""
    size = batch_size or 1
    counted = replace(stats, samples=stats.batches * size, samples_decoded=max(stats.jobs * size, 1))
    settings |= {"kind": "loader", "threads": max(workers, 1), "processes": workers, "inline": not workers}
    return explain(FeedMeasurements.of_run(counted, None, reads=1, **settings))


def explain_prefetch(stats: EpochStats, **settings: Any) -> Explanation:
    """Explain an iteration of ``prefetch``."""
    settings |= {"kind": "prefetch", "threads": 1, "dataset_threads": 1, "first_epoch": True}
    return explain(FeedMeasurements.of_run(stats, None, reads=1, **settings))


def explain_attached(stats: EpochStats, **settings: Any) -> Explanation:
    """Explain an epoch of an attached feeder: what is not the step and not a copy is the server."""
    copy_s = stats.copy_s - stats.jobs_s
    waits = stats.stall_s > KEEPS_UP * stats.wall_s
    server_s = max(stats.wall_s - stats.copy_s, 0.0) if waits else 0.0
    counted = replace(stats, decode_s=server_s, collate_s=stats.jobs_s, copy_s=copy_s)
    return explain(FeedMeasurements.of_run(counted, None, kind="attached", threads=1, reads=1, **settings))


def _gil_share(found: Bottleneck) -> str:
    """Return whether threads could do the work of worker processes, if it was measured."""
    probes, held = found.stats.dataset_probes
    if probes < LEAST_PROBES or not found.measured.allows(threads=found.measured.threads):
        return ""
    could = "could" if held < THREADS_FIT * probes else "could not"
    return (
        f" The dataset holds the GIL in {held / probes:.0%} of {probes:.0f} probes: threads of one process {could} "
        f"replace worker processes."
    )


def _verdict(found: Bottleneck) -> str:
    measured, stats = found.measured, found.stats
    if found.stage == FIRST or found.resource == "the order":
        return (
            f"The wait for the first batch is the limit ({found.resource}): it took {format_seconds(found.start_s)} of "
            f"{format_seconds(stats.wall_s)}, {format_seconds(stats.order_s)} of it to list the order in iter(); later "
            f"batches come at {found.rate:,.0f} samples/s, and training waits {found.waiting:.0%} of that time."
        )
    if found.stage == STEP:
        rates = [found.possible[name] for name in (READ, DECODE, COLLATE, COPY) if name in found.possible]
        nothing = "Nothing needs to be done about loading."
        if found.resource == "the event loop":
            nothing = "Other tasks block its event loop, for which batches wait."
        elif found.waiting >= KEEPS_UP:
            nothing = "Single batches are late, because other work uses the cores or samples differ."
        elif stats.first_stall_s >= KEEPS_UP * stats.wall_s:
            nothing = f"The wait for the first batch took {stats.first_stall_s / stats.wall_s:.0%} of the epoch."
        # It has delivered what the step took.
        loading = f"loading could deliver {max(min(rates), found.rate):,.0f}/s; " if rates and min(rates) < inf else ""
        return (
            f"The step is the limit: it takes {found.rate:,.0f} samples/s, {loading}training waits "
            f"{found.waiting:.0%} of the time. {nothing}"
        )
    if measured.processes:
        by = f"{measured.processes} process{'es' if measured.processes > 1 else ''}"
    elif found.resource.startswith("storage"):
        by = f"{measured.reads} reads at a time"
    elif {found.stage, found.resource} & _ALONE or measured.kind != "feeder" or measured.resident:
        by = "it"
    else:
        by = f"{measured.threads} thread{'s' if measured.threads > 1 else ''}"
    delivers = "delivers" if by in ("it", "1 thread", "1 process") else "deliver"
    name = _NAMES.get(measured.kind, {}).get(found.stage, found.stage)
    idle = "" if found.busy else " No stage works all the time: each waits for others."
    return (
        f"{_SUBJECTS.get(name, f'The {name}')} is the limit ({found.resource}): {by} {delivers} "
        f"{found.rate:,.0f} samples/s, the step could take {found.step_rate:,.0f}/s; training waits "
        f"{found.waiting:.0%} of the time.{idle}"
    )


def _advise(found: Bottleneck) -> Iterator[Advice]:
    """Yield advice for the limit; some of it may gain nothing."""
    yield from _limit_advice(found)
    if found.is_single and found.stage in (READ, DECODE, COLLATE, HAND_OVER) and found.resource != "cold cache":
        yield Advice("a larger batch_size=: in batches of one sample, each sample has the cost of a batch")


def _limit_advice(found: Bottleneck) -> Iterator[Advice]:
    if found.stage == FIRST or found.resource == "the order":
        yield _first_batch_advice(found)
        return
    if found.resource == "the event loop":
        own_s = found.wall_s * (1 - found.waiting) - found.stats.late_s
        rates = [rate for name, rate in found.possible.items() if name not in (STEP, HAND_OVER)]
        gain = min([found.rate * found.wall_s / max(own_s, 1e-9), *rates]) / found.rate
        yield Advice(
            "await asyncio.to_thread() for the calls of other tasks, which block the consumer's event loop",
            gain if gain <= MOST_GAIN else None,
            "these calls may use what the step needs, too",
        )
        return
    if found.stage == STEP:
        if found.measured.step_copies:
            yield Advice('if the step copies batches to the accelerator, pass device="auto": copies then run ahead')
        if found.waiting >= KEEPS_UP and found.measured.kind == "feeder":
            yield Advice(
                f"Limits(prefetch_batches={2 * found.measured.prefetch_batches}): a late batch then delays less"
            )
        return
    if found.measured.kind != "feeder" and found.stage in (SAMPLER, READ, DECODE, COLLATE):
        yield from _other_advice(found)
        return
    match found.resource:
        case "cold cache":
            yield Advice(
                "nothing needs to be done: the cache is being filled. Explain the next epoch",
                _gain(found, **{READ: inf, "pool": inf}),
            )
        case "memory_bytes":
            yield from _memory_advice(found)
        case "uneven samples":
            yield from _uneven_sample_advice(found)
        case "prefetch_batches":
            yield _prefetch_advice(found)
        case "the iterable":
            yield Advice("the iterable of the Stream has one thread: let decode= do its work for each item")
        # Nothing is faster than data in memory. A larger batch_size is advised for any stage of single samples.
        case resource if not found.measured.resident and resource != "batch_size":
            yield from _stage_advice(found)


def _stage_advice(found: Bottleneck) -> Iterator[Advice]:
    if found.stage == READ and found.resource.startswith("storage"):
        yield from _read_advice(found)
    elif found.stage in (READ, DECODE, COLLATE):
        yield from _decode_job_advice(found)
    elif found.stage == COPY:
        yield Advice(
            "copy fewer bytes: keep uint8 and convert with transform=, which runs on the device; `python -m aiofeed "
            "doctor` measures the copy rate and says whether memory can be pinned"
        )
    else:
        yield Advice(
            "transform= runs in the training thread: do its work for each sample, or in collate_fn, or pass device=",
            _gain(found, **{HAND_OVER: inf}) if found.measured.transform else None,
        )


def _other_advice(found: Bottleneck) -> Iterator[Advice]:
    """Yield advice for what is not a feeder."""
    measured, cores = found.measured, found.measured.cores
    if measured.kind == "attached":
        text = "print(feeder.explain()) in the process of the server says what limits it, or whether a consumer does"
        yield Advice(text if found.stage == DECODE else "smaller batches, or batches on the device of the server")
    elif found.stage == SAMPLER:
        text = "a faster sampler, as one that draws the indices of an epoch at once"
        yield Advice(text, _gain(found, sampler=inf), "if it took no time")
    elif measured.kind == "prefetch":
        text = "faster batches of the iterable, for example by worker processes: one thread iterates it"
        yield Advice(text, _gain(found, pool=inf), "if they took no time")
    else:
        wanted = ceil(SPARE * found.with_stages(pool=inf) * found.pool_s)
        workers = min(wanted, cores * (WAITING_THREADS if found.waits else 1))
        reason = _ALIKE if found.waits else "the training needs a core, too" if workers >= cores else ""
        if workers > measured.processes:
            yield Advice(
                f"num_workers={workers}", _gain(found, pool=min(workers / found.pool_s, found.cores_rate)), reason
            )
        probes, held = found.stats.dataset_probes
        if probes >= LEAST_PROBES and held < THREADS_FIT * probes and measured.allows(threads=workers):
            bound = min(min(workers, probes / max(held, 1)) / found.pool_s, found.cores_rate)
            text = f"threads={workers} in place of workers, if several threads may call the dataset"
            yield Advice(text, _gain(found, pool=bound), "the dataset may hold the GIL for moments that no probe met")


def _gain(found: Bottleneck, **rates: float) -> float | None:
    """Predict the gain if stages could process so many samples per second; "pool": all decode jobs."""
    gain = found.with_stages(**rates) / found.rate
    return gain if gain <= MOST_GAIN else None


def _first_batch_advice(found: Bottleneck) -> Advice:
    stats = found.stats
    if found.resource == "the order":
        return Advice(
            "list the order faster: iter() waits until the sampler, plan or weights have given the whole epoch",
            stats.wall_s / max(stats.wall_s - stats.order_s, 1e-9),
        )
    if not found.measured.persistent:
        return Advice("persistent_workers=True: the workers then start once, not in every epoch")
    return Advice("`for epoch in feeder.epochs(n):` reads the next epoch ahead, unless the loop is left with break")


def _cache_advice(found: Bottleneck) -> Iterator[Advice]:
    measured = found.measured
    if measured.cached:
        return
    size = measured.sample_bytes * measured.length
    gain = _gain(found, **{READ: inf, "pool": inf})
    if size and size < CACHE_SHARE * measured.free_memory and measured.allows(cache="host"):
        text = f'cache="host": the decoded samples take about {format_bytes(size)} of memory'
    elif measured.allows(cache="disk"):
        text = f"cache=DiskCache(path){f', about {format_bytes(size)}' if size else ''}"
    else:
        return
    items = "; it keeps the random augmentation of the Dataset, too" if measured.dataset_threads else ""
    yield Advice(f"{text}; from the second epoch on{items}", gain)


def _read_advice(found: Bottleneck) -> Iterator[Advice]:
    measured = found.measured
    if found.resource == "storage bandwidth":
        mb_per_s = found.stats.bytes_read / found.stats.wall_s / 1e6
        yield Advice(
            f"use smaller samples or faster storage: it delivers {mb_per_s:,.0f} MB/s, and more reads only wait longer"
        )
    elif measured.lookahead_bytes:
        more = 4 * measured.lookahead_bytes
        ways = f"Limits(lookahead_bytes={more}), {format_bytes(more)}"
        ways += ', or shuffle="window"' * measured.allows(shuffle="window")
        yield Advice(f"{ways}: one request then reads more samples of a shard")
    elif measured.reads < measured.reads_most:
        wanted = SPARE * measured.reads * found.with_stages(**{READ: inf}) / found.rate
        reads = min(measured.reads_most, _power_of_two(wanted))
        memory = found.measured.sample_bytes * reads
        limits = f"read_concurrency={reads}"
        if memory > measured.memory_bytes:
            limits += f", memory_bytes={_power_of_two(memory)}"
        itself = "" if measured.reads_given else "; aiofeed also raises the number by itself, as long as that helps"
        # Reads that wait for slow ones, or for something else, do not scale.
        gain = _gain(found, **{READ: found.reads_rate(reads)}) if found.busy and not found.is_uneven(READ) else None
        yield Advice(f"Limits({limits}){itself}", gain)
    yield from _cache_advice(found)


def _memory_advice(found: Bottleneck) -> Iterator[Advice]:
    measured, stats = found.measured, found.stats
    batch = stats.samples / stats.batches
    batches = measured.prefetch_batches + ceil(measured.reads / batch) + 1
    wanted = _power_of_two(batches * batch * max(measured.sample_bytes, 1.0))
    if wanted > CACHE_SHARE * measured.free_memory:
        yield Advice("use smaller batches or samples: memory_bytes should be larger, and there is not enough memory")
        return
    yield Advice(f"Limits(memory_bytes={wanted}), {format_bytes(wanted)}", _gain(found))


def _uneven_sample_advice(found: Bottleneck) -> Iterator[Advice]:
    measured = found.measured
    if measured.allows(in_order="samples"):
        # The time of a read counts until all of its chunk are read.
        gain = _gain(found, **({READ: inf} if found.stage == READ else {}))
        reason = "as if no thread and no read had to wait for another"
        yield Advice('in_order="samples": a slow sample then delays no other', gain, reason)
    elif measured.in_order is True:
        yield Advice("in_order=False: a batch with a slow sample then delays no other")
    yield Advice(f"Limits(prefetch_batches={4 * measured.prefetch_batches}): batches wait for the slow ones, in order")


def _prefetch_advice(found: Bottleneck) -> Advice:
    prefetch = found.measured.prefetch_batches
    while found.lanes(prefetch_batches=prefetch) < found.measured.threads:
        prefetch += 1
    gain = _jobs_gain(found, prefetch_batches=prefetch)
    return Advice(f"Limits(prefetch_batches={prefetch})", gain, _ALIKE if found.waits else "")


def _jobs_gain(found: Bottleneck, threads: int | None = None, prefetch_batches: int | None = None) -> float | None:
    return _gain(found, pool=min(found.lanes(threads, prefetch_batches) / found.pool_s, found.cores_rate))


def _decode_job_advice(found: Bottleneck) -> Iterator[Advice]:
    """Yield advice for decoding and collating."""
    measured, resource, cores = found.measured, found.resource, found.measured.cores
    if resource == "one thread":
        threads = _threads_wanted(found)
        if threads > 1:
            yield Advice(f"FromDataset(dataset, threads={threads}), if several threads may call it at the same time")
        yield from _process_advice(found, 1 / found.pool_s, "", _ALIKE if found.waits else "")
    elif resource == "GIL":
        yield from _process_advice(
            found, found.rate / max(measured.processes, 1), ": each process has a GIL of its own"
        )
    elif resource == "other processes":
        cpu_s = (found.stats.decode_cpu_s + found.stats.collate_cpu_s) / found.decoded
        yield Advice(
            f"end the other processes, or keep them off these {cores} cores",
            _gain(found, pool=min(found.lanes(), cores) / cpu_s) if cpu_s else None,
        )
        fewer = max(1, round(measured.threads * (1.0 - measured.core_wait)))
        if fewer < measured.threads:
            yield Advice(f"Limits(decode_threads={fewer}): as many threads as there are cores left for them")
    elif resource == "a lock":
        yield Advice(
            f"no more threads: {found.lanes()} threads do {found.together:.1f} times as much as one alone: "
            f"their calls wait for each other, as for a lock"
        )
        yield from _process_advice(found, found.rate, ", if each process has a lock of its own", _ALIKE)
    elif resource in ("blocking calls", "threads") and measured.threads_saturated:
        yield Advice("more threads were tried and decode no more: the calls wait for each other, as for a lock")
    elif resource in ("blocking calls", "threads"):
        threads = _threads_wanted(found)
        jobs = measured.threads if found.stage == COLLATE else measured.prefetch_batches * measured.threads
        prefetch = measured.prefetch_batches * ceil(threads / max(min(found.lanes(), jobs), 1))
        if threads > measured.threads:
            given = f", prefetch_batches={prefetch}" if measured.prefetch_given else ""
            gain = _jobs_gain(found, threads, prefetch)
            yield Advice(f"Limits(decode_threads={threads}{given})", gain, _ALIKE if found.waits else "")
    if found.stage == COLLATE:
        if measured.collate_fn:
            yield Advice(
                "do the work of collate_fn for each sample, in the decoder or Dataset: it then runs in all threads"
            )
        return
    for text, factor in measured.decoders:
        yield Advice(text, None if factor is None else _gain(found, pool=factor * found.lanes() / found.pool_s))
    yield from _cache_advice(found)


def _threads_wanted(found: Bottleneck) -> int:
    """Return the threads that decode as much as other stages can take; at most the cores if threads compute."""
    measured = found.measured
    wanted = ceil(SPARE * measured.threads * found.with_stages(pool=inf) / found.rate)
    return min(wanted, measured.cores * (WAITING_THREADS if found.waits else 1))


def _process_advice(found: Bottleneck, one_rate: float, reason: str, unless: str = "") -> Iterator[Advice]:
    """Yield advice to use worker processes that each decode ``one_rate`` samples per second, if ``Feeder`` takes them.

    As many as bring what the other stages can take, but not more than the cores, or than the threads if the user fixed
    fewer.
    """
    measured = found.measured
    wanted = ceil(min(SPARE * found.with_stages(pool=inf), found.cores_rate) / one_rate)
    numbers = (min(wanted, measured.cores), min(wanted, measured.cores, measured.threads))
    processes = next((number for number in numbers if measured.allows(engine=f"process:{number}")), 0)
    if processes > max(measured.processes, 1):
        gain = _gain(found, pool=min(processes * one_rate, found.cores_rate))
        yield Advice(f'engine="process:{processes}"{reason}', gain, unless)


def _power_of_two(number: float) -> int:
    return 1 << max(ceil(number) - 1, 0).bit_length()
