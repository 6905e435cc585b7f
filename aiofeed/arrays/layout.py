"""The layout of samples: positions along axes, numbered so that those of a block of chunks, a shard, come together."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.arrays.chunked import expand
from aiofeed.arrays.fields import MOST_SHARDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A shard, for shuffle="window", has at least so many samples; of windows so many chunks, up to so many bytes.
LEAST_SAMPLES = 64
LEAST_CHUNKS = 8
SHARD_BYTES = 8 << 20


def shards_of(bounds: list[NDArray[np.int64]], sample_bytes: int, *, wide: bool) -> list[NDArray[np.int64]]:
    """Return where shards begin along each axis, of blocks of chunks that begin at ``bounds``.

    Args:
        bounds: By axis, the numbers of the positions at which blocks begin, and that of positions.
        sample_bytes: Bytes of the samples of a position.
        wide: Whether samples at a border of blocks along the first axis need the chunks of both.
    """
    counts = [int(each[-1]) for each in bounds]
    each = np.prod([count / (len(along) - 1) for count, along in zip(counts, bounds, strict=True)])
    several = max(int(LEAST_SAMPLES / each), 1)
    if wide:  # few borders, but no large shards
        several = max(several, min(LEAST_CHUNKS, int(SHARD_BYTES / (each * sample_bytes))))
    # A chunk with very many samples makes several shards: the first batch waits for the samples of a shard.
    most = max(int(SHARD_BYTES / sample_bytes / (each * (len(bounds[0]) - 1) / counts[0])), 1)
    most = max(most, counts[0] // MOST_SHARDS)
    firsts = bounds[0][:-1:several]
    lengths = np.diff(firsts, append=counts[0])
    pieces, within = expand(np.where(lengths > 2 * most, -(-lengths // most), 1))
    found = [np.append(firsts[pieces] + within * most, counts[0]), *bounds[1:]]
    while math.prod(len(along) - 1 for along in found) > MOST_SHARDS:
        at = max(range(len(found)), key=lambda number: len(found[number]))
        found[at] = np.append(found[at][:-1:2], counts[at])
    return found


class SampleLayout:
    """The samples of several grids, one behind the other: those at all combinations of positions along some axes.

    Args:
        axes: For each grid, its positions by axis: ranges or arrays.
        bounds: For each grid and axis, the numbers of the positions at which shards begin, and that of positions.
        repeats: The samples at each position.

    Attributes:
        starts: The first sample of each shard, and the number of samples.
    """

    def __init__(self, axes: list[dict[Any, Any]], bounds: list[list[NDArray[np.int64]]], repeats: int) -> None:
        self.axes: list[dict[Any, Any]] = axes
        self.repeats: int = repeats
        self._bounds = bounds
        lengths = [functools.reduce(np.multiply.outer, map(np.diff, each)).reshape(-1) for each in bounds]
        self.starts: NDArray[np.int64] = np.append(0, np.cumsum(np.concatenate(lengths) * repeats))
        self._first_shards = np.cumsum([0, *map(len, lengths)])

    def fingerprint(self) -> bytes:
        """Return what the number of a sample depends on, beside the lengths of axes."""
        found = [along for each in self._bounds for along in each if len(each) > 1]
        found += [at for each in self.axes for at in each.values() if not isinstance(at, range)]
        return b"".join(each.tobytes() for each in found)

    def positions(self, indices: NDArray[np.int64]) -> tuple[dict[Any, NDArray[np.int64]], NDArray[np.int64]]:
        """Return the positions of samples along each axis, and the numbers of their grids."""
        shards = np.searchsorted(self.starts, indices, side="right") - 1
        several = len(self.axes) > 1
        grids = np.searchsorted(self._first_shards, shards, side="right") - 1 if several else 0 * shards
        found = {axis: np.empty_like(indices) for axis in self.axes[0]}
        for grid in np.unique(grids).tolist() if several else [0]:
            here = grids == grid if several else slice(None)
            rest = (indices[here] - self.starts[shards[here]]) // self.repeats
            sizes = [len(bounds) - 1 for bounds in self._bounds[grid]]
            blocks = np.unravel_index(shards[here] - self._first_shards[grid], sizes)
            axes = zip(self.axes[grid].items(), self._bounds[grid], blocks, strict=True)
            for (axis, positions), bounds, at in reversed(list(axes)):
                rest, within = np.divmod(rest, bounds[at + 1] - bounds[at])
                within += bounds[at]
                is_range = isinstance(positions, range)
                found[axis][here] = positions.start + within * positions.step if is_range else positions[within]
        return found, grids

    def index(self, grid: int, numbers: Sequence[int]) -> int:
        """Return the first sample of a grid at a position, of which there is for each axis the number."""
        blocks, within = [], 0
        for bounds, number in zip(self._bounds[grid], numbers, strict=True):
            blocks.append(int(np.searchsorted(bounds, number, side="right")) - 1)
            within = within * int(bounds[blocks[-1] + 1] - bounds[blocks[-1]]) + number - int(bounds[blocks[-1]])
        shard = np.ravel_multi_index(blocks, [len(bounds) - 1 for bounds in self._bounds[grid]])
        return int(self.starts[self._first_shards[grid] + shard]) + within * self.repeats
