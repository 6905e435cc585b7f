"""Parts of a source: ``source[indices]`` and ``source.split(...)``, views of the samples of any source with indices."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence, Sized
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from aiofeed import _hint_at
from aiofeed.kernel.core.faces import BY_INDEX, BY_INDICES, BaseSource, passes_on
from aiofeed.kernel.core.formatting import brief
from aiofeed.kernel.core.types import hides_secrets
from aiofeed.kernel.core.validation import check_seed, counted
from aiofeed.kernel.sampling.order import shuffled
from aiofeed.kernel.sampling.schedule import fingerprint

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

Indices: TypeAlias = "slice | Sequence[int] | Sequence[bool] | NDArray[Any] | torch.Tensor"


class IndexedSource(BaseSource, Sized):
    """A source whose samples have indices, so that parts of it are sources, too."""

    def __getitem__(self, indices: Indices) -> Self:
        """A part of the source, which a feeder takes as it takes the source: ``source[:1000]``, ``source[mask]``.

        Nothing is copied. The samples of a part have the order of ``indices``.

        Args:
            indices: A slice; a list, array or tensor of ints, from the end if negative; or of one bool per sample.

        Raises:
            TypeError: An int, which is no part, or something else that is no list of ints.
            IndexError: An index outside the source, or not as many bools as samples.
        """
        return self._part(_checked(self, indices))

    @hides_secrets
    def split(self, parts: Mapping[str, float], seed: int = 0) -> dict[str, Self]:
        """Split the samples at random: ``source.split({"train": 0.9, "validation": 0.1})``.

        The parts are those of ``torch.randperm(len(source))`` with a generator of that seed, on every machine. Within a
        part, samples keep their order.

        Args:
            parts: The share of each part, by its name: fractions that sum to 1, or numbers of samples that sum to the
                length of the source.
            seed: Another seed gives another split.

        Raises:
            TypeError: ``parts`` is no dict of numbers.
            ValueError: They do not sum to all samples, or a part would be empty.
        """
        length, shares = len(self), list(parts.values()) if isinstance(parts, Mapping) else []
        if not shares or not all(isinstance(share, Real) and type(share) is not bool for share in shares):
            raise TypeError(f'split takes fractions by name, {{"train": 0.9, "validation": 0.1}}, got {parts!r}')
        counts = all(isinstance(share, Integral) for share in shares)
        total, what = (length, "numbers of samples") if counts else (1, "fractions")
        if not all(share > 0 for share in shares) or abs(sum(shares) - total) > 1e-6:
            raise ValueError(f"split({parts}): {what} must be above 0 and sum to {total}; these sum to {sum(shares)}")
        ends = np.rint(np.cumsum(shares) * (length / total)).astype(np.int64)
        rows = np.split(shuffled(length, check_seed(seed), 0)(np.arange(length)), ends[:-1])
        if not all(part.size for part in rows):
            raise ValueError(f"split({parts}): with {counted(length, 'sample')} a part would be empty")
        return {name: self._part(np.sort(part)) for name, part in zip(parts, rows, strict=True)}

    def lengths(self, unit: str, /) -> NDArray[np.int64] | None:
        """Return the length of each sample, if ``structure()`` has one for all."""
        shapes = self.structure() or {}
        shape = shapes.get(unit or next((name for name, shape in shapes.items() if shape != ()), ""))
        return np.full(len(self), shape[0]) if shape else None

    def _part(self, rows: NDArray[np.int64]) -> Self:
        return Subset(self, rows)  # type: ignore[return-value]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            hint = "" if name.startswith("_") else _hint_at("a source", name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)


@passes_on
class Subset(IndexedSource):
    """The samples of a source at some indices.

    Args:
        whole: The source. It is no ``FromDataset`` and no ``Tensors``, which make parts by themselves.
        rows: The indices.
    """

    def __init__(self, whole: BaseSource, rows: NDArray[np.int64]) -> None:
        self.whole: Any = whole
        self.rows: NDArray[np.int64] = rows
        self._ascending = bool((np.diff(rows) >= 0).all())

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.rows)

    def __repr__(self) -> str:
        return f"{self.whole!r}[{len(self)} of {len(self.whole)}]"

    def __getattr__(self, name: str) -> Any:
        # Without an attribute of its own while it is unpickled.
        if name.startswith("_") or name in ("whole", "rows", "paths"):
            raise AttributeError(f"a part of a source has no {name!r}: its attribute `whole` is the source")
        value = getattr(self.whole, name)
        listed = name in ("targets", "names") and isinstance(value, Sized)  # Tokens(targets=) is a bool
        return [value[row] for row in self.rows.tolist()] if listed else value

    def _passed(self, name: str, value: Any) -> Any:
        """Return a member of the whole source for the part."""
        if value is None:
            return None
        if name in ("in_batches", "as_samples", "for_neighbours", "in_pieces"):
            return lambda: type(self)(value(), self.rows)
        if name in BY_INDEX:
            return lambda indices: value(self.rows.take(indices).tolist())
        if name in BY_INDICES:
            return lambda indices, *more, **named: value(self.rows[indices], *more, **named)
        if name in ("shard_starts", "looks_ahead") and not self._ascending:
            return None if name == "shard_starts" else False
        return np.unique(np.searchsorted(self.rows, value)).tolist() if name == "shard_starts" else value

    def _part(self, rows: NDArray[np.int64]) -> Self:
        return type(self)(self.whole, self.rows[rows])

    def fingerprint(self) -> str:
        """Identifies the whole source and the indices."""
        return part_fingerprint(names_of(self.whole, len(self.whole)), self.rows)

    async def read(self, index: int, /) -> Any:
        """Read a sample."""
        return await self.whole.read(self.rows[index].tolist())

    def uncopied_reader(self) -> Any:
        """Return a function that reads a sample without a copy, if the whole source can do that."""
        read = self.whole.uncopied_reader()
        return read and (lambda index: read(self.rows[index].tolist()))

    def lengths(self, unit: str, /) -> NDArray[np.int64] | None:
        """Return the lengths of the samples, if the whole source knows them."""
        found = self.whole.lengths(unit)
        return None if found is None else found[self.rows]

    def for_memory(self, nbytes: int, /) -> Self:
        """Return the same samples of a source that may keep its data in memory; all of its shards have some of them."""
        starts = self.whole.shard_starts
        needed = starts is None or len(np.unique(np.searchsorted(starts, self.rows, "right"))) == len(starts) - 1
        return type(self)(self.whole.for_memory(nbytes if needed else 0), self.rows)


def fingerprint_of(source: BaseSource, length: int) -> str:
    """Return ``names_of`` a source, with a digest of a sample of its contents.

    The digest has what the source knows of its ``content_parts()``: for files their sizes and some of their bytes, for
    objects their sizes and etags. It is left out if the source knows nothing, or a file cannot be read.
    """
    names = names_of(source, length)
    with contextlib.suppress(Exception):  # of damaged data, the libraries that read them raise any
        if parts := source.content_parts():
            from aiofeed.kernel.sources.file_io import digest_of

            return f"{names} {digest_of(parts)}"
    return names


def names_of(source: BaseSource, length: int) -> str:
    """Return the source's own ``fingerprint()``, or a hash of its type, length and keys."""
    own = source.fingerprint()
    if own is not None:
        if not isinstance(own, str):
            raise TypeError(f"{type(source.given).__name__}.fingerprint() must return a str, got {own!r}")
        return own
    named = fingerprint(type(source.given).__qualname__, length, lambda index: str(source.key(index)))
    return named if source.rows is None else part_fingerprint(named, source.rows)


