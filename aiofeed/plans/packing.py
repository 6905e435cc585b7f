"""``Pack``: a plan that packs documents of different lengths into rows of one length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from aiofeed import _load_addon
from aiofeed.kernel.core.faces import Exclusion, bind_decoder
from aiofeed.kernel.core.types import public
from aiofeed.kernel.core.validation import check_bool, check_callable, check_int_from, check_positive_int
from aiofeed.kernel.runtime.tensors import unchanged
from aiofeed.kernel.sampling.order import BatchLists, Int64
from aiofeed.plans.balanced import Cost, assign, integer_costs, warn_of_large
from aiofeed.plans.length_plans import LengthPlan, Lengths, Measure, OnOversize, check_on_oversize, starts_of

Int32: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]

Fill: TypeAlias = "float | Mapping[str, float]"
"""A token, or one for each column of samples that are dicts."""

# cu_seqlens is int32.
MOST_TOKENS = 2**31 - 1


@public
class Pack(LengthPlan):
    """A plan for ``batch_size=``: batches of ``rows`` rows of ``context`` tokens, filled with whole or split documents.

    Example:
        ```python
        import aiofeed

        documents = aiofeed.Documents("tokens.bin", separator=0)
        feeder = aiofeed.Feeder(documents, batch_size=aiofeed.Pack(context=1024, rows=4), shuffle=True)
        for batch in feeder:
            print(batch["tokens"].shape, batch["document_ids"].shape)
        ```

    A sample is a document: a 1-D tensor, array or list of ints, or a dict of such columns of one length, which are
    packed alike. A batch is a dict:

    - "tokens", or the names of the columns: [rows, context] of the documents' dtype (int64 for lists).
    - "position_ids": int64 [rows, context], from 0 in each piece of a document.
    - "document_ids": int64 [rows, context], the number of the piece in the batch; -1 for padding.
    - "cu_seqlens": int32 [pieces + 1], where pieces start in the flattened rows, as flash attention takes it. Padding
      is a piece too, so the last value is ``rows * context``.
    - "max_seqlen": the longest piece, an int.
    - "source_ids", with ``Mixture(names=True)``: int64 [rows, context], the source of each token, as its place in
      ``mixture.names``; -1 for padding.

    With ``split=True`` the documents are one sequence of tokens that is cut into rows; of a document longer than a row,
    whole rows come first. A document is read again for each batch that has a part of it. With ``split=False`` each
    document is in one row (best-fit decreasing). With ``shuffle=True``, documents and rows are shuffled. A batch
    with fewer rows is filled up with padding; ``drop_last=True`` drops it, and with ``split=True`` also an incomplete
    row. A document that ``on_error="skip"`` skips leaves padding.

    Args:
        lengths: The length of each document in tokens, an array or list of ints from 1; or a function of the index,
            called once per document; or "measure" or "decoded". Leave it out for a ``Stream``. See ``Buckets``.
        context: Tokens of a row.
        rows: Rows of a batch.
        separator: A token after each document, or a dict of one for each column. It counts as a token of its document:
            with ``split=False`` both have to fit into a row.
        split: Whether documents may be split.
        window: Documents that are packed together with ``split=False``, 16,384 by default. Wastes 0.02 to 0.5 % of
            log-normal lengths with a mean of a quarter of the context. Of a ``Stream``, whose documents are put into
            the first row with room, the documents after which a row ends that is not full; 1,024 by default.
        pad: The token in places without one, or a dict of one for each column (0 for columns without one).
        on_oversize: With ``split=False``, what to do about a document that is longer than a row with its separator:
            "error"; "skip" it; or "truncate" it, the separator included.
        cost: Balances the costs of rows over ranks. Returns the costs of pieces of these lengths, positive numbers,
            from an array of lengths, see ``Balanced``. The cost of a row is the sum of those of its pieces.
        groups: With ``cost``, the largest number of ranks, at least 2: each ``groups`` batches of an epoch have equal
            costs. Other numbers of ranks must divide it.
        length: See ``Buckets``.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range.
    """

    # fmt: off
    excluded: ClassVar[Sequence[Exclusion]] = (
        (("collate_fn=",), ("Pack",), ValueError, "Pack puts the batches together; transform= gets each batch"),
        (("Tensors",), ("Pack",), ValueError,
         "a row of Tensors is a tuple, a document one tensor: pass a Dataset of those"),
        (("samples that are no documents",), ("Pack",), ValueError,
         "a document is a row of tokens, or a dict of such columns of one length: choose columns, leave out targets, "
         "or pass a Dataset of documents"),
        (('on_error="replace"',), ("Pack",), ValueError,
         "it plans the place of every token, and a replacement has another length and is used twice: pass "
         "on_error='skip', which leaves padding, or 'raise'"),
        (("a list of devices",), ("Pack",), ValueError,
         "cu_seqlens is one for all rows of a batch: create one feeder for each device, with shard=(rank, world_size)"),
        (("static_batches=True",), ("Pack",), ValueError,
         "it needs batches of one size, and cu_seqlens of Pack varies: leave it out"),
        (('cache="device"',), ("Pack",), ValueError,
         "it returns views of permuted rows, and Pack copies tokens: leave it out"),
    )
    # fmt: on

    def __init__(
        self,
        lengths: Lengths | None = None,
        context: int = 0,
        rows: int = 8,
        *,
        separator: Fill | None = None,
        split: bool = True,
        window: int | None = None,
        pad: Fill = 0,
        on_oversize: OnOversize = "error",
        length: Measure | None = None,
        cost: Cost | None = None,
        groups: int = 64,
    ) -> None:
        self.groups: int | None = None if cost is None else check_int_from(2, "Pack(groups=)", groups)
        super().__init__(lengths, length, context=context)
        self.cost: Cost | None = check_callable("Pack(cost=)", cost)
        self.context: int = check_positive_int("Pack(context=)", context)
        self.rows: int = check_positive_int("Pack(rows=)", rows)
        if self.context * self.rows > MOST_TOKENS:
            raise ValueError(f"a batch of Pack has at most {MOST_TOKENS} tokens, got rows={rows} of context={context}")
        self.separator: Fill | None = None if separator is None else _check_fill("separator", separator)
        self.split: bool = check_bool("Pack(split=)", split)
        self.window: int = check_positive_int("Pack(window=)", self._window if window is None else window)
        self.pad: Fill = _check_fill("pad", pad)
        self.on_oversize = check_on_oversize("Pack", on_oversize)
        if self.split and on_oversize != "error":
            raise ValueError(f"Pack(split=True) splits long documents, so leave out on_oversize={on_oversize!r}")

    def _describe(self) -> str:
        how = "" if self.split else f", window={self.window}, on_oversize={self.on_oversize!r}"
        how += "" if self.groups is None else f", groups={self.groups}"
        return f"context={self.context}, rows={self.rows}, separator={self.separator!r}, split={self.split}{how}"

    @property
    def _sizes(self) -> Int32:
        """The tokens of each document with its separator."""
        return self.lengths.astype(np.int32) + np.int32(self.separator is not None)

    def _check(self, lengths: Int64, first: int = 0) -> None:
        if self.groups is not None and not len(self.costs):
            self.costs: Int64 = integer_costs("Pack", self.cost, np.arange(1, self.context + 1))
        longest = int(lengths.max(initial=0)) + (self.separator is not None)
        if longest <= (MOST_TOKENS if self.split or self.on_oversize != "error" else self.context):
            return
        index = first + int(lengths.argmax())
        most, way = f"context={self.context}", 'pass split=True, or on_oversize="skip" or "truncate"'
        if longest > MOST_TOKENS:
            most, way = str(MOST_TOKENS), "make several samples of it"
        with_separator = "" if self.separator is None else " with its separator"
        raise ValueError(f"document {index} has {longest} tokens{with_separator}, more than {most}: {way}")

    def facts(self, arguments: Any) -> Mapping[str, str]:
        """Return that batches are packed, and whether it is known that samples are no documents."""
        source = arguments.adopted
        bound = bind_decoder(arguments.decode or source.decoder or unchanged)
        # The order of a stream refuses columns without a length.
        shapes = (not arguments.decode and arguments.traits.indexed and source.structure()) or {}
        # A part of a tuple, a number or a text is no column; those of one document have one length.
        others = [name for name, shape in shapes.items() if type(name) is int or shape == ()]
        if len({shape[0] for shape in shapes.values() if shape}) > 1:
            others = list(shapes)
        if bound.row is not None and len(bound.row.shape) != 1:
            others.append("decoded samples")
        if source.target is not None and not (bound.takes_target or source.source_names):
            others.append("target")
        words = f"{arguments.source!r}, in which {others} cannot be packed,"
        return {"Pack": "Pack"} | ({"samples that are no documents": words} if others else {})

    def new_collate(self) -> Any:
        """Return what puts the documents of a batch into rows."""
        return _load_addon("PackCollate", "Pack")(self.rows, self.context, self.separator, self.pad)

    @property
    def typical_samples(self) -> int:
        """Documents of mean length that fill a batch; at least one per row."""
        mean = float(np.minimum(self._sizes, self.context).mean()) if len(self.lengths) else 1.0
        return self.rows * int(max(self.context / mean, 1.0))

    def batches(self, order: Int64, rng: np.random.Generator, *, shuffle: bool, drop_last: bool) -> BatchLists:
        """Return the batches of an epoch; without ``shuffle``, rows come in the order of their first documents."""
        sizes = self._sizes[order]
        if self.split:
            rows = _split(sizes, self.context, drop_last=drop_last)
        else:
            if self.on_oversize == "skip":
                order, sizes = order[sizes <= self.context], sizes[sizes <= self.context]
            rows = _best_fit(np.minimum(sizes, self.context), self.context, self.window)
        if shuffle:
            places = rng.permutation(len(rows.offsets) - 1)
            # Neighbours with a common document stay neighbours, so that most batches read it once.
            places[rows.free :].sort()
        else:
            places = rows.documents[rows.offsets[:-1]]
        by_place = np.argsort(places, kind="stable")
        if drop_last:
            by_place = by_place[: len(by_place) - len(by_place) % self.rows]
        if self.groups is not None and len(by_place):
            costs = np.add.reduceat(self.costs[rows.stops - rows.starts - 1], rows.offsets[:-1])[by_place]
            warn_of_large(self, costs, len(by_place) / self.rows, "rows", self.rows)
            # The rows of the last batch are not moved if they do not fill it.
            for first in range(0, len(by_place) - self.rows + 1, self.groups * self.rows):
                groups = min(self.groups, (len(by_place) - first) // self.rows)
                step = slice(first, first + groups * self.rows)
                numbers = assign(costs[step], np.ones(groups * self.rows, np.int64), groups, 1, self.rows)
                by_place[step] = by_place[step][np.argsort(numbers, kind="stable")]
        return self._batches(rows, by_place, order)

    def _batches(self, rows: _Rows, numbers: Int64, order: Int64) -> BatchLists:
        """Batches of rows with these numbers."""
        counts = np.diff(rows.offsets)[numbers]
        offsets = starts_of(counts)
        pieces = np.repeat(rows.offsets[numbers] - offsets[:-1], counts)
        pieces += np.arange(offsets[-1])
        indices = order[rows.documents[pieces]]
        spans = np.empty((len(pieces), 4), np.int32)
        spans[:, 1], spans[:, 2], spans[:, 3] = rows.starts[pieces], rows.stops[pieces], self.lengths[indices]
        places = starts_of(spans[:, 2] - spans[:, 1])[:-1]
        # Minus the tokens of earlier rows, plus the place of the row in its batch.
        firsts = np.arange(len(numbers)) % self.rows * self.context - places[offsets[:-1]]
        spans[:, 0] = places + np.repeat(firsts, counts)
        return BatchLists(indices, np.append(offsets[: -1 : self.rows], offsets[-1]), spans)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Pieces of documents in rows: row k has the pieces ``offsets[k]`` to ``offsets[k + 1]``.

    Args:
        documents: The document of each piece, as its place in the epoch's order.
        starts, stops: The part of the document, in tokens.
        offsets: The first piece of each row.
        free: The number of rows, the first ones, that may come in any order; the others keep theirs.
    """

    documents: Int64
    starts: Int32
    stops: Int32
    offsets: Int64
    free: int


