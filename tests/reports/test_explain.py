"""Tests of ``explain``: recorded and plain counters; the options that it advises; the texts; the ranks; any feeder.

The benchmark ``explain`` runs the feeders whose counters were recorded.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import aiofeed
from aiofeed import Feeder, FromDataset, Limits, Table, Tensors
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.runtime import machine
from aiofeed.reports.bottleneck import FeedMeasurements, all_allowed
from aiofeed.reports.explanation import RankTimes
from aiofeed.reports.feeder import allows, compare, figures_of, measurements
from aiofeed.reports.remedies import explain
from benchmarks import explain as plants
from benchmarks.explain import PLANTS, Items, Numbers
from tests.support.calls import PUBLIC, calls_in
from tests.support.explained_plants import RECORDED, slow_rank

COUNTERS: dict[str, Any] = json.loads(RECORDED.read_text())


def recorded(name: str) -> FeedMeasurements:
    """The counters of an epoch with a planted bottleneck."""
    counters = dict(COUNTERS[name])
    return FeedMeasurements(**counters | {"stats": EpochStats(**counters["stats"])})


@pytest.mark.parametrize("name", COUNTERS)
def test_a_planted_bottleneck_is_named(name: str) -> None:
    """``explain`` names the planted stage and resource, and the verdict is the first line of its text."""
    plant = PLANTS[name]
    found = explain(recorded(name))
    assert (found.stage, found.resource) == (plant.stage, plant.resource or found.resource)
    assert str(found).splitlines()[0] == found.verdict
    assert bool(found.advice) == (plant.stage != "step")


@pytest.mark.slow
def test_the_figures_of_all_ranks_are_gathered() -> None:
    """Two processes: the explanation of rank 0 has the figures of both."""
    assert [rank["rank"] for rank in slow_rank()["ranks"]] == [0, 1]


# --- plain counters

BATCHES = 101
STATS = EpochStats(
    samples=8 * BATCHES,
    batches=BATCHES,
    wall_s=10.1,
    first_batch_s=0.1,
    first_stall_s=0.1,
    stall_s=8.1,
    samples_read=800,
    reading_s=80.0,
    samples_read_apart=100,
    reading_apart_s=10.0,
    samples_decoded=800,
    decode_s=4.0,
    decode_cpu_s=3.9,
    process_cpu_s=5.0,
)


def no_cache(**option: object) -> bool:
    return "cache" not in option


def measured(stats: EpochStats = STATS, **settings: Any) -> FeedMeasurements:
    usual = {"threads": 2, "cores": 4, "reads": 8, "chunk_size": 4, "allows": no_cache}
    return FeedMeasurements(stats=stats, **{**usual, **settings})


def heavy_decode(**changes: Any) -> EpochStats:
    fast_reads: dict[str, Any] = {"reading_s": 0.8, "reading_apart_s": 0.1}
    return replace(STATS, **fast_reads, **{"decode_s": 20.0, "decode_cpu_s": 19.8, **changes})


def advice(found: aiofeed.reports.Explanation) -> str:
    return "\n".join(map(str, found.advice))


def test_the_verdict_gives_the_rates_and_the_share_of_waiting() -> None:
    """80 samples/s arrive, a step takes 25 ms per batch of 8, and 80 % of the time is waiting."""
    found = explain(measured())
    assert found.verdict == (
        "Reading is the limit (storage latency): 8 reads at a time deliver 80 samples/s, the step could take 400/s; "
        "training waits 80% of the time."
    )
    assert (found.samples_per_s, found.waiting) == (pytest.approx(80), pytest.approx(0.8))


def test_more_reads_are_predicted_to_bring_what_the_next_stage_allows() -> None:
    """64 reads would bring 640 samples/s, decoding 400/s and the step 400/s: five times as many as now."""
    [first] = explain(measured()).advice
    assert first.text.startswith("Limits(read_concurrency=64)")
    assert first.gain == pytest.approx(5.0)


FAST_READS: dict[str, Any] = {"reading_s": 0.8, "reading_apart_s": 0.1}
SHORT: dict[str, Any] = {"samples": 10_000, "batches": 10_000, "wall_s": 5.1, "stall_s": 4.9, "samples_decoded": 10_000}
QUICK: dict[str, Any] = {"samples_read": 10_000, "reading_s": 1.0, "reading_apart_s": 0.01, "decode_s": 0.5}


@pytest.mark.parametrize(
    ("changes", "settings", "stage", "resource", "advised", "others"),
    [
        # Requests for shards join ranges within the look-ahead; more reads at a time bring nothing.
        (
            *({}, {"lookahead_bytes": 64 << 20}, "read", None),
            *('Limits(lookahead_bytes=268435456), 256.0 MiB, or shuffle="window"', "reads"),
        ),
        # Reads take 100 ms, and 20 ms while few are in flight; or twice as many have brought nothing.
        ({"reading_apart_s": 2.0}, {"allows": all_allowed}, "read", "storage bandwidth", "cache=", "reads"),
        ({}, {"reads_saturated": True}, "read", "storage bandwidth", "", "reads"),
        # A source that reads in 64 threads gets no advice to read more than 64 samples at a time.
        ({"reading_s": 640.0, "reading_apart_s": 80.0}, {"reads": 64, "reads_most": 64}, "read", None, "", "reads"),
        # Small files of the page cache are read by the threads that decode.
        (
            {**FAST_READS, "samples_read": 0, "decode_s": 4.0, "decode_cpu_s": 4.0, "read_s": 16.0},
            *({}, "read", "threads", "Limits(decode_threads=4", "batch_size"),
        ),
        ({**FAST_READS, "copy_s": 1.0, "copy_wait_s": 9.0}, {"device": True}, "copy", "PCIe", "", "batch_size"),
        ({**FAST_READS, "hand_over_s": 7.9}, {"transform": True}, "hand-over", None, "transform=", "batch_size"),
        # Batches are there and wait for a loop that another task blocks.
        (
            {"stall_s": 0.6, "first_stall_s": 0.1, "late_s": 6.0},
            *({}, "step", "the event loop", "asyncio.to_thread()", "batch_size"),
        ),
        ({"late_s": 6.0}, {}, "read", None, "", "batch_size"),
        # Batches of one sample, only if loading is the limit; or their own cost of 0.5 ms is.
        ({"samples": BATCHES}, {}, "read", None, "a larger batch_size=", "asyncio"),
        ({"samples": BATCHES, "stall_s": 0.3}, {}, "step", None, "", "batch_size"),
        ({**SHORT, **QUICK, "decode_cpu_s": 0.5}, {}, "hand-over", "batch_size", "a larger batch_size=", "asyncio"),
        ({}, {}, "read", None, "Limits(read_concurrency=64)", "batch_size"),
    ],
)
def test_the_limit_is_named_with_what_removes_it(
    changes: dict[str, Any], settings: dict[str, Any], stage: str, resource: str | None, advised: str, others: str
) -> None:
    """The stage and the resource follow from the times of all stages; ``others`` is not advised."""
    found = explain(measured(replace(STATS, **changes), **settings))
    assert found.stage == stage
    assert resource in (None, found.resource)
    assert advised in advice(found)
    assert ("read_concurrency" if others == "reads" else others) not in advice(found)
    assert resource != "the event loop" or found.advice[0].at_most


@pytest.mark.parametrize(
    ("changes", "settings", "resource", "wanted"),
    [
        ({}, {}, "threads", "Limits(decode_threads=4"),
        ({}, {"cores": 2, "decoders": (("a faster decoder", 1.5),)}, "cores", "a faster decoder (predicted: 1.50"),
        ({}, {"cores": 2, "allows": all_allowed}, "cores", "DiskCache(path)"),
        # The cores could decode twice as much as one process: two processes, and one for what they lose.
        ({"gil_us": 1000.0}, {}, "GIL", 'engine="process:3": each process has a GIL of its own (predicted: 2.0'),
        (
            {"gil_us": 1000.0},
            {"cores": 64},
            "GIL",
            'engine="process:7": each process has a GIL of its own (predicted: 5.0',
        ),
        ({"gil_us": 1000.0}, {"cores": 64, "processes": 2}, "GIL", 'engine="process:13"'),
        ({"gil_probe_s": 0.05, "gil_probes": 50}, {}, "GIL", 'engine="process:3"'),
        ({"gil_us": 1000.0}, {"allows": lambda engine="", **_: engine == "process:2"}, "GIL", 'engine="process:2"'),
        ({}, {"dataset_threads": 1, "threads": 2}, "one thread", "FromDataset(dataset, threads=4)"),
        ({"decode_cpu_s": 5.0}, {"core_wait": 0.7}, "other processes", "Limits(decode_threads=1)"),
        ({"decode_cpu_s": 1.0}, {}, "blocking calls", "Limits(decode_threads="),
        ({"decode_cpu_s": 1.0}, {"threads_saturated": True}, "blocking calls", "as for a lock"),
        ({}, {"cold_cache": True}, "cold cache", "nothing needs to be done"),
        (
            {},
            {"threads_tuned": True, "decoders": (("a faster decoder", None),)},
            "memory bandwidth",
            "a faster decoder",
        ),
        ({}, {"threads": 8, "cores": 8, "chunk_size": 8}, "prefetch_batches", "Limits(prefetch_batches=8)"),
    ],
)
def test_decoding_runs_into(changes: dict[str, Any], settings: dict[str, Any], resource: str, wanted: str) -> None:
    """What decoding runs into follows from processor time, waits for cores, probes of the GIL and settings."""
    found = explain(measured(heavy_decode(**changes), **settings))
    assert (found.stage, found.resource) == ("decode", resource)
    assert wanted in advice(found)


def test_batches_that_follow_the_threads_are_not_advised() -> None:
    """If the user gave no ``prefetch_batches``, more threads have more batches: no advice would fix their number."""
    found = explain(measured(heavy_decode(decode_cpu_s=1.0), prefetch_given=False))
    assert "Limits(decode_threads=" in advice(found)
    assert "prefetch_batches" not in advice(found)
    found = explain(measured(heavy_decode(), threads=8, cores=8, chunk_size=8, prefetch_given=False))
    assert found.resource != "prefetch_batches"


@pytest.mark.parametrize(("has_gil", "resource"), [(True, "GIL"), (False, "memory bandwidth")])
def test_tiny_samples_run_into_the_gil_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, has_gil: bool, resource: str
) -> None:
    """Tuned threads below the number of cores, and samples that are mostly work of Python."""
    monkeypatch.setattr(machine, "has_gil", lambda: has_gil)
    found = explain(measured(heavy_decode(samples_decoded=800_000), threads_tuned=True))
    assert found.resource == resource


def test_memory_is_named_if_no_stage_is_busy_and_planning_waits_for_it() -> None:
    """With half of the reads that storage and threads allow, the wait for memory is the reason."""
    stats = replace(STATS, reading_s=8.0, reading_apart_s=1.0, memory_wait_s=8.0)
    found = explain(measured(stats, memory_bytes=1 << 20, sample_bytes=float(1 << 18), free_memory=1 << 34))
    assert found.resource == "memory_bytes"
    assert "Limits(memory_bytes=8388608)" in advice(found)
    assert explain(measured(replace(stats, memory_wait_s=0.0))).resource != "memory_bytes"


def test_nothing_is_advised_if_the_step_is_the_limit() -> None:
    """Waiting for 2 % of the time leaves nothing to gain, whatever else is slow."""
    found = explain(measured(replace(heavy_decode(), stall_s=0.3), allows=all_allowed))
    assert found.stage == "step"
    assert "Nothing needs to be done" in found.verdict
    assert found.advice == ()
    assert 'device="auto"' in advice(explain(measured(replace(STATS, stall_s=0.3), step_copies=True)))


def test_single_late_batches_are_not_attributed_to_a_stage() -> None:
    """If loading can deliver far more than the step takes, waits for 10 % of the time come from single batches."""
    stats = replace(STATS, stall_s=1.1, reading_s=0.8, reading_apart_s=0.1)
    found = explain(measured(stats))
    assert found.stage == "step"
    assert "Single batches are late" in found.verdict
    assert advice(found).startswith("Limits(prefetch_batches=4)")


LATE_START = replace(STATS, wall_s=100.0, first_batch_s=90.0, first_stall_s=90.0, stall_s=90.1)


def test_the_wait_for_the_first_batch_of_a_later_epoch_counts() -> None:
    """If only the first batch was awaited, that wait is the limit, but not while threads start and caches fill."""
    found = explain(measured(LATE_START))
    assert (found.stage, found.resource) == ("first batch", "start-up")
    assert "it took 90.0 s of 100.0 s" in found.verdict
    assert "feeder.epochs" in advice(found)
    assert explain(measured(LATE_START, first_epoch=True)).stage == "step"
    slow_rest = replace(LATE_START, wall_s=300.0, stall_s=250.0)
    assert explain(measured(slow_rest)).stage == "read"


def test_batches_that_were_loaded_before_do_not_make_the_step_the_limit() -> None:
    """Batches that come faster than decoding allows were made while the first was awaited, so that wait counts.

    That many batches cannot have been: then the prediction is wrong, and is no less than what was delivered.
    """
    stats = heavy_decode(
        **{"samples": 32, "batches": 4, "wall_s": 3.0, "first_batch_s": 2.4, "first_stall_s": 2.4, "stall_s": 2.4},
        **{"samples_read": 32, "samples_read_apart": 4, "samples_decoded": 32, "decode_s": 3.2, "decode_cpu_s": 0.1},
    )
    found = explain(measured(stats, first_epoch=True))
    assert (found.stage, found.resource) == ("decode", "blocking calls")
    assert (found.samples_per_s, found.waiting) == (pytest.approx(32 / 3), pytest.approx(0.8))
    assert "the step could take 40/s" in found.verdict
    longer = explain(measured(heavy_decode(stall_s=0.1), first_epoch=True))
    assert longer.stage == "step"
    assert "it takes 80 samples/s, loading could deliver 80/s" in longer.verdict


def test_time_to_list_the_order_counts_in_every_epoch() -> None:
    """A sampler that takes 88 of 100 s in ``iter()`` is named; without it, the epoch would be 8.3 times as fast."""
    found = explain(measured(replace(LATE_START, order_s=88.0), first_epoch=True))
    assert (found.stage, found.resource) == ("sampler", "the order")
    assert next(stage for stage in found.stages if stage.name == "sampler").time_s == pytest.approx(88 / 808)
    assert found.advice[0].gain == pytest.approx(100 / 12)
    assert figures_of(0, found, 8.0).possible == 0.0
    some = replace(LATE_START, order_s=10.0, first_batch_s=10.0, first_stall_s=10.0, stall_s=10.1)
    assert "The wait for the first batch took 10% of the epoch." in explain(measured(some)).verdict


def test_waiting_threads_give_a_bound() -> None:
    """More threads and processes whose calls wait gain at most so much: they may wait for each other."""
    for settings in ({}, {"dataset_threads": 1}, {"threads": 8, "cores": 8, "chunk_size": 8}):
        found = explain(measured(heavy_decode(decode_cpu_s=1.0), **settings))
        assert found.advice
        assert all("as for a lock" in advice.at_most for advice in found.advice if advice.gain)
        assert "(at most " in advice(found)


@pytest.mark.parametrize(
    ("alone_s", "measured_alone", "square_s", "resource"),
    [
        (0.0125, 4, 1.0, "a lock"),
        (0.025, 4, 1.0, "blocking calls"),
        (0.0, 0, 1.0, "blocking calls"),
        # The times of jobs vary: one that ran alone may be short by chance.
        (0.0125, 40, 1.5, "a lock"),
        (0.0125, 1, 1.5, "blocking calls"),
    ],
)
def test_calls_that_take_half_as_long_alone_wait_for_a_lock(
    alone_s: float, measured_alone: int, square_s: float, resource: str
) -> None:
    """Two threads that each take twice as long as one alone do no more than one: no more threads are advised."""
    stats = heavy_decode(decode_cpu_s=1.0, jobs=100, jobs_samples=400, jobs_s=10.0, jobs_square_s=square_s)
    found = explain(measured(stats, alone_sample_s=alone_s, measured_alone=measured_alone))
    assert (found.stage, found.resource) == ("decode", resource)
    assert ("decode_threads" in advice(found)) == (resource != "a lock")
    assert ("2 threads do 1.0 times as much as one alone" in advice(found)) == (resource == "a lock")


@pytest.mark.parametrize(
    ("core_wait", "cpu_s", "alone_s", "resource"),
    [
        (0.86, 2.0, 0.003, "other processes"),
        # Of what is left beside the waits for cores, as much is other waiting as work.
        (0.7, 2.0, 0.007, "other processes"),
        (0.3, 1.0, 0.009, "a lock"),
        (0.6, 1.0, 0.005, "a lock"),
    ],
)
def test_a_wait_for_a_core_is_no_wait_for_a_lock(core_wait: float, cpu_s: float, alone_s: float, resource: str) -> None:
    """Beside other processes a job that runs alone is faster, because it shares the cores with one thread less."""
    stats = heavy_decode(decode_cpu_s=cpu_s, jobs=100, jobs_samples=400, jobs_s=10.0, jobs_square_s=1.0)
    found = explain(measured(stats, alone_sample_s=alone_s, measured_alone=4, core_wait=core_wait))
    assert (found.stage, found.resource) == ("decode", resource)


def test_the_time_of_a_job_alone_is_without_its_waits_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the thread waited for a core all the time, no time of the job is left."""
    monkeypatch.setattr(machine, "core_wait_s", lambda _: time.perf_counter())
    decode = partial(plants.decode, seconds=0.002)
    with Feeder(Numbers(240), decode=decode, batch_size=8, limits=Limits(decode_threads=2)) as feeder:
        for _ in feeder:
            pass
        found = measurements(feeder._session)
    assert found.measured_alone >= 1
    assert found.alone_sample_s < 0.002


