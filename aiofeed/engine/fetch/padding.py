"""``pad_collate``: a ``collate_fn`` for samples of different lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from aiofeed.core.types import public
from aiofeed.core.validation import check_positive_int

if TYPE_CHECKING:
    import torch

MASK = "attention_mask"


@public
def pad_collate(
    value: float | Mapping[str, float] | Sequence[float] = 0,
    *,
    side: Literal["right", "left"] = "right",
    multiple_of: int | None = None,
) -> PadCollate:
    """Return a ``collate_fn`` that pads the sequences of a batch to one length and adds an attention mask.

    The length of a sample is the size of dimension 0 of its first tensor or array. All its tensors and arrays of that
    length are padded along dimension 0 and stacked to [N, T, ...]; other parts are collated as by ``default_collate``.

    Args:
        value: The padding; for samples that are dicts, also a value per key (0 for keys without one); for tuples and
            lists, also a value per place.
        side: Where the padding goes.
        multiple_of: Pad to a multiple of this length, as tensor cores like it. Default: to the longest sample.

    Returns:
        A function, which can be pickled. A batch of dicts is a dict with the mask as ``"attention_mask"`` (unless
        samples have a part of that name, which is padded with 0); of tuples or lists, a list with the mask as its last
        item; of single tensors, a list of the tensor and the mask. The mask is int64 [N, T]: 1 for a token, 0 for
        padding.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range.
    """
    if side not in ("right", "left"):
        raise ValueError(f'pad_collate(side=) must be "right" or "left", got {side!r}')
    if multiple_of is not None:
        multiple_of = check_positive_int("pad_collate(multiple_of=)", multiple_of)
    return PadCollate(value, side == "left", multiple_of or 1)


@dataclass(frozen=True)
class PadCollate:
    """The function that ``pad_collate`` returns."""

    value: float | Mapping[str, float] | Sequence[float]
    left: bool
    multiple_of: int

    def __call__(self, samples: list[Any]) -> Any:
        """Collate samples of one kind: dicts, tuples, lists, tensors or arrays."""
        first = samples[0]
        if isinstance(first, Mapping):
            columns = {name: [sample[name] for sample in samples] for name in first}
            values = {name: self._value_of(name) for name in columns} | {MASK: 0.0}
            batch, mask = self._collate(columns, values)
            return batch if MASK in batch else {**batch, MASK: mask}
        if isinstance(first, tuple | list):
            columns = dict(enumerate(map(list, zip(*samples, strict=True))))
            batch, mask = self._collate(columns, {place: self._value_of(place) for place in columns})
            return [*batch.values(), mask]
        batch, mask = self._collate({0: samples}, {0: self._value_of(0)})
        return [batch[0], mask]

    def _value_of(self, name: Any) -> float:
        if isinstance(self.value, Mapping):
            return self.value.get(name, 0)
        if isinstance(self.value, Sequence):
            return float(self.value[name])
        return self.value

    def _collate(self, columns: dict[Any, list[Any]], values: dict[Any, float]) -> tuple[dict[Any, Any], torch.Tensor]:
        import torch
        from torch.utils.data import default_collate

        columns = {name: [_as_tensor(part) for part in parts] for name, parts in columns.items()}
        lengths = next((found for parts in columns.values() if (found := _lengths(parts)) is not None), None)
        if lengths is None:
            raise TypeError(
                "pad_collate needs samples with a tensor or array of at least one dimension: leave collate_fn= out for "
                "samples without one"
            )
        total = -(-max(lengths) // self.multiple_of) * self.multiple_of
        batch = {
            name: self._padded(parts, values[name], total) if _lengths(parts) == lengths else default_collate(parts)
            for name, parts in columns.items()
        }
        ones = [torch.ones(length, dtype=torch.int64) for length in lengths]
        return batch, self._padded(ones, 0, total)

    def _padded(self, parts: list[torch.Tensor], value: float, total: int) -> torch.Tensor:
        padded = parts[0].new_full((len(parts), total, *parts[0].shape[1:]), value)
        for row, part in zip(padded, parts, strict=True):
            start = total - len(part) if self.left else 0
            row[start : start + len(part)] = part
        return padded


def _as_tensor(part: Any) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(part) if isinstance(part, np.ndarray) and part.dtype.kind in "biufc" else part


def _lengths(parts: list[Any]) -> list[int] | None:
    """The sizes of dimension 0 of a column of tensors; ``None`` if it has other parts."""
    import torch

    if not all(isinstance(part, torch.Tensor) and part.ndim for part in parts):
        return None
    return [len(part) for part in parts]
