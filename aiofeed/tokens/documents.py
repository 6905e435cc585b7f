"""``Documents``: the documents of token files, as samples whose lengths are known."""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.common.blocking import run_blocking
from aiofeed.common.grouped_source import GroupedSource
from aiofeed.common.parts import in_order
from aiofeed.kernel.core.types import Traits, public
from aiofeed.kernel.core.validation import check_int_from, counted
from aiofeed.kernel.sampling.schedule import fingerprint
from aiofeed.objects.reader import run_all
from aiofeed.tables.columns import GatheredLists, joined_memory
from aiofeed.tokens.bounds import document_bounds, read_ranges
from aiofeed.tokens.formats import DefaultDtype
from aiofeed.tokens.windows import Tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiofeed.kernel.sources.file_io import Content


@public
class Documents(GroupedSource):
    """The documents of token files, each a sample: int64 [length], for ``Pack``, ``Buckets`` and ``TokenBudget``.

    Example:
        ```python
        import aiofeed

        documents = aiofeed.Documents("tokens.bin", separator=0)
        print(len(documents), documents[0])
        feeder = aiofeed.Feeder(documents, batch_size=aiofeed.Pack(context=1024, rows=4))
        ```

    These plans need no ``lengths=``. Files are those of ``Tokens``: mapped, or at URLs read by ranges. Documents
    without tokens are left out, and none crosses files. With ``decode=`` it gets the tokens of a document.

    Where documents end is said by ``separator=``; without it by the ``.idx`` of Megatron, the ``.csv.gz`` that OLMo and
    dolma write beside a ``.npy``, or the lists of ``column=``. A separator is a token of its document. Files are
    searched for it once, when the source is made.

    Args:
        paths: See ``Tokens``.
        separator: The token between documents, such as that of the end of a text.
        dtype: See ``Tokens``.
        at_start: Whether a separator begins its document, as llm.c and modded-nanogpt write it, or ends it. Default:
            whether the first token of the first file is one.
        column: The column of lists in Parquet or Arrow files, each a document.
        store, options: See ``Tokens``.

    Raises:
        FileNotFoundError, ImportError, OSError: See ``Tokens``.
        TypeError, ValueError: An argument has the wrong type, nothing says where the documents of a file end, or a file
            is damaged.
    """

    traits: Traits = Traits(decode="optional", rows=True)
    dtype: np.dtype[Any] = np.dtype(np.int64)
    # For plans that join parts of documents: an array over the memory of all files, and where each begins in it.
    _joined: Any = None

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        separator: int | None = None,
        dtype: str = DefaultDtype("uint16"),
        *,
        at_start: bool | None = None,
        column: str | None = None,
        store: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if separator is not None:
            check_int_from(0, "Documents(separator=...)", separator)
        self._tokens: Any = Tokens(paths, 1, dtype, column=column, store=store, options=options)
        self.looks_ahead: bool = self._tokens.looks_ahead
        self.answers_at_once: bool = not self.looks_ahead
        self._files = np.asarray(self._tokens._starts)
        self._bounds: NDArray[np.int64] = document_bounds(self._tokens, separator, at_start)
        if not self.looks_ahead:
            self.read_now: Any = self._read_now

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._bounds) - 1

    def __repr__(self) -> str:
        return f"Documents({counted(len(self), 'document')} in {counted(len(self._files) - 1, 'file')})"

    def __getitem__(self, indices: Any) -> Any:
        """One document as an int64 tensor, or a part, as of other sources."""
        if not isinstance(indices, int | np.integer):
            return super().__getitem__(indices)
        import torch

        return torch.from_numpy(run_blocking(lambda: self.read(range(len(self))[indices])))

    def key(self, index: int, /) -> str:
        """Return the file and the tokens of a document, as in ``train.bin[2048:3072]``."""
        [number], [start], [stop] = self._places(index)
        return f"{self._tokens._files[number][0]}[{start}:{stop}]"

    def lengths(self, unit: str, /) -> NDArray[np.int64] | None:
        """Return the tokens of each document."""
        return np.diff(self._bounds) if unit in ("", "tokens") else None

    def nbytes(self, index: int, /) -> int:
        """Return the bytes of a document, about."""
        return int(self._bounds[index + 1] - self._bounds[index]) * int(self._tokens.gathered_bytes)

    @property
    def shard_starts(self) -> NDArray[np.int64]:
        """The first document of each file, or at URLs of each range of 4 MiB, and the number of documents."""
        return np.unique(np.searchsorted(self._bounds, self._tokens.shard_starts))

    @property
    def reads_whole_shards(self) -> bool:  # type: ignore[override]
        """Whether documents are lists of row groups."""
        return bool(self._tokens.reads_whole_shards)

    def fingerprint(self) -> str:
        """Return the number of documents and some of their keys, as for files without a fingerprint of their own."""
        return fingerprint("Documents", len(self), self.key)

    def content_parts(self) -> list[Content]:
        """Return the dtypes of the tokens, and the files."""
        return self._tokens.content_parts()  # type: ignore[no-any-return]

    def storage_statistics(self) -> Any:
        """Return the requests for files at URLs."""
        return self._tokens.storage_statistics()

    def _places(self, indices: Any) -> tuple[list[int], list[int], list[int]]:
        """Return the file of each document, and its first token in it and the one behind it."""
        rows = np.atleast_1d(np.asarray(indices, np.int64))
        numbers = np.searchsorted(self._files, self._bounds[rows], side="right") - 1
        bounds = [self._bounds[each] - self._files[numbers] for each in (rows, rows + 1)]
        return numbers.tolist(), bounds[0].tolist(), bounds[1].tolist()

    async def read_many(self, indices: Sequence[int], /) -> Any:
        """Return the tokens of documents. Files are read in a thread."""
        if not self.looks_ahead:
            return await asyncio.to_thread(self._read_now, indices)
        numbers, starts, stops = map(np.array, self._places(indices))
        groups = [np.flatnonzero(numbers == number) for number in np.unique(numbers)]
        reads = [read_ranges(self._tokens, int(numbers[places[0]]), starts[places], stops[places]) for places in groups]
        found = zip([places.tolist() for places in groups], await run_all(reads), strict=True)
        return [tokens.astype(np.int64) for tokens in in_order(len(indices), found)]

    def _read_now(self, indices: Sequence[int], /) -> Any:
        rows = np.asarray(indices, np.int64)
        self._tokens.mapped.check(self._bounds[rows])

        def samples() -> list[NDArray[np.int64]]:
            arrays = self._tokens.arrays
            return [
                arrays[number][start:stop].astype(np.int64)
                for number, start, stop in zip(*self._places(rows), strict=True)
            ]

        return GatheredLists({"tokens": self}, rows, samples) if self._joined else samples()

    # --- for plans that join parts of documents

    def in_pieces(self) -> Documents:
        """Return the documents as ``GatheredLists``, if they are in mapped files of one dtype."""
        if self.looks_ahead or (joined := joined_memory(self._tokens.arrays)) is None:
            return self
        other = copy.copy(self)
        other._joined, other.read_now = joined, other._read_now
        return other

    @property
    def in_memory(self) -> bool:
        """Whether batches are gathered of files that the operating system can keep in memory."""
        return self._joined is not None and self._tokens.in_memory

    @property
    def flat(self) -> NDArray[Any]:
        """All tokens in one array."""
        return self._joined[0]  # type: ignore[no-any-return]

    def bounds(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where documents begin in ``flat``, and how many tokens they have."""
        starts = self._bounds[rows]
        numbers = np.searchsorted(self._files, starts, side="right") - 1
        return self._joined[1][numbers] + starts - self._files[numbers], self._bounds[rows + 1] - starts
