"""Explains where the time of a feeder's epoch went, from the counters and settings of its session.

Also compares the explanations of all ranks: which one is the slowest, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from aiofeed import _load_addon
from aiofeed.kernel.engine.admission import bytes_per_sample
from aiofeed.kernel.engine.tuning.reads import READS_MOST
from aiofeed.kernel.feeder.arguments import FeederConfig, check_engine, check_for_workers, limits_for
from aiofeed.kernel.feeder.rules import EXCLUDED, cache_of, conflict
from aiofeed.kernel.runtime.event_loop import MOST_READ_THREADS
from aiofeed.reports.bottleneck import KEEPS_UP, STEP, FeedMeasurements
from aiofeed.reports.explanation import Explanation, RankTimes, format_seconds
from aiofeed.reports.remedies import explain

# Ranks with rates as close as this wait for each other in every step. The first batch does not count, and the others
# wait for it in a step.
SAME_RATE = 0.8
# Their steps take equally long if they are as close as this.
SAME_STEP = 0.95


def explain_feeder(session: Any, *, ranks: bool) -> Explanation:
    """Explain the current or last epoch of a feeder's session; with ``ranks`` compare all ranks."""
    measured = measurements(session)
    explanation, inner = explain(measured), session.config.source.feeder
    if inner is not None and explanation.resource == "the iterable":
        explanation = inner.explain()
    if session.inline is not None and session.inline.reason:
        explanation = replace(explanation, verdict=f"{explanation.verdict} {session.inline.reason}")
    if not ranks:
        return explanation
    return explain_ranks(explanation, measured.stats.samples / max(measured.stats.batches, 1))


def measurements(session: Any) -> FeedMeasurements:
    """Return the counters of the current or last epoch of a session, and its settings."""
    config, pipeline = session.config, session.pipeline
    may = partial(allows, config, session.answers)
    limits, user_limits, source = config.limits, config.user_limits, config.source
    streaming = pipeline if pipeline is not None and pipeline.streams else None
    tuner = None if streaming is None else streaming.tuner
    core_wait = 0.0
    if streaming is not None and not config.engines and (busy_s := streaming.loop_thread.decode_pool.busy_s):
        core_wait = streaming.loop_thread.decode_pool.core_wait_s() / busy_s
    return FeedMeasurements.of_run(
        session.stats,
        config.decode,
        threads=limits.decode_threads if tuner is None else tuner.max_running,
        reads=limits.read_concurrency if tuner is None else tuner.reading.concurrency,
        prefetch_batches=limits.prefetch_batches if streaming is None else streaming.prefetch_batches,
        prefetch_given=limits.prefetch_given,
        chunk_size=0 if pipeline is None else pipeline.chunk_size,
        memory_bytes=limits.memory_bytes,
        sample_bytes=bytes_per_sample(config.decode) if streaming is None else streaming.bytes_per_sample,
        length=config.length,
        reads_given=user_limits.read_concurrency is not None,
        reads_saturated=tuner is not None and tuner.reading.saturated,
        # Files on a file system need a thread for each read.
        reads_most=MOST_READ_THREADS if source.read_now else READS_MOST,
        dataset_threads=source.threads or None,
        processes=config.engines,
        in_order=config.in_order if config.in_order is not True or may(in_order=False) else "fixed",
        core_wait=core_wait,
        measured_alone=0 if streaming is None else streaming.loop_thread.decode_pool.measured_alone,
        alone_sample_s=0.0 if streaming is None else streaming.loop_thread.decode_pool.alone_sample_s,
        resident=pipeline is not None and streaming is None,
        threads_tuned=tuner is not None and not tuner.decoding.given,
        threads_saturated=tuner is not None and tuner.decoding.saturated,
        allows=may,
        cached=config.cache is not None,
        first_epoch=session.first_epoch,
        collate_fn=config.collate_fn is not None,
        transform=config.transform is not None and config.backend is None,
        device=config.backend is not None,
        lookahead_bytes=limits.lookahead_bytes if source.looks_ahead and not config.engines else 0,
    )


# What holds for the caches and engines that ``explain`` advises, see ``rules.py``.
_ADVISED: dict[object, tuple[str, ...]] = {
    "host": ("cache=", "cache= on the host"),
    "disk": ("cache=", "cache= on the host"),
    "samples": ('in_order="samples"', "in_order= other than True"),
    False: ("in_order= other than True",),
    "window": ("shuffle=", 'shuffle="window"', 'shuffle="replacement" or "window"', "an order by shuffle="),
}


