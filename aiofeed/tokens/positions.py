"""Windows of tokens with the documents inside them, and windows whose borders move from epoch to epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.kernel.core.types import Gathered, HostTensor
from aiofeed.kernel.runtime.buffers import BufferLease
from aiofeed.kernel.runtime.tensors import stage
from aiofeed.kernel.sampling.order import unmix64

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Of the windows, and with targets, of their labels and positions.
NAMES = ("tokens", "labels", "position_ids")


class GatheredDocuments(Gathered):
    """Windows, by the places of their first tokens, with the documents inside them."""

    def __init__(self, tokens: Any, places: NDArray[np.int64]) -> None:
        super().__init__(len(places))
        self._tokens, self._places = tokens, places

    def __iter__(self) -> Iterator[dict[str, NDArray[np.int64]]]:
        parts = self._tokens.gather_new(self._places)
        return (dict(zip(names_of(parts), row, strict=True)) for row in zip(*parts, strict=True))

    def batch(self, lease: BufferLease) -> tuple[dict[str, Any], int]:
        """Return the batch, in memory of a lease, and its bytes."""
        parts = self._tokens.gather_new(self._places, lease)
        batch = with_documents(parts)
        batch |= {
            name: HostTensor(part, pinned=lease.pinned) for name, part in zip(names_of(parts), parts, strict=True)
        }
        others, nbytes = stage({name: batch[name] for name in ("document_ids", "cu_seqlens")}, lease)
        return batch | others, nbytes + sum(part.nbytes for part in parts)


def names_of(parts: Sequence[Any]) -> Sequence[str]:
    """Return the names of the parts of windows: with targets, or without them."""
    return NAMES if len(parts) > 2 else NAMES[::2]


def with_documents(parts: Sequence[Any]) -> dict[str, Any]:
    """Return a batch of windows as ``Pack`` would: the number of each token's piece, and where the pieces start."""
    import torch

    positions = np.asarray(parts[-1])
    starts = np.flatnonzero(positions.ravel() == 0)
    edges = np.append(starts, positions.size)
    sizes = np.diff(edges)
    numbers = np.repeat(np.arange(len(starts)), sizes).reshape(positions.shape)
    batch = dict(zip(names_of(parts), map(torch.as_tensor, parts), strict=True))
    batch |= {"document_ids": torch.from_numpy(numbers), "cu_seqlens": torch.from_numpy(edges.astype(np.int32))}
    return {**batch, "max_seqlen": int(sizes.max())}


def collate_windows(windows: Sequence[dict[str, NDArray[np.int64]]]) -> dict[str, Any]:
    """Return a batch of windows, each with its parts."""
    return with_documents([np.stack([window[name] for window in windows]) for name in windows[0]])


def write_positions(
    bounds: NDArray[np.int64], places: NDArray[np.int64], parts: Sequence[NDArray[Any]], ignored: int | None
) -> None:
    """Write the position of each token in its document, from 0 at the start of its window, into the last part.

    With ``ignored``, that is the label of tokens whose next one is of another document.
    """
    *others, positions = parts
    block = positions.shape[1]
    # The documents that begin behind the first token of each window, up to the token behind the window.
    firsts = np.searchsorted(bounds, places, side="right")
    counts = np.searchsorted(bounds, places + block, side="right") - firsts
    rows = np.repeat(np.arange(len(places)), counts)
    begun = bounds[np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(len(rows))] - places[rows]
    if ignored is not None and len(others) > 1:
        others[1][rows, begun - 1] = ignored
    inside = begun < block
    positions[:] = 0
    positions[rows[inside], begun[inside]] = begun[inside]
    np.subtract(np.arange(block), np.maximum.accumulate(positions, axis=1, out=positions), out=positions)


@lru_cache
def epoch_offset(epoch_seed: int, stride: int) -> int:
    """Return by how many tokens windows are moved in an epoch; others in each of the first ``stride / 2`` epochs.

    The seed of an epoch is a bijection of the feeder's seed and the epoch, whose bits are exchanged: numbers of
    neighbouring epochs are neighbours, and a factor near the golden section parts them.
    """
    factor = next(each for each in range(max(int(stride * 0.618), 1), 2 * stride + 1) if math.gcd(each, stride) == 1)
    return unmix64(epoch_seed) * factor % stride