def test_some_jobs_run_alone_to_find_out_whether_they_wait_for_each_other() -> None:
    """While one runs alone, no other does; the time of its samples is known."""
    running, most = [0], [0]
    lock = threading.Lock()

    def decode(data: bytes) -> torch.Tensor:
        with lock:
            running[0] += 1
        time.sleep(0.002)
        if feeder._session.pipeline.loop_thread.decode_pool.alone:  # type: ignore[union-attr]
            most[0] = max(most[0], running[0])
        with lock:
            running[0] -= 1
        return torch.zeros(1)

    with Feeder(Numbers(240), decode=decode, batch_size=8, limits=Limits(decode_threads=2)) as feeder:
        for _ in feeder:
            pass
        found = measurements(feeder._session)
        assert found.measured_alone >= 1
        assert found.alone_sample_s >= 0.002
    assert most == [1]


async def test_the_wait_for_a_blocked_event_loop_is_counted() -> None:
    async def block() -> None:
        while True:
            await asyncio.sleep(0)
            time.sleep(0.005)  # noqa: ASYNC251 - it is the fault that is planted

    async with Feeder(Numbers(80), decode=plants.decode, batch_size=8) as feeder:
        task = asyncio.create_task(block())
        async for _ in feeder:
            pass
        task.cancel()
        assert measurements(feeder._session).stats.late_s > 0.001