def _split(sizes: Int32, context: int, *, drop_last: bool) -> _Rows:
    """Rows of documents that may be split: full rows of one document, and rows of what is left of the documents.

    One sequence of all tokens, cut into rows, would cut long documents anywhere. With log-normal lengths with a mean of
    a quarter of a row of 2,048, a token has 361 earlier ones of its document in its row, and would have 337.
    """
    full = sizes // np.int32(context)
    skipped = full * np.int32(context)
    rest = sizes - skipped
    documents = np.flatnonzero(rest)
    ends = np.cumsum(rest[documents], dtype=np.int64)
    tokens = int(ends[-1]) if len(ends) else 0
    rows = tokens // context if drop_last else -(-tokens // context)
    cuts = np.minimum(np.arange(rows + 1) * context, tokens)
    # The document at the start of each row, and the one at its end.
    first, last = np.searchsorted(ends, cuts[:-1], side="right"), np.searchsorted(ends, cuts[1:], side="left")
    offsets = starts_of(last - first + 1)
    rests = np.arange(offsets[-1])
    rests -= np.repeat(offsets[:-1] - first, last - first + 1)
    rests = documents[rests]
    starts, stops = skipped[rests], sizes[rests]
    starts[offsets[:-1]] += cuts[:-1] - ends[first] + rest[documents[first]]
    stops[offsets[1:] - 1] -= ends[last] - cuts[1:]

    long = np.flatnonzero(full)
    whole = np.repeat(long, full[long])
    nth = np.arange(len(whole)) - np.repeat(starts_of(full[long])[:-1], full[long])
    return _Rows(
        np.concatenate([whole, rests]),
        np.concatenate([nth * context, starts], dtype=np.int32),
        np.concatenate([(nth + 1) * context, stops], dtype=np.int32),
        np.concatenate([np.arange(len(whole)), len(whole) + offsets]),
        len(whole),
    )


