"""Explains where the time of a feeder's epoch went, from the counters and settings of its session."""

from __future__ import annotations

from functools import partial
from typing import Any

from aiofeed import _load_addon
from aiofeed.kernel.core.types import Members, traits_of
from aiofeed.kernel.engine.admission import bytes_per_sample
from aiofeed.kernel.engine.tuning.reads import READS_MOST
from aiofeed.kernel.feeder.arguments import FeederConfig, check_engine, check_for_workers, limits_for
from aiofeed.kernel.feeder.rules import Fact, cache_of, conflict
from aiofeed.kernel.runtime.event_loop import MOST_READ_THREADS
from aiofeed.reports.bottleneck import FeedMeasurements
from aiofeed.reports.explanation import Explanation
from aiofeed.reports.ranks import explain_ranks
from aiofeed.reports.remedies import explain


def explain_feeder(session: Any, *, ranks: bool) -> Explanation:
    """Explain the current or last epoch of a feeder's session; with ``ranks`` compare all ranks."""
    measured = measurements(session)
    explanation = explain(measured)
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
        reads_most=MOST_READ_THREADS if Members.of(source).read_now else READS_MOST,
        dataset_threads=source.threads if traits_of(source).items else None,
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
        lookahead_bytes=limits.lookahead_bytes if getattr(source, "looks_ahead", False) and not config.engines else 0,
    )


# What holds for the caches and engines that ``explain`` advises, see ``rules.py``.
_ADVISED: dict[object, tuple[Fact, ...]] = {
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
    facts = set(config.facts)
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
            facts.update(cache.facts(config.decode))
            cache.check_decoder(config.decode)
    except (TypeError, ValueError, ImportError):  # what the checks raise
        return False
    return conflict(facts) is None