def test_a_gain_beyond_all_measured_costs_gives_no_number() -> None:
    """A cache for a step that takes no time could deliver 1,000 times as much if caching and batching were free."""
    [cache] = explain(measured(replace(STATS, stall_s=10.09), allows=lambda cache="": cache == "disk")).advice[1:]
    assert cache.text.startswith("cache=")
    assert cache.gain is None


@pytest.mark.parametrize(
    ("allows", "wanted"), [(all_allowed, 'in_order="samples"'), (lambda **option: False, "in_order=False")]
)
def test_slow_reads_delay_no_others_in_another_order(allows: Any, wanted: str) -> None:
    """Reads of which one in ten takes ten times as long, while no stage is busy: another order, without a number."""
    uneven = replace(STATS, reading_s=20.0, reading_square_s=2.0, reading_apart_s=2.0)
    found = explain(measured(uneven, allows=allows))
    assert (found.stage, found.resource) == ("read", "uneven samples")
    assert found.advice[0].text.startswith(wanted)
    assert all(advice.at_most for advice in found.advice if advice.gain)
    anyway = explain(measured(uneven, in_order="samples", allows=no_cache))
    assert [advice.gain for advice in anyway.advice] == [None]


def test_few_batches_explain_nothing() -> None:
    """Before the third batch no stage is named, and the verdict says so."""
    for batches in (0, 1, 2):
        found = explain(measured(EpochStats(samples=8 * batches, batches=batches)))
        assert (found.stage, found.advice) == ("", ())
        assert "Too few batches" in found.verdict


