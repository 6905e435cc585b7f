"""Statistics of an epoch: the running totals, and the snapshot for the user."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TypeAlias

from aiofeed.kernel.core.types import public_in
from aiofeed.kernel.core.validation import counted

Event: TypeAlias = tuple[str, str, float, float, int, int, int]
"""What took place, the thread or other lane, begin and end on the clock of ``perf_counter``, the number of the batch,
samples and bytes. What: read, decode, collate, copy, wait or step."""

# 20,000 events take 5 MB. Batches of 32 photographs make some 10 events each.
EVENTS = 20_000


def new_events(keep: bool = True) -> deque[Event]:
    """Return a ring buffer of events; one that drops them if not ``keep``. Appending is thread-safe and takes 50 ns."""
    return deque(maxlen=EVENTS if keep else 0)


@dataclass(eq=False)
class EpochStats:
    """Running totals of one epoch. One thread writes each field: the engine's loop, the copier or the consumer.

    ``events`` receives what takes place, for a timeline.
    """

    samples: int = 0
    batches: int = 0
    bytes_read: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0
    collate_s: float = 0.0
    copy_s: float = 0.0
    stall_s: float = 0.0
    idle_s: float = 0.0
    first_batch_s: float = 0.0
    wall_s: float = 0.0
    failures: int = 0
    batches_left_out: int = 0
    retries: int = 0
    gil_us: float = 0.0
    asked_at: float = 0.0
    # The part of `stall_s` until the first batch, and the part of that in which `iter()` listed the order.
    first_stall_s: float = 0.0
    order_s: float = 0.0
    # For ``explain``. Samples that were read, the sum over them of the seconds that their reads took and of the squares
    # of these, and the first two for those reads only that began while at most half of the permitted reads were in
    # flight.
    samples_read: int = 0
    reading_s: float = 0.0
    reading_square_s: float = 0.0
    samples_read_apart: int = 0
    reading_apart_s: float = 0.0
    # Samples that decode jobs have finished, those of them that came from a cache, and processor time.
    samples_decoded: int = 0
    samples_cached: int = 0
    decode_cpu_s: float = 0.0
    collate_cpu_s: float = 0.0
    # Decode jobs after the first batch was returned, their samples, the sum of their times, and of the squares of
    # these.
    jobs: int = 0
    jobs_samples: int = 0
    jobs_s: float = 0.0
    jobs_square_s: float = 0.0
    # Time that planning waited for `memory_bytes`, and for the items of a stream.
    memory_wait_s: float = 0.0
    plan_s: float = 0.0
    # Time that copies were waited for before the next one was issued, and time of the consumer between the arrival of
    # a batch and its return, for example in `transform`.
    copy_wait_s: float = 0.0
    hand_over_s: float = 0.0
    # Time in which a batch was there and other tasks blocked the consumer's event loop.
    late_s: float = 0.0
    # Processor time of the process when the epoch was asked for, and from then to its end, 0 before that.
    cpu_started_s: float = 0.0
    process_cpu_s: float = 0.0
    # Probes of decode threads that released the GIL for a moment, and the time that they then waited for it.
    gil_probe_s: float = 0.0
    gil_probes: int = 0
    # Of ``DataLoader``: time of its sampler; probes while the dataset ran, and those in which it held the GIL.
    sampler_s: float = 0.0
    dataset_probes: list[float] = field(default_factory=lambda: [0, 0])
    events: deque[Event] = field(default_factory=partial(new_events, False), repr=False)

    def add(self, other: EpochStats) -> None:
        """Add another epoch's totals; ``first_batch_s`` stays that of the first epoch, ``gil_us`` is the last found."""
        first, gil_us = self.first_batch_s or other.first_batch_s, other.gil_us or self.gil_us
        for name, value in other.totals().items():
            setattr(self, name, getattr(self, name) + value)
        self.first_batch_s, self.gil_us = first, gil_us

    def totals(self) -> dict[str, float]:
        """Return the totals by field name, of the fields that ``FeedStatistics`` has."""
        return {entry.name: getattr(self, entry.name) for entry in fields(FeedStatistics) if hasattr(self, entry.name)}