def allows(config: FeederConfig, answers: dict[str, bool], **options: Any) -> bool:
    """Return whether ``Feeder`` would accept another option beside those of a configuration.

    Args:
        answers: Earlier ones: a progress bar asks again and again, and whether processes are possible is found by
            pickling.
        options: ``in_order``, ``engine``, ``shuffle="window"``, or ``cache``, which is "host" or, for a ``DiskCache``,
            "disk".
    """
    key = repr(options)
    if key not in answers:
        answers[key] = _is_accepted(config, options)
    return answers[key]


def _is_accepted(config: FeederConfig, options: dict[str, Any]) -> bool:
    facts, rows = set(config.facts), [*config.excluded, *EXCLUDED]
    try:
        if "engine" in options:
            engines, ray = check_engine(options["engine"])
            facts.add('engine="process"')
            limits_for(config.user_limits, config.batch_size, config.source, engines, ray)
            check_for_workers(config, "process")
        else:
            [value] = options.values()
            facts.update(_ADVISED.get(value, ()))
        if "cache" in options:
            cache: Any = _load_addon("DiskCache", "cache=")("") if options["cache"] == "disk" else cache_of("host")
            facts.update(cache.facts(config))
            rows += cache.excluded
            cache.check_decoder(config.decode)
    except (TypeError, ValueError, ImportError):  # what the checks raise
        return False
    return conflict(facts, rows) is None


# --- ranks


def explain_ranks(own: Explanation, batch_samples: float) -> Explanation:
    """Add the figures of all ranks to ``own``. All ranks must call it, because it is an all-gather.

    Args:
        own: The explanation of this rank.
        batch_samples: Samples per batch of this rank.

    Raises:
        ValueError: ``torch.distributed`` is not initialized.
    """
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        raise ValueError(
            "explain(ranks=True) compares the ranks of torch.distributed, which is not initialized: call "
            "torch.distributed.init_process_group first, or leave ranks out"
        )
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, figures_of(distributed.get_rank(), own, batch_samples))
    return compare(gathered, own)


def figures_of(rank: int, own: Explanation, batch_samples: float) -> RankTimes:
    """Return the figures of a rank."""
    times = {stage.name: stage for stage in own.stages}
    return RankTimes(
        rank,
        own.samples_per_s,
        own.waiting,
        times[STEP].time_s * batch_samples if STEP in times else 0.0,
        own.stage,
        own.resource,
        (times[own.stage].samples_per_s or 0.0) if own.stage in times else 0.0,
    )


def compare(ranks: Sequence[RankTimes], own: Explanation) -> Explanation:
    """Add the figures of all ranks to ``own``; its verdict names the slowest one and its reason."""
    measured = [rank for rank in ranks if rank.stage]
    if len(measured) < len(ranks) or len(ranks) < 2:
        return replace(own, ranks=tuple(ranks))
    slowest = min(ranks, key=lambda rank: rank.samples_per_s)
    if slowest.samples_per_s >= SAME_RATE * max(rank.samples_per_s for rank in ranks):
        # One that waits for batches keeps the others waiting, within their steps.
        slowest = max(ranks, key=lambda rank: rank.waiting)
        steps = [rank.step_s for rank in ranks]
        if slowest.waiting < KEEPS_UP:
            if min(steps) >= SAME_STEP * max(steps):
                verdict = f"{own.verdict} All {len(ranks)} ranks are equally fast."
                return replace(own, verdict=verdict, ranks=tuple(ranks))
            slowest = max(ranks, key=lambda rank: rank.step_s)
    others = [rank for rank in ranks if rank is not slowest]
    if slowest.waiting < KEEPS_UP:
        step_s = sum(rank.step_s for rank in others) / len(others)
        reason = f"its step takes {format_seconds(slowest.step_s)}, that of the others {format_seconds(step_s)}"
    else:
        waiting = sum(rank.waiting for rank in others) / len(others)
        reason = (
            f"it waits {slowest.waiting:.0%} of the time, and its limit is the stage {slowest.stage!r} "
            f"({slowest.resource}); the others wait {waiting:.0%}"
        )
    verdict = f"{own.verdict} Rank {slowest.rank} is the slowest of {len(ranks)}: {reason}."
    return replace(own, verdict=verdict, ranks=tuple(ranks))