# --- the report


def test_the_report_is_text_html_and_a_dict() -> None:
    """All three have the verdict, a row per stage and the advice; HTML is escaped, the dict survives JSON."""
    found = replace(explain(measured()), verdict="<b> & more")
    text, html = str(found), found._repr_html_()
    for name in ("read", "decode", "step"):
        assert f"\n{name} " in text
        assert f"<td>{name}</td>" in html
    assert "- Limits(read_concurrency=64)" in text
    assert "&lt;b&gt; &amp; more" in html
    assert json.loads(json.dumps(found.to_dict()))["stages"][0]["name"] == "read"


def test_times_are_split_into_processor_and_waiting() -> None:
    """A decode job of 25 ms per sample with 24.75 ms of processor time waits for 250 us."""
    found = explain(measured(heavy_decode()))
    row = next(line for line in str(found).splitlines() if line.startswith("decode"))
    assert row.split()[1:5] == ["24.8", "ms", "250", "us"]


# --- the options that are advised


def a_table() -> Table:
    return Table(pytest.importorskip("pyarrow").table({"x": list(range(40))}))


BYTES: dict[str, Any] = {"source": partial(Numbers, 40), "decode": plants.decode}
FEEDERS: list[Any] = [
    BYTES,
    {"source": partial(Items, 40, 0.0)},
    {"source": a_table},
    {"source": partial(Tensors, torch.arange(40))},
    {"source": partial(aiofeed.Stream, list(range(40)))},
    pytest.param(BYTES | {"engine": "process:2"}, marks=pytest.mark.slow),
    BYTES | {"cache": "host"},
    BYTES | {"cache": "device"},
    BYTES | {"decode": lambda data: data},
    BYTES | {"batch_size": None, "batch_sampler": [[0, 1], [2, 3]]},
    BYTES | {"limits": Limits(decode_threads=1)},
    BYTES | {"device": "cpu", "static_batches": True},
]
OPTIONS: list[dict[str, Any]] = [
    {"engine": "process:2"},
    {"in_order": "samples"},
    {"in_order": False},
    {"cache": "host"},
    {"cache": "disk"},
    {"shuffle": "window"},
]