@public_in("aiofeed.reports")
@dataclass(frozen=True)
class StorageStatistics:
    """Requests for objects at URLs, and the use of an ``EncodedCache``, since their source was made.

    Example:
        ```python
        import aiofeed

        cache = aiofeed.EncodedCache("photos.cache", max_bytes=1 << 30)
        photos = aiofeed.ImageFolder("photos")
        feeder = aiofeed.Feeder(photos, decode=aiofeed.DecodeImage(size=224), batch_size=4, cache=cache)
        for images, labels in feeder:
            pass
        print(feeder.statistics().storage.cache_misses)
        ```

    Args:
        requests: Requests that were sent, retries and hedges included.
        bytes_read: Bytes received, those between joined ranges included.
        retries: Requests that were sent again after a fault, or in place of one whose body came too slowly.
        hedges: Further requests because the first took unusually long.
        latency_p50_s: The median time from a request to the end of its answer, of the latest requests.
        latency_p95_s: The 95th percentile.
        latency_p99_s: The 99th percentile.
        cache_hits: Samples that were found in the cache.
        cache_misses: Samples that were read from their source.
        cached_bytes: Size of the file of the cache.
    """

    requests: int = 0
    bytes_read: int = 0
    retries: int = 0
    hedges: int = 0
    latency_p50_s: float = 0.0
    latency_p95_s: float = 0.0
    latency_p99_s: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0
    cached_bytes: int = 0

    @classmethod
    def joined(cls, parts: Sequence[StorageStatistics]) -> StorageStatistics | None:
        """Add up the figures of several sources; a latency is that of the slowest. ``None`` for no source."""
        if not parts:
            return None
        figures = {entry.name: [getattr(part, entry.name) for part in parts] for entry in fields(cls)}
        return cls(**{name: max(each) if name.startswith("latency") else sum(each) for name, each in figures.items()})

    def __str__(self) -> str:
        looked_up = self.cache_hits + self.cache_misses
        cached = f"{self.cache_hits} of {counted(looked_up, 'sample')} cached"
        if looked_up and not self.requests:
            return cached
        return (
            f"{self.requests} requests ({self.retries} retries, {self.hedges} hedges), median "
            f"{self.latency_p50_s * 1000:.0f} ms, 95 % in {self.latency_p95_s * 1000:.0f} ms, 99 % in "
            f"{self.latency_p99_s * 1000:.0f} ms" + (f"; {cached}" if looked_up else "")
        )