def part_fingerprint(whole: str, rows: NDArray[np.int64]) -> str:
    """Return the fingerprint of a part of a source with a fingerprint."""
    return hashlib.sha256(whole.encode() + rows.astype("<i8").tobytes()).hexdigest()[:32]


def kind_of(source: BaseSource) -> str:
    """Return the name of the class of a source; of a part, that of its whole source."""
    kind = type(source.given)
    return f"{kind.__module__}.{kind.__qualname__}"


def _checked(source: IndexedSource, indices: Any) -> NDArray[np.int64]:
    """Return the indices of a part as an array.

    Raises:
        TypeError, IndexError: As for ``IndexedSource.__getitem__``.
    """
    name, length = type(source).__name__, len(source)
    if isinstance(indices, slice):
        return np.arange(length)[indices]
    rows = np.asarray(indices)
    if rows.ndim == 0 and rows.dtype.kind in "iu":
        raise TypeError(
            f"{name}[{indices}]: a Feeder reads and decodes the samples of a source, Feeder(source, decode=..., "
            f"batch_size=...); {name}[{indices}:{indices + 1}] is a source of this sample"
        )
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "biu"):
        raise TypeError(f"{name}[...] takes a slice, a list of ints or a mask of bools, got {brief(indices)}")
    if rows.dtype == bool and len(rows) != length:
        mask, samples = counted(len(rows), "bool"), counted(length, "sample")
        raise IndexError(f"{name}[mask]: the mask has {mask}, and the source {samples}")
    rows = np.flatnonzero(rows) if rows.dtype == bool else rows.astype(np.int64)
    if rows.size and not -length <= rows.min() <= rows.max() < length:
        raise IndexError(f"{name}[...]: the indices are {rows.min()} to {rows.max()}, for {counted(length, 'sample')}")
    return rows % max(length, 1)