def is_accepted(options: dict[str, Any]) -> bool:
    options = {"batch_size": 4} | options
    if options.get("cache") == "disk":
        options["cache"] = aiofeed.DiskCache("cache")
    try:
        Feeder(options.pop("source")(), **options).close()
    except (TypeError, ValueError, aiofeed.errors.CacheError):
        return False
    return True


@pytest.mark.parametrize("options", FEEDERS)
def test_an_option_is_advised_if_the_feeder_would_accept_it(options: dict[str, Any]) -> None:
    """``allows`` of the measurements says what ``Feeder`` does with the option beside its others."""
    given = {"batch_size": 4} | options
    with Feeder(given.pop("source")(), **given) as feeder:
        next(iter(feeder))
        may = measurements(feeder._session).allows
        for option in OPTIONS:
            assert may(**option) == is_accepted(options | option), option


def test_what_a_feeder_refuses_is_not_advised() -> None:
    """Another order of batches on the ranks of a mesh that get the same ones; a window over a source in one piece."""
    config: Any = SimpleNamespace(facts={"a mesh with other dimensions"}, excluded=())
    assert not allows(config, {}, in_order=False)
    assert allows(config, {}, shuffle="window")
    uneven = heavy_decode(jobs=100, jobs_samples=400, jobs_s=10.0, jobs_square_s=5.0, decode_s=4.0)
    for in_order in (True, "fixed"):
        found = explain(measured(uneven, allows=lambda **_: False, in_order=in_order))
        assert ("in_order=False" in advice(found)) == (in_order is True)
    for allowed in (all_allowed, lambda **_: False):
        found = explain(measured(lookahead_bytes=64 << 20, allows=allowed))
        assert ('shuffle="window"' in advice(found)) == (allowed is all_allowed)
    with Feeder(Numbers(40), decode=plants.decode, batch_size=4) as feeder:
        next(iter(feeder))
        session = feeder._session
        assert measurements(session).in_order is True
        session.answers[repr({"in_order": False})] = False
        assert measurements(session).in_order == "fixed"


