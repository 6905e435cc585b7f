"""Limits: what a feeder may use, and what it uses where nothing was said. Pure arithmetic."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, fields

from aiofeed.core.types import public

MIB = 1 << 20

# A finished batch or two is what hides the jitter of steps and reads; each one more is a batch of memory. torch's
# DataLoader keeps two per worker.
PREFETCH_BATCHES = 2
# One batch is copied while the step before it runs; the second covers a consumer that launches ahead of its device.
DEVICE_BATCHES = 2
# A quarter of what is free leaves room for the training itself; 4 GiB ahead of any consumer hides everything.
MEMORY_SHARE = 4
MEMORY_CEILING = 4096 * MIB
# Storage that answers in 20 ms gives 3,000 reads a second with 64 in flight.
READ_CONCURRENCY = 64


@public
@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a feeder may use at most. ``None``, the default of each, is chosen at run time.

    Args:
        read_concurrency: samples being read at the same time. More hides slower storage and costs encoded bytes;
            chosen: one batch, at least 64, or 64 MiB where samples are large; and up to 512 where reads take 10 ms or
            more, decoding waits for them, and more of them help. Processes of ``engine="process:N"`` share it, and
            ``decode_threads``: N or more.
        decode_threads: threads that decode. Chosen: the cores this process may use, by affinity and cgroup, and fewer
            where they only wait for one another.
        prefetch_batches: finished batches that may wait for the consumer; with ``engine="process:N"`` N - 1 more.
            Chosen: 2, and with processes 3, so that word of one that was taken need not come at once.
        memory_bytes: encoded plus decoded bytes in flight, the batches that wait included, those handed out not.
            One batch may always proceed. Chosen: a quarter of the free memory, at most 4 GiB.
        device_batches: batches that are on the device, or on their way, before the consumer asks. Chosen: 2. Those that
            were handed out, and whose work the device still has before it, are up to 4 more.

    At most ``prefetch_batches + ceil(read_concurrency / batch_size) + 1`` batches are finished or being assembled.

    Raises:
        TypeError: a limit is not an int.
        ValueError: a limit is below 1.
    """

    read_concurrency: int | None = None
    decode_threads: int | None = None
    prefetch_batches: int | None = None
    memory_bytes: int | None = None
    device_batches: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                object.__setattr__(self, field.name, positive_int(f"Limits({field.name}=...)", value))


@dataclass(frozen=True, kw_only=True)
class ResolvedLimits:
    """The same, with every number settled."""

    read_concurrency: int
    decode_threads: int
    prefetch_batches: int
    memory_bytes: int
    device_batches: int

    def batches_in_flight(self, batch_size: int) -> int:
        """How many batches may be finished or being assembled."""
        return self.prefetch_batches + math.ceil(self.read_concurrency / batch_size) + 1


def resolve_limits(
    limits: Limits, *, batch_size: int, cpus: int, free_memory: int, most_threads: int | None = None, engines: int = 0
) -> ResolvedLimits:
    """Settle what the user left open.

    Args:
        limits: what the user said.
        batch_size: samples per batch.
        cpus: cores this process may use.
        free_memory: bytes that can be had without swapping.
        most_threads: decode threads that the source allows (a Dataset that is not thread-safe: 1).
        engines: engine processes; 0: it runs in threads.
    """
    threads = limits.decode_threads or cpus
    if most_threads is not None:
        threads = min(threads, most_threads) if limits.decode_threads else most_threads
    return ResolvedLimits(
        read_concurrency=limits.read_concurrency or max(batch_size, READ_CONCURRENCY),
        decode_threads=threads,
        prefetch_batches=limits.prefetch_batches or PREFETCH_BATCHES + bool(engines),
        memory_bytes=limits.memory_bytes or max(min(free_memory // MEMORY_SHARE, MEMORY_CEILING), MIB),
        device_batches=limits.device_batches or DEVICE_BATCHES,
    )


def positive_int(what: str, value: object) -> int:
    """``value`` where it is an int of at least 1, else the error that says what was given."""
    number = whole(what, value)
    if number < 1:
        raise ValueError(f"{what} must be at least 1, got {number}")
    return number


def whole(what: str, value: object) -> int:
    """``value`` as an int, where it is one, of numpy's too; no bool, and no float however whole."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    # By what Python itself takes for an index. Tensors and arrays have it, too, but are more than a number.
    if isinstance(value, bool) or not hasattr(type(value), "__index__") or hasattr(type(value), "__len__"):
        raise TypeError(f"{what} must be an int, got {value!r}")
    return operator.index(value)  # type: ignore[arg-type]
