"""The statistics of feeders as metrics of Prometheus and OpenTelemetry, with the same names in both.

Example:
    ```python
    from prometheus_client import CollectorRegistry, generate_latest

    import aiofeed

    feeder = aiofeed.Feeder(list(range(100)), batch_size=10)
    registry = CollectorRegistry()
    registry.register(aiofeed.exporters.PrometheusCollector(feeder))
    print(generate_latest(registry).decode())
    ```

The packages are imported when an exporter is made. Names and units follow Prometheus: base units, in plural.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from aiofeed.kernel.core.statistics import FeedStatistics
from aiofeed.kernel.core.types import public_in

__all__ = ["OpenTelemetryMetrics", "PrometheusCollector"]


class MeasuredFeed(Protocol):
    """A ``Feeder``, or the result of ``attach``."""

    def statistics(self, total: bool = False) -> FeedStatistics:
        """Return the statistics of the current or last epoch, or with ``total=True`` of all epochs."""


@dataclass(frozen=True)
class Metric:
    """A metric and the field of ``FeedStatistics`` that it is read from.

    Args:
        name: The name, without "aiofeed" before it and "total" after it.
        field: The field; "storage." before it: one of ``StorageStatistics``.
        help: What it measures.
        unit: The unit as in UCUM.
        counts: Whether it is a counter over all epochs. Otherwise it is the current value.
        scale: Factor from the field to the unit.
    """

    name: str
    field: str
    help: str
    unit: str = "1"
    counts: bool = True
    scale: float = 1.0

    def read(self, statistics: FeedStatistics) -> float | None:
        """Return the value; ``None`` without storage statistics."""
        holder, _, name = self.field.rpartition(".")
        found: Any = getattr(statistics, holder) if holder else statistics
        return None if found is None else float(getattr(found, name)) * self.scale


METRICS = (
    Metric("samples", "samples", "Samples handed to the consumer.", "{sample}"),
    Metric("batches", "batches", "Batches handed to the consumer.", "{batch}"),
    Metric("batches_left_out", "batches_left_out", "Batches of which all samples failed.", "{batch}"),
    Metric("read_bytes", "bytes_read", "Encoded bytes read.", "By"),
    Metric("read_seconds", "read_s", "Time of reads, summed over concurrent reads.", "s"),
    Metric("decode_seconds", "decode_s", "Time of decoding, summed over threads.", "s"),
    Metric("collate_seconds", "collate_s", "Time of assembling batches, summed over threads.", "s"),
    Metric("copy_seconds", "copy_s", "Time of queuing copies to the device.", "s"),
    Metric("stall_seconds", "stall_s", "Time that the consumer waited for batches.", "s"),
    Metric("idle_seconds", "idle_s", "Time that the feed waited for the consumer.", "s"),
    Metric("wall_seconds", "wall_s", "Time of the epochs.", "s"),
    Metric("failures", "failures", "Samples that failed.", "{sample}"),
    Metric("retries", "retries", "Further attempts to read.", "{attempt}"),
    Metric("queue_depth", "queue_depth", "Finished batches that wait.", "{batch}", counts=False),
    Metric("read_concurrency", "read_concurrency", "Samples that may be read at a time.", "{sample}", counts=False),
    Metric("decode_threads", "decode_threads", "Threads that may decode.", "{thread}", counts=False),
    Metric("chunk_size", "chunk_size", "Samples per decode job.", "{sample}", counts=False),
    Metric("gil_seconds", "gil_us", "GIL time per sample if it is the limit, else 0.", "s", counts=False, scale=1e-6),
    Metric("storage_requests", "storage.requests", "Requests for objects.", "{request}"),
    Metric("storage_read_bytes", "storage.bytes_read", "Bytes received from object storage.", "By"),
    Metric("storage_retries", "storage.retries", "Requests that were sent again.", "{request}"),
    Metric("storage_hedges", "storage.hedges", "Second requests for late ones.", "{request}"),
    Metric("storage_latency_p50_seconds", "storage.latency_p50_s", "Median latency.", "s", counts=False),
    Metric("storage_latency_p95_seconds", "storage.latency_p95_s", "95th percentile of latency.", "s", counts=False),
    Metric("storage_latency_p99_seconds", "storage.latency_p99_s", "99th percentile of latency.", "s", counts=False),
    Metric("storage_cache_hits", "storage.cache_hits", "Samples found in an EncodedCache.", "{sample}"),
    Metric("storage_cache_misses", "storage.cache_misses", "Samples that no EncodedCache had.", "{sample}"),
    Metric("storage_cached_bytes", "storage.cached_bytes", "Bytes in the EncodedCache.", "By", counts=False),
)


class _Feeds:
    """Feeders by name. Does not keep them alive, because a registry of metrics lives as long as the process."""

    def __init__(self, feeders: MeasuredFeed | Mapping[str, MeasuredFeed], name: str) -> None:
        named = feeders if isinstance(feeders, Mapping) else {name: feeders}
        for key, feeder in named.items():
            if not isinstance(key, str) or not callable(getattr(feeder, "statistics", None)):
                raise TypeError(f"expected a Feeder, or a dict of names and Feeders, got {feeders!r}")
        self._feeders = {key: weakref.ref(feeder) for key, feeder in named.items()}
        self._latest: dict[tuple[str, str], float] = {}

    def read(self, metrics: Iterable[Metric]) -> Iterator[tuple[Metric, str, float]]:
        """Return the values of metrics, with the names of their feeders. Callable from any thread."""
        for name, reference in self._feeders.items():
            if (feeder := reference()) is None:
                continue
            statistics = feeder.statistics(total=True)
            for metric in metrics:
                value = metric.read(statistics)
                if value is None:
                    continue
                if metric.counts:
                    # An epoch that begins in another thread is not in the totals for a moment. A counter that falls
                    # would count as a restart of the program.
                    key = name, metric.name
                    value = self._latest[key] = max(value, self._latest.get(key, 0.0))
                yield metric, name, value


@public_in("aiofeed.exporters")
class PrometheusCollector:
    """A collector for ``prometheus_client``: ``REGISTRY.register(aiofeed.exporters.PrometheusCollector(feeder))``.

    Example:
        ```python
        from prometheus_client import REGISTRY

        import aiofeed

        feeder = aiofeed.Feeder(list(range(100)), batch_size=10)
        REGISTRY.register(aiofeed.exporters.PrometheusCollector(feeder))
        ```

    Metrics are named ``aiofeed_samples_total``, ``aiofeed_stall_seconds_total``, ``aiofeed_queue_depth`` and so on,
    with the label ``feeder``. The collector does not keep feeders alive.

    Args:
        feeders: A ``Feeder`` or the result of ``attach``; or several in a dict by name.
        name: The name of a single feeder.

    Raises:
        ImportError: prometheus-client is not installed.
        TypeError: Something else was passed.
    """

    def __init__(self, feeders: MeasuredFeed | Mapping[str, MeasuredFeed], name: str = "train") -> None:
        self._feeds = _Feeds(feeders, name)
        try:
            import prometheus_client.core as prometheus
        except ImportError as error:
            raise ImportError(
                "PrometheusCollector needs prometheus-client: pip install 'aiofeed[prometheus]'"
            ) from error
        self._prometheus: Any = prometheus

    def collect(self) -> Iterable[Any]:
        """Return the metrics, for ``prometheus_client``."""
        families: dict[str, Any] = {}
        for metric in METRICS:
            kind = "CounterMetricFamily" if metric.counts else "GaugeMetricFamily"
            family = getattr(self._prometheus, kind)(f"aiofeed_{metric.name}", metric.help, labels=["feeder"])
            families[metric.name] = family
        for metric, name, value in self._feeds.read(METRICS):
            families[metric.name].add_metric([name], value)
        return families.values()


@public_in("aiofeed.exporters")
class OpenTelemetryMetrics:
    """Observable metrics of OpenTelemetry: ``OpenTelemetryMetrics(feeder)`` after the provider is set.

    Example:
        ```python
        import aiofeed

        feeder = aiofeed.Feeder(list(range(100)), batch_size=10)
        metrics = aiofeed.exporters.OpenTelemetryMetrics(feeder)
        ```

    Metrics are named ``aiofeed.samples``, ``aiofeed.stall_seconds``, ``aiofeed.queue_depth`` and so on, with the
    attribute ``feeder``. They are read when the provider collects, and do not keep feeders alive.

    Args:
        feeders: A ``Feeder`` or the result of ``attach``; or several in a dict by name.
        name: The name of a single feeder.
        meter: The meter. Default: ``opentelemetry.metrics.get_meter("aiofeed")``.

    Raises:
        ImportError: opentelemetry-api is not installed.
        TypeError: Something else was passed.
    """

    def __init__(
        self, feeders: MeasuredFeed | Mapping[str, MeasuredFeed], name: str = "train", *, meter: Any = None
    ) -> None:
        self._feeds = _Feeds(feeders, name)
        try:
            from opentelemetry.metrics import Observation, get_meter
        except ImportError as error:
            raise ImportError("OpenTelemetryMetrics needs opentelemetry-api: pip install 'aiofeed[otel]'") from error
        self._observation: Any = Observation
        meter = get_meter("aiofeed") if meter is None else meter
        for metric in METRICS:
            create = meter.create_observable_counter if metric.counts else meter.create_observable_gauge
            create(f"aiofeed.{metric.name}", [partial(self._observe, metric)], metric.unit, metric.help)

    def _observe(self, metric: Metric, _: Any) -> list[Any]:
        return [self._observation(value, {"feeder": name}) for _, name, value in self._feeds.read([metric])]
