"""The GIL as what limits decoding: how much of the work is under it, by arithmetic, and what to tell of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GilLimit:
    """The GIL keeps threads from decoding more.

    Args:
        threads: that decode.
        cpu_s: per sample.
        held_s: of it, under the GIL or lost in passing it on.
    """

    threads: int
    cpu_s: float
    held_s: float

    @property
    def ceiling(self) -> float:
        """Samples per second at which one process stops to scale."""
        return 1.0 / self.held_s


def gil_message(limit: GilLimit, *, cores: int, turbo: bool) -> str:
    """What to tell of it, and the way out; ``turbo``: whether simplejpeg might help."""
    ways = f'engine="process:{cores}"'
    if turbo:
        ways = f"pip install 'aiofeed[turbo]' for small JPEGs, or {ways}"
    return (
        f"decoding is held up by the GIL: {limit.held_s * 1e6:.0f} of the {limit.cpu_s * 1e6:.0f} us that a sample "
        f"takes are under it, or lost in passing it on, so that one process stops at {limit.ceiling:.0f} samples/s; "
        f"{limit.threads} of {cores} threads decode. The way out: {ways}"
    )


def held_share(threads: int, effective: float) -> float:
    """The part of their work that ``threads`` do one at a time, where together they are worth ``effective`` threads.

    By mean value analysis of one server and a delay: Reiser and Lavenberg, 1980. Found by bisection, to a thousandth.
    """
    low, high = 1e-3, 1.0
    while high - low > 1e-3:
        share = (low + high) / 2
        if _effective(threads, share) > effective:
            low = share
        else:
            high = share
    return high


def _effective(threads: int, share: float) -> float:
    waiting = flow = 0.0
    for present in range(1, threads + 1):
        held = share * (1 + waiting)
        flow = present / (held + 1 - share)
        waiting = flow * held
    return flow
