"""The resource limits of a feeder, and their default values. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, fields

from aiofeed.kernel.core.types import public
from aiofeed.kernel.core.validation import check_positive_int, explain_arguments

MIB = 1 << 20

# Two finished batches hide the jitter of steps and reads; each further one costs the memory of a batch. torch's
# DataLoader has two per worker.
PREFETCH_BATCHES = 2
# Jobs per decode thread that run or are ready to: the next one begins at once when one ends, also if they are uneven.
JOBS_READY = 2
# One batch is copied while the step before it runs; the second serves a consumer that queues work ahead of its device.
DEVICE_BATCHES = 2
# A quarter of the free memory leaves room for the training itself; 4 GiB of read-ahead hides any latency.
MEMORY_SHARE = 4
MEMORY_CEILING = 4096 * MIB
# With shards of 64 MiB and 100 KB per sample, requests for a window of this size join several samples each.
LOOKAHEAD_BYTES = 256 * MIB
# 64 concurrent reads from storage with a latency of 20 ms are 3,000 reads/s.
READ_CONCURRENCY = 64


_WAYS = {
    "num_workers": 'pass decode_threads=, or engine="process:N" to Feeder',
    "prefetch_factor": "pass prefetch_batches=",
    "batch_size": "pass it to Feeder",
    **dict.fromkeys(("threads", "num_threads", "workers"), "pass decode_threads="),
    "timeout": "pass on_error=FailurePolicy(read_timeout_s=...) to Feeder",
}


@public
@explain_arguments(_WAYS)
@dataclass(frozen=True, kw_only=True)
class Limits:
    """The maximum resources of a feeder. A limit of ``None``, the default, is chosen at run time.

    Example:
        ```python
        import aiofeed

        photos = aiofeed.ImageFolder("photos")
        limits = aiofeed.Limits(decode_threads=2, memory_bytes=1 << 30)
        decode = aiofeed.DecodeImage(size=224)
        feeder = aiofeed.Feeder(photos, decode=decode, batch_size=32, limits=limits)
        ```

    If a launcher has started several ranks on this machine, as ``LOCAL_WORLD_SIZE`` or a similar variable says, each
    default is that of one rank: the cores, the free memory and the 64 reads are divided by their number. A rank that
    the launcher has pinned to cores, or put into a cgroup of its own, has all of these, but no more than its part of
    what the launcher has. Limits that you pass are not divided.

    Args:
        read_concurrency: Samples being read at the same time. More hide slower storage and hold more encoded bytes.
            Default: one batch, at least 64, or 64 MiB of large samples; up to 512 if reads take 10 ms or more, decoding
            waits for them and more of them help. The processes of ``engine="process:N"`` share this limit and
            ``decode_threads``; both must be N or more.
        decode_threads: Threads that decode. Default: the cores available to this process, by affinity and cgroup, and
            fewer if more threads do not decode faster.
        prefetch_batches: Batches that are being decoded, or are finished and wait for the consumer; with
            ``engine="process:N"`` N - 1 more. Fewer than the threads need are cut into smaller jobs, which costs more.
            Default: as many as give each decode thread two jobs of 50 ms or more, within ``memory_bytes``; at least 2,
            with processes 3, so that the workers need not learn at once that a batch was taken.
        memory_bytes: Encoded plus decoded bytes in flight, including finished batches that wait. One batch may always
            proceed. Default: a quarter of the free memory, at most 4 GiB.
        lookahead_bytes: Encoded bytes of samples in shards at URLs that are read before their batches begin, so that
            one request reads several ranges of a shard, also if the order is shuffled. Of Parquet files, also on disk:
            bytes of rows, and two row groups more, so that a row group is decoded once for several batches. They come
            on top of ``memory_bytes``. Default: a quarter of ``memory_bytes``, at most 256 MiB.
        device_batches: Batches copied, or being copied, to the device before the consumer asks for them. Default: 2. Up
            to 4 more batches may be held by work still queued on the device.

    At most ``prefetch_batches + ceil(read_concurrency / batch_size) + 1`` batches are finished or being assembled.

    Raises:
        TypeError: A limit is not an int.
        ValueError: A limit is below 1.
    """

    read_concurrency: int | None = None
    decode_threads: int | None = None
    prefetch_batches: int | None = None
    memory_bytes: int | None = None
    lookahead_bytes: int | None = None
    device_batches: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                object.__setattr__(self, field.name, check_positive_int(f"Limits({field.name}=...)", value))


@dataclass(frozen=True, kw_only=True)
class ResolvedLimits:
    """The limits of a feeder, with every default chosen.

    Attributes:
        prefetch_given: Whether the user gave ``prefetch_batches``; otherwise it is the least.
    """

    read_concurrency: int
    decode_threads: int
    prefetch_batches: int
    memory_bytes: int
    device_batches: int
    lookahead_bytes: int = 0
    prefetch_given: bool = False

    @property
    def most_batches(self) -> int:
        """The most batches that can be decoded at the same time or wait: a job has samples of one batch."""
        return max(self.prefetch_batches, 0 if self.prefetch_given else JOBS_READY * self.decode_threads)


def resolve_limits(
    user: Limits, *, batch_size: int, cpus: int, free_memory: int, most_threads: int = 0, procs: int = 0, ranks: int = 1
) -> ResolvedLimits:
    """Choose the limits that the user did not specify.

    Args:
        user: The limits that the user specified.
        batch_size: Samples per batch.
        cpus: Cores available to this rank.
        free_memory: Bytes available to it without swapping.
        most_threads: Decode threads that the source allows; 1 for a Dataset that is not thread-safe; 0 for any.
        procs: The number of worker processes; 0 for threads.
        ranks: The ranks on this machine, which share ``READ_CONCURRENCY``.
    """
    threads = user.decode_threads or most_threads or cpus
    memory_bytes = user.memory_bytes or max(min(free_memory // MEMORY_SHARE, MEMORY_CEILING), MIB)
    return ResolvedLimits(
        read_concurrency=user.read_concurrency or max(batch_size, READ_CONCURRENCY // ranks),
        decode_threads=min(threads, most_threads or threads),
        prefetch_batches=user.prefetch_batches or PREFETCH_BATCHES + bool(procs),
        prefetch_given=user.prefetch_batches is not None,
        memory_bytes=memory_bytes,
        device_batches=user.device_batches or DEVICE_BATCHES,
        lookahead_bytes=user.lookahead_bytes or min(memory_bytes // 4, LOOKAHEAD_BYTES),
    )