@pytest.mark.parametrize("name", COUNTERS)
def test_advised_calls_work(name: str, tmp_path: Path) -> None:
    """Each call that is advised for a plant makes an object."""
    names = {"dataset": [1, 2], "path": tmp_path / "cache"}
    for call in calls_in(advice(explain(recorded(name)))):
        eval(call.code, PUBLIC | names)


@pytest.mark.parametrize("options", [BYTES | {"engine": "process:2"}, {"source": a_table}])
def test_a_cache_that_is_refused_is_not_advised(options: dict[str, Any]) -> None:
    """``cache="host"`` with worker processes, and any cache of a ``Table``."""
    given = {"batch_size": 4} | options
    with Feeder(given.pop("source")(), **given) as feeder:
        counters = replace(measurements(feeder._session), stats=heavy_decode(), sample_bytes=8.0, free_memory=1 << 30)
    assert 'cache="host"' not in advice(explain(counters))
    assert ("cache=" in advice(explain(counters))) == ("engine" in options)


# --- ranks

RANK = RankTimes(0, 400.0, 0.01, 0.02, "step", "the step itself", 400.0)


def test_figures_of_a_rank_are_those_of_its_explanation() -> None:
    """Rates, the wait, and a step of eight samples of 2.5 ms; zeros if too few batches were returned."""
    times = figures_of(3, explain(measured()), 8.0)
    assert (times.rank, times.stage, times.resource) == (3, "read", "storage latency")
    assert (times.samples_per_s, times.waiting) == (pytest.approx(80), pytest.approx(0.8))
    assert times.step_s == pytest.approx(0.02)
    assert figures_of(0, explain(measured(EpochStats())), 8.0) == RankTimes(0, 0.0, 0.0, 0.0, "", "", 0.0)


