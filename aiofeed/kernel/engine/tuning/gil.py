"""Whether the GIL is what limits decoding, and the message that says so. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from aiofeed.kernel.engine.tuning.score import Score

# A larger number of threads is worth it if it brings this many times as much.
MORE_BRING = 1.08
# The chosen threads together use at least this part of a core, as a held GIL does, and each of more threads is on the
# processor for less than the second part of its time: they wait for each other, not for storage.
CHOSEN_CORES = 0.6
MORE_AT_WORK = 0.8
# Larger samples wait for memory rather than for the GIL: a core copies 3 to 10 GB/s without it.
LARGE_BYTES = 1 << 20
# Passing the GIL on costs a sample no more processor time than this. More threads that each take longer by more than
# this compete for memory.
HANDOVER_S = 100e-6


@dataclass(frozen=True)
class GilLimit:
    """The GIL keeps more threads from decoding more.

    Args:
        threads: decode threads in use.
        held_s: seconds per sample that hold the GIL, or wait for it.
        cores: cores that they use together.
    """

    threads: int
    held_s: float
    cores: float = 1.0

    @property
    def ceiling(self) -> float:
        """Samples per second that one process can decode."""
        return 1.0 / self.held_s


def gil_limit(chosen: Score, more: Score | None) -> GilLimit | None:
    """Return the limit of the GIL, if for it ``more`` threads decode no more than the ``chosen`` ones."""
    if more is None or not chosen.cpu_s or chosen.nbytes > LARGE_BYTES * chosen.samples:
        return None
    if chosen.cores < CHOSEN_CORES or more.at_work >= MORE_AT_WORK:
        return None
    # If the threads would gain nothing even without waiting, memory is the limit.
    unhindered_s = max(chosen.cpu_per_sample, more.cpu_per_sample - HANDOVER_S)
    if more.threads / unhindered_s < MORE_BRING * chosen.rate:
        return None
    return GilLimit(chosen.threads, min(chosen.cpu_per_sample, 1.0 / chosen.rate), max(chosen.cores, 1.0))


def gil_message(limit: GilLimit, *, cores: int, turbo: bool) -> str:
    """Return the log line; ``turbo`` says whether simplejpeg is not installed and may help.

    It proposes as many processes as use all cores, if each uses as many as this one.
    """
    ways = f'engine="process:{ceil(cores / limit.cores)}"'
    if turbo:
        ways = f"pip install 'aiofeed[turbo]' for small JPEGs, or {ways}"
    return (
        f"Decoding is GIL-bound: {limit.held_s * 1e6:.0f} us per sample hold or wait for the GIL, which limits one "
        f"process to about {limit.ceiling:,.0f} samples/s ({limit.threads} of {cores} decode threads in use). "
        f"Try {ways}."
    )
