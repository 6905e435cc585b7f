"""Splits a batch into one part per device: tensors as ``torch.tensor_split`` does along dimension 0."""

from __future__ import annotations

from functools import partial
from typing import Any

from aiofeed.core.pytree import is_namedtuple, leaves, like_list, map_leaves
from aiofeed.core.types import HostTensor
from aiofeed.runtime.tensors import is_tensor


def split(batch: Any, parts: int) -> list[Any]:
    """Split a batch into parts of the same structure. The parts are views; nothing is copied.

    The number of samples N is the size of the first tensor along dimension 0. Tensors, arrays of N rows, and lists and
    tuples of length N without tensors (texts, keys) are split alike. As with ``torch.tensor_split``, the first
    ``N % parts`` parts get one sample more, and the last parts are empty if there are fewer samples than parts. Other
    leaves, including tensors without dimensions, are repeated in every part. In a list of lists of length N, the inner
    lists are split.

    Raises:
        ValueError: Tensors differ in size along dimension 0.
    """
    samples = _samples(batch)
    if samples is None:
        return [batch] * parts
    is_rows = partial(_is_rows, samples=samples)
    each, larger = divmod(samples, parts)
    found, start = [], 0
    for number in range(parts):
        stop = start + each + (number < larger)
        found.append(map_leaves(partial(_slice, samples=samples, start=start, stop=stop), batch, is_rows))
        start = stop
    return found


def _samples(batch: Any) -> int | None:
    samples = None
    for leaf in leaves(batch):
        shape = _shape(leaf)
        if not shape:
            continue
        if samples is None:
            samples = shape[0]
        elif shape[0] != samples:
            raise ValueError(
                f"for several devices the tensors of a batch are split along dimension 0 and must have equal sizes "
                f"there; the first has {samples} rows; found shape {list(shape)}. Create tensors that belong to the "
                f"whole batch in transform=, and pad or stack tensors that differ from sample to sample"
            )
    return samples


def _shape(leaf: Any) -> tuple[int, ...]:
    """Return the shape of a leaf that is or becomes a tensor, as the user sees it; empty for other leaves."""
    if type(leaf) is HostTensor:
        shape = leaf.memory.shape
        return shape if leaf.axes is None else tuple(shape[axis] for axis in leaf.axes)
    return tuple(leaf.shape) if is_tensor(leaf) else ()


def _is_rows(tree: Any, samples: int) -> bool:
    """Return whether a tree is a list or tuple with one entry per sample."""
    if not isinstance(tree, list | tuple) or is_namedtuple(tree) or len(tree) != samples:
        return False
    if tree and all(isinstance(item, list | tuple) and len(item) == samples for item in tree):
        return False
    return not any(type(leaf) is HostTensor or is_tensor(leaf) for leaf in leaves(tree))


def _slice(leaf: Any, samples: int, start: int, stop: int) -> Any:
    if type(leaf) is HostTensor:
        if leaf.memory.ndim == 0:
            return leaf
        axis = 0 if leaf.axes is None else leaf.axes[0]
        rows = leaf.memory[(slice(None),) * axis + (slice(start, stop),)]
        return HostTensor(rows, leaf.axes, leaf.torch_dtype, leaf.pinned)
    if is_tensor(leaf):
        return leaf.narrow(0, start, stop - start) if leaf.ndim else leaf
    if isinstance(leaf, list):
        return like_list(leaf, leaf[start:stop])
    if isinstance(leaf, tuple):
        return leaf[start:stop]
    shape = getattr(leaf, "shape", None)
    return leaf[start:stop] if isinstance(shape, tuple) and shape[:1] == (samples,) else leaf