def test_the_slowest_rank_is_named_with_its_reason() -> None:
    """At one rate, the rank that waits is the slow one; at different rates, the slower one, also by its step."""
    own = explain(measured())
    slow_loading = replace(RANK, rank=1, waiting=0.5, stage="read", resource="storage latency")
    verdict = compare([RANK, slow_loading], own).verdict
    assert "Rank 1 is the slowest of 2: it waits 50% of the time" in verdict
    assert "storage latency" in verdict
    slow_step = replace(RANK, rank=1, samples_per_s=200.0, step_s=0.04)
    assert "Rank 1 is the slowest of 2: its step takes 40.0 ms" in compare([RANK, slow_step], own).verdict
    assert "All 2 ranks are equally fast" in compare([RANK, replace(RANK, rank=1)], own).verdict
    unknown = replace(RANK, rank=1, stage="", resource="")
    assert compare([RANK, unknown], own).verdict == own.verdict


def test_ranks_need_torch_distributed() -> None:
    """Without a process group, and with a number, ``ranks=`` is refused."""
    with Feeder(Items(8, 0.0), batch_size=2) as feeder:
        with pytest.raises(ValueError, match="init_process_group"):
            feeder.explain(ranks=True)
        with pytest.raises(TypeError, match="ranks must be True or False"):
            feeder.explain(ranks=1)  # type: ignore[arg-type]


