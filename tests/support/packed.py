"""Documents whose tokens show where they are from, and a check of packed batches by brute force."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

PAD, SEPARATOR = -1, -2
STEP = 1000
"""Token ``STEP * index + k`` is number k of a document."""


def document(index: int, length: int) -> torch.Tensor:
    """A document with tokens of its own."""
    return torch.arange(length) + STEP * index


class Documents:
    """A Dataset of documents.

    Args:
        lengths: Tokens of each.
        fails_at: The items that raise an error.
    """

    def __init__(self, lengths: Sequence[int], fails_at: Sequence[int] = ()) -> None:
        self.lengths = lengths
        self.fails_at = fails_at
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        if index in self.fails_at:
            raise ValueError("broken")
        return document(index, int(self.lengths[index]))


def pieces_of(batch: Any, rows: int, context: int) -> list[list[int]]:
    """The tokens of each piece of a batch, without padding, after a check that its tensors fit together."""
    assert batch["cu_seqlens"].dtype is torch.int32
    assert {batch[name].dtype for name in ("tokens", "position_ids", "document_ids")} == {torch.int64}
    assert {batch[name].shape for name in ("tokens", "position_ids", "document_ids")} == {(rows, context)}
    tokens, places, numbers = (batch[name].flatten().tolist() for name in ("tokens", "position_ids", "document_ids"))
    edges = batch["cu_seqlens"].tolist()
    assert (edges[0], edges[-1]) == (0, rows * context)
    assert set(range(0, rows * context, context)) <= set(edges)
    assert batch["max_seqlen"] == max(stop - start for start, stop in itertools.pairwise(edges))
    pieces: list[list[int]] = []
    padded = False
    for start, stop in itertools.pairwise(edges):
        assert start < stop
        assert places[start:stop] == list(range(stop - start))
        [number] = set(numbers[start:stop])
        piece = tokens[start:stop]
        if number == -1:
            assert set(piece) == {PAD}
            assert not padded or start % context == 0, "padding in two pieces"
        else:
            assert number == len(pieces)
            assert PAD not in piece
            whole = piece[: -1 if piece[-1] == SEPARATOR else None]
            assert whole == list(range(whole[0], whole[0] + len(whole))) if whole else piece == [SEPARATOR]
            pieces.append(piece)
        padded = number == -1
    return pieces


def tokens_of(pieces: Iterable[list[int]]) -> Counter[int]:
    """How often each token comes."""
    return Counter(itertools.chain.from_iterable(pieces))


def all_tokens(lengths: Sequence[int], *, separated: bool, most: int | None = None) -> Counter[int]:
    """The tokens of an epoch, of each document up to ``most``."""
    found: Counter[int] = Counter()
    for index, length in enumerate(lengths):
        tokens = [*range(STEP * index, STEP * index + length), *([SEPARATOR] if separated else [])]
        found.update(tokens[:most])
    return found


def lognormal(count: int, mean: float, sigma: float = 0.8) -> Any:
    """Log-normal lengths up to four times the mean."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(drawn.astype(np.int64), 1, int(4 * mean))
