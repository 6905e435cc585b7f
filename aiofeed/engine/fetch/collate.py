"""Builders of batches: rows that a decoder fills, the rules of ``default_collate``, or the user's ``collate_fn``.

Decode threads fill different rows of one builder at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from aiofeed.core.errors import CollateError
from aiofeed.core.pytree import total_nbytes
from aiofeed.core.types import Collate, HostTensor, Row
from aiofeed.engine.fetch.default_collate import MISSING, DefaultCollateBuilder, Positions, compact, pick
from aiofeed.runtime.buffers import BufferLease, array
from aiofeed.runtime.tensors import stage

if TYPE_CHECKING:
    from numpy.typing import NDArray


class BatchBuilder(Protocol):
    """Collects the samples of a batch: ``put`` from any thread, ``finish`` once after all samples."""

    encode: Callable[[Any], Any] | None
    """What ``finish`` applies to the batch; a worker process encodes it for the trainer."""

    def put(self, position: int, sample: Any) -> None:
        """Store one sample; of a sample whose row is filled already, its target."""
        ...

    def finish(self, keys: Sequence[str], positions: Positions = None) -> Any:
        """The batch of the samples at ``positions``; ``None``: of all.

        Raises:
            CollateError: The samples do not fit together; the message names some of ``keys``.
        """
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the batch's memory."""
        ...


class RowBatchBuilder:
    """Builder of a batch whose samples fill rows: ``rows[position]`` is the memory of a sample.

    ``targets``: whether samples have targets; ``torch_dtype``: name of their dtype, if numpy lacks it.
    """

    encode: Callable[[Any], Any] | None = None

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

    def arrays(self, position: int) -> list[NDArray[Any]]:
        """The memory of a sample."""
        return [self.rows[position, ...]]

    def put(self, position: int, sample: Any) -> None:
        """Store a sample's target; its row is filled already."""
        if self._targets is not None:
            self._targets.put(position, sample)

    def finish(self, keys: Sequence[str], positions: Positions = None) -> Any:
        """The rows, or the list of rows and targets."""
        leaf = self._leaf
        if positions is not None:
            leaf.memory = compact(leaf.memory, positions)
        batch = leaf if self._targets is None else [leaf, self._targets.finish(keys, positions)]
        return batch if self.encode is None else self.encode(batch)

    @property
    def nbytes(self) -> int:
        """Bytes of the batch's memory."""
        return self.rows.nbytes + (self._targets.nbytes if self._targets is not None else 0)


class CollateBatchBuilder:
    """Builder of a batch by the user's ``collate_fn``, whose tensors are copied into memory of the lease, if given."""

    encode: Callable[[Any], Any] | None = None

    def __init__(self, samples: int, collate_fn: Collate, lease: BufferLease | None) -> None:
        self._samples: list[Any] = [MISSING] * samples
        self._collate_fn = collate_fn
        self._lease = lease
        self.nbytes = 0

    def put(self, position: int, sample: Any) -> None:
        """Store one sample for ``collate_fn``."""
        self._samples[position] = sample

    def finish(self, keys: Sequence[str], positions: Positions = None) -> Any:
        """What ``collate_fn`` returns."""
        samples, self._samples = pick(self._samples, positions), []
        try:
            batch = self._collate_fn(samples)
        except BaseException as error:  # the user's function may raise anything; it is chained and named
            raise CollateError(
                f"collate_fn raised {type(error).__name__}: {error} (samples {_span(pick(keys, positions))})"
            ) from error
        if self._lease is not None:
            batch, self.nbytes = stage(batch, self._lease)
        else:
            self.nbytes = total_nbytes(batch)
        return batch if self.encode is None else self.encode(batch)


def _span(keys: Sequence[str]) -> str:
    return repr(keys[0]) if len(keys) == 1 else f"{keys[0]!r} to {keys[-1]!r}"