@public_in("aiofeed.reports")
@dataclass(frozen=True)
class FeedStatistics:
    """Where the time went, in one epoch or in all epochs of a feeder. Durations are wall-clock seconds.

    Example:
        ```python
        import aiofeed

        photos = aiofeed.ImageFolder("photos")
        feeder = aiofeed.Feeder(photos, decode=aiofeed.DecodeImage(size=224), batch_size=4)
        for images, labels in feeder:
            pass
        figures = feeder.statistics()
        print(f"{figures.samples} samples, waited {figures.stall_s:.3f} of {figures.wall_s:.3f} s")
        ```

    Args:
        samples: Samples handed to the consumer.
        batches: Batches handed to the consumer.
        bytes_read: Encoded bytes read, including those of samples in flight.
        read_s: Time from requesting samples to having their bytes, summed over concurrent reads. It includes waiting
            for a thread and may exceed ``wall_s`` many times. It excludes time in which the event loop was late, by
            its timer of 5 to 50 ms, because other threads held the GIL; shorter waits for the GIL count. For small
            files in the page cache, which decode threads read, it is processor time.
        decode_s: Decoding time, summed over threads; at most ``wall_s * decode_threads``.
        collate_s: Time for assembling batches of decoded samples, summed over threads.
        copy_s: Time for queuing copies to the device; the copies run asynchronously.
        stall_s: Time that the consumer waited for a batch: in ``iter()``, which lists the order, and in ``next``. Near
            0: the feed keeps up. Near ``wall_s``: the feed is the bottleneck. Excludes time in which too many earlier
            batches were queued on the device, even if the next batch was not finished: then the device is the
            bottleneck. In ``async for`` it ends when the batch is ready, even if other tasks block the event loop.
        idle_s: Time that the engine waited for the consumer, or for its device, because ``prefetch_batches`` batches
            were ready. It may overlap with the time that ``stall_s`` excludes.
        first_batch_s: Time from ``iter()`` to the first batch.
        wall_s: Time from ``iter()`` to the last batch, or to now.
        failures: Samples that failed.
        batches_left_out: Batches that were left out because all their samples were skipped.
        retries: Further attempts to read.
        queue_depth: Finished batches that wait now.
        read_concurrency: Samples that may be read at the same time, as chosen last.
        decode_threads: Threads that may decode, as chosen last.
        chunk_size: Samples per executor job, as chosen last.
        gil_us: If decoding was GIL-bound in the epoch, the microseconds per sample that hold or wait for the GIL: one
            process decodes at most 1e6 / ``gil_us`` samples/s. Otherwise 0.
        by_source: With a ``Mixture`` the samples of each source that all ranks have drawn since the first epoch, up to
            the position of ``state_dict()``, with those that ``drop_last=True`` left out of ended epochs; with
            ``lengths="decoded"`` those that are decoded. Otherwise empty.
        storage: The requests for objects at URLs, and the use of an ``EncodedCache``, since the source was made.
            ``None`` for other sources, and with ``engine="process"``, whose processes make the requests.
        tokens_by_source: With a ``Mixture`` and a plan with lengths the tokens of these samples. Otherwise empty.
    """

    samples: int = 0
    batches: int = 0
    bytes_read: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0
    collate_s: float = 0.0
    copy_s: float = 0.0
    stall_s: float = 0.0
    idle_s: float = 0.0
    first_batch_s: float = 0.0
    wall_s: float = 0.0
    failures: int = 0
    batches_left_out: int = 0
    retries: int = 0
    gil_us: float = 0.0
    queue_depth: int = 0
    read_concurrency: int = 0
    decode_threads: int = 0
    chunk_size: int = 0
    by_source: Mapping[str, int] = field(default_factory=dict)
    storage: StorageStatistics | None = None
    tokens_by_source: Mapping[str, int] = field(default_factory=dict)

    def scalars(self, prefix: str = "aiofeed/") -> dict[str, float]:
        """Return a flat dict of numbers with stable names, e.g. for ``wandb.log`` or TensorBoard.

        ``samples_per_s``, ``bytes_per_s``, ``waiting_share`` (``stall_s / wall_s``), ``idle_share``, and all numbers of
        these statistics by their names. Those of ``storage`` have ``storage_`` before them, those of ``by_source`` and
        ``tokens_by_source`` these names and a slash.
        """
        wall = self.wall_s or float("inf")
        found: dict[str, float] = {
            "samples_per_s": self.samples / wall,
            "bytes_per_s": self.bytes_read / wall,
            "waiting_share": self.stall_s / wall,
            "idle_share": self.idle_s / wall,
        }
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        if self.storage is not None:
            values |= {f"storage_{entry.name}": getattr(self.storage, entry.name) for entry in fields(self.storage)}
        values |= {f"by_source/{name}": samples for name, samples in self.by_source.items()}
        values |= {f"tokens_by_source/{name}": tokens for name, tokens in self.tokens_by_source.items()}
        found |= {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        return {prefix + name: value for name, value in found.items()}

    def __str__(self) -> str:
        wall = self.wall_s or float("inf")
        rate = self.samples / wall
        mib = self.bytes_read / (1 << 20)
        text = (
            f"{counted(self.samples, 'sample')} in {counted(self.batches, 'batch')}, {self.wall_s:.2f} s ({rate:.0f} "
            f"samples/s, {mib / wall:.1f} MiB/s read); consumer waited {self.stall_s / wall:.0%}, engine waited "
            f"{self.idle_s / wall:.0%}; read {self.read_s:.2f} s, decode {self.decode_s:.2f} s on "
            f"{counted(self.decode_threads, 'thread')}, collate {self.collate_s:.2f} s, copy {self.copy_s:.2f} s; "
            f"first batch {self.first_batch_s * 1000:.0f} ms"
        )
        if self.failures or self.retries:
            left_out = f", {counted(self.batches_left_out, 'batch')} left out" if self.batches_left_out else ""
            text += f"; {self.failures} failed, {self.retries} retried{left_out}"
        if self.gil_us:
            text += f"; GIL-bound: {self.gil_us:.0f} us per sample, at most {1e6 / self.gil_us:,.0f} samples/s"
        if self.by_source:
            text += f"; drawn: {', '.join(f'{name} {samples}' for name, samples in self.by_source.items())}"
        if self.storage is not None:
            text += f"; {self.storage}"
        return text
