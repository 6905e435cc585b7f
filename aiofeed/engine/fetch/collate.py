"""Samples into a batch: rows that were decoded in place, what ``default_collate`` gives, or the user's ``collate_fn``.

Decode threads fill different rows of one assembly at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from aiofeed.core.errors import CollateError
from aiofeed.core.pytree import total_nbytes
from aiofeed.core.types import Collate, HostTensor, Row
from aiofeed.engine.fetch.default_collate import MISSING, DefaultCollateBuilder, Kept, compact, pick
from aiofeed.runtime.buffers import BufferLease, array
from aiofeed.runtime.tensors import stage

if TYPE_CHECKING:
    from numpy.typing import NDArray


class BatchBuilder(Protocol):
    """A batch while it is put together; ``put`` from any thread, ``finish`` once all samples are in."""

    def put(self, position: int, sample: Any) -> None:
        """Store one sample; a row of memory that was filled in place comes as ``FILLED``."""
        ...

    def finish(self, keys: Sequence[str], kept: Kept = None) -> Any:
        """The batch, of all samples or of those at the positions ``kept``.

        Raises:
            CollateError: the samples do not fit together; it names keys.
        """
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of slot memory."""
        ...


class RowBatchBuilder:
    """A batch whose first part is decoded in place: ``rows[position]`` is the memory of a sample."""

    def __init__(
        self, row: Row, samples: int, lease: BufferLease, *, targets: bool, torch_dtype: str | None = None
    ) -> None:
        dtype: np.dtype[Any] = np.dtype(row.dtype)
        self.rows: NDArray[Any] = array(lease, (samples, *row.shape), dtype)
        self._leaf = HostTensor(
            self.rows,
            axes=None if row.axes is None else (0, *[axis + 1 for axis in row.axes]),
            torch_dtype=torch_dtype,
            pinned=lease.pinned,
        )
        self._targets = DefaultCollateBuilder(samples, lease) if targets else None

    def put(self, position: int, sample: Any) -> None:
        """Store a sample's target; its row is filled already."""
        if self._targets is not None:
            self._targets.put(position, sample)

    def finish(self, keys: Sequence[str], kept: Kept = None) -> Any:
        """The rows, or the list of rows and targets."""
        leaf = self._leaf
        leaf.memory = compact(leaf.memory, kept)
        return leaf if self._targets is None else [leaf, self._targets.finish(keys, kept)]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and of the targets."""
        return self.rows.nbytes + (self._targets.nbytes if self._targets is not None else 0)


class CollateBatchBuilder:
    """A batch made by the user's ``collate_fn``. Its tensors are moved to the slot where a device copies from it."""

    def __init__(self, samples: int, collate_fn: Collate, lease: BufferLease | None) -> None:
        self._samples: list[Any] = [MISSING] * samples
        self._collate_fn = collate_fn
        self._lease = lease
        self.nbytes = 0

    def put(self, position: int, sample: Any) -> None:
        """Keep one sample for ``collate_fn``."""
        self._samples[position] = sample

    def finish(self, keys: Sequence[str], kept: Kept = None) -> Any:
        """What ``collate_fn`` returns."""
        samples, self._samples = pick(self._samples, kept), []
        try:
            batch = self._collate_fn(samples)
        except BaseException as error:  # the user's function may raise anything; it is chained and named
            raise CollateError(
                f"collate_fn raised {type(error).__name__}: {error} (samples {_span(pick(keys, kept))})"
            ) from error
        if self._lease is not None:
            batch, self.nbytes = stage(batch, self._lease)
        else:
            self.nbytes = total_nbytes(batch)
        return batch


def _span(keys: Sequence[str]) -> str:
    return repr(keys[0]) if len(keys) == 1 else f"{keys[0]!r} to {keys[-1]!r}"