def _best_fit(sizes: Int32, context: int, window: int) -> _Rows:
    """Pack whole documents into rows, one window of documents at a time."""
    documents, counts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for start in range(0, len(sizes), window):
        piece = sizes[start : start + window]
        descending = np.argsort(-piece, kind="stable")
        rows = np.empty(len(piece), np.int64)
        rows[descending] = _best_fit_decreasing(piece[descending], context)
        # By row, and within a row in the epoch's order.
        documents.append(start + np.argsort(rows, kind="stable"))
        counts.append(np.bincount(rows))
    packed, offsets = np.concatenate(documents), starts_of(np.concatenate(counts))
    return _Rows(packed, np.zeros(len(packed), np.int32), sizes[packed], offsets, len(offsets) - 1)


def _best_fit_decreasing(sizes: Int32, context: int) -> list[int]:
    """Return the row of each document, in which it leaves the least room; ``sizes`` descend.

    10 million log-normal lengths in windows of 16,384 take 3 to 6 s for contexts of 512 to 32,768. To place documents
    of one size together is faster for the shortest of these contexts, and slower for the others.
    """
    # Open rows by room, and the rooms in ascending order.
    open_rows: dict[int, list[int]] = {}
    rooms: list[int] = []
    placed: list[int] = []
    rows = 0
    for size in sizes.tolist():
        at = bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[at]
        else:
            room, row = context, rows
            rows += 1
        placed.append(row)
        left = room - size
        if left in open_rows:
            open_rows[left].append(row)
        elif left:
            insort(rooms, left)
            open_rows[left] = [row]
    return placed


def _check_fill(name: str, value: Fill) -> Fill:
    for each in value.values() if isinstance(value, Mapping) else [value]:
        if isinstance(each, bool) or not isinstance(each, int | float | np.number):
            raise TypeError(f"Pack({name}=) must be a number, or a dict of one for each column, got {value!r}")
    return value
