"""What was done and how long it took: counters that the parts keep, and the snapshot that the user gets."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from aiofeed.core.types import public


@dataclass(eq=False)
class EpochStats:
    """Running totals of one epoch. Each field has one writer: the engine's loop, the copier or the consumer."""

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
    retries: int = 0
    asked_at: float = field(default=0.0, metadata={"internal": True})

    def add(self, other: EpochStats) -> None:
        """Add another epoch's totals; the time to the first batch stays that of the first epoch."""
        first = self.first_batch_s or other.first_batch_s
        for name, value in other.totals().items():
            setattr(self, name, getattr(self, name) + value)
        self.first_batch_s = first

    def totals(self) -> dict[str, float]:
        """What there is to report, by name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if not entry.metadata.get("internal")}


@public
@dataclass(frozen=True)
class FeedStatistics:
    """Where the time went, for one epoch or for a feeder's life. Seconds are wall-clock seconds.

    Args:
        samples: samples handed to the consumer.
        batches: batches handed to the consumer.
        bytes_read: encoded bytes that were read, of samples still in flight too.
        read_s: from asking for samples to having their bytes, summed over the reads under way; since they overlap, and
            some of it is waiting for a thread, it may exceed ``wall_s`` many times.
        decode_s: decoding, summed over threads; ``wall_s`` times ``decode_threads`` is the most there can be.
        collate_s: putting finished samples together, summed over threads.
        copy_s: issuing copies to the device; the copies themselves run by themselves.
        stall_s: the consumer waited for a batch. Near 0: the feed keeps up. Near ``wall_s``: it is the bottleneck.
            Time in which its device was too many batches behind for another one is left out, also where the next was
            not finished yet: the device had work, and is what was waited for.
        idle_s: every batch that may wait was ready and the engine waited for the consumer, or for its device. Of what
            ``stall_s`` leaves out that may be all, or, where batches were still being finished meanwhile, a part.
        first_batch_s: from ``iter()`` to the first batch in the consumer's hands.
        wall_s: from ``iter()`` to the last batch, or to now.
        failures: samples that failed.
        retries: reads that were tried again.
        queue_depth: finished batches that wait at this moment.
        read_concurrency: samples that may be read at the same time, as chosen last.
        decode_threads: threads that may decode, as chosen last.
        chunk_size: samples per executor job, as chosen last.
        gil_us: microseconds of a sample under the GIL, or lost in passing it on, where that is what keeps threads from
            decoding more: 1e6 / ``gil_us`` samples/s is all that one process can do. 0 where it is not.
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
    retries: int = 0
    queue_depth: int = 0
    read_concurrency: int = 0
    decode_threads: int = 0
    chunk_size: int = 0
    gil_us: float = 0.0

    def __str__(self) -> str:
        wall = self.wall_s or float("inf")
        rate = self.samples / wall
        mib = self.bytes_read / (1 << 20)
        text = (
            f"{self.samples} samples in {self.batches} batches, {self.wall_s:.2f} s ({rate:.0f} samples/s, "
            f"{mib / wall:.1f} MiB/s read); consumer waited {self.stall_s / wall:.0%}, engine waited "
            f"{self.idle_s / wall:.0%}; read {self.read_s:.2f} s, decode {self.decode_s:.2f} s on "
            f"{self.decode_threads} threads, collate {self.collate_s:.2f} s, copy {self.copy_s:.2f} s; "
            f"first batch {self.first_batch_s * 1000:.0f} ms"
        )
        if self.failures or self.retries:
            text += f"; {self.failures} failed, {self.retries} retried"
        return text