# --- at any time, and in any kind of feeder


def test_explain_works_before_within_and_after_an_epoch_and_after_close() -> None:
    """It changes nothing, and explains the current or last epoch."""
    with Feeder(Numbers(40), decode=plants.decode, batch_size=4) as feeder:
        assert feeder.explain().stage == ""
        seen = []
        for number, batch in enumerate(feeder):
            seen.append(batch[:, 0].tolist())
            assert (feeder.explain().stage == "") == (number < 2)
        assert sum(seen, []) == list(range(40))
        assert feeder.explain().stage != ""
        state = feeder.state_dict()
    assert feeder.explain().stage != ""
    assert feeder.state_dict() == state


def test_a_break_and_an_error_leave_an_epoch_that_is_explained() -> None:
    """After ``break``, and after an error in the loop body, the batches that were returned are explained."""
    with Feeder(Numbers(40), decode=plants.decode, batch_size=4) as feeder:
        for number, _ in enumerate(feeder):
            if number == 4:
                break
        assert feeder.explain().stage != ""
        with pytest.raises(ZeroDivisionError):
            for number, _ in enumerate(feeder):
                _ = 1 / (number - 4)
        assert feeder.explain().stage != ""


def test_reads_of_a_few_samples_do_not_count_for_all() -> None:
    """If most samples come from a cache, reading those that do not is a tenth of the work."""
    found = explain(measured(replace(heavy_decode(), samples_read=80, reading_s=8.0, samples_cached=720)))
    read = next(stage for stage in found.stages if stage.name == "read")
    assert read.samples_per_s == pytest.approx(8 * 800 / 8.0)


async def test_an_asynchronous_loop_is_explained() -> None:
    with Feeder(Numbers(40), decode=plants.decode, batch_size=4) as feeder:
        async for _ in feeder:
            pass
        assert feeder.explain().stage != ""


@pytest.mark.usefixtures("forked_workers")
def test_worker_processes_send_their_counters() -> None:
    """With ``engine="process"`` all decode jobs and reads are counted; the verdict counts processes."""
    with Feeder(Numbers(40, read_s=0.001), decode=plants.decode, batch_size=4, engine="process:2") as feeder:
        assert len(list(feeder)) == 10
        counters = measurements(feeder._session)
    stats = counters.stats
    assert (stats.samples_decoded, stats.samples_read) == (40, 40)
    assert min(stats.decode_s, stats.reading_s, stats.reading_square_s) > 0
    assert "2 processes" in explain(replace(counters, stats=heavy_decode())).verdict


def test_data_in_memory_are_explained() -> None:
    """``Tensors`` have no threads; the stages are collating in the training thread and the step."""
    with Feeder(Tensors(torch.arange(4000)), batch_size=4) as feeder:
        for _ in feeder:
            pass
        assert feeder.explain().stage in ("collate", "hand-over", "step")


def test_a_warm_cache_is_not_cold() -> None:
    """The first epoch with a cache fills it, the second one does not."""
    with Feeder(Numbers(40), decode=plants.decode, batch_size=4, cache="host") as feeder:
        for cold in (True, False):
            assert len(list(feeder)) == 10
            counters = measurements(feeder._session)
            assert (counters.cold_cache, counters.first_epoch) == (cold, cold)


def test_samples_in_any_order_are_explained() -> None:
    """``in_order="samples"`` is not advised to feeders that have it."""
    uneven = recorded("one slow sample in ten")
    assert "in_order" in advice(explain(uneven))
    found = explain(replace(uneven, in_order="samples"))
    assert found.stage == "decode"
    assert "in_order" not in advice(found)


def test_advice_for_a_dataset_can_be_taken() -> None:
    """The advised number of threads removes the bottleneck of a ``Dataset`` of one thread."""
    for threads in (1, 8):
        with Feeder(FromDataset(Items(40, 0.0), threads=threads), batch_size=8) as feeder:
            counters = replace(measurements(feeder._session), stats=heavy_decode(), cores=16)
        assert (explain(counters).resource == "one thread") == (threads == 1)
