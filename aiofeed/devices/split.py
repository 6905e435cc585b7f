"""A batch in parts, one per device: tensors by ``tensor_split`` along dimension 0, and the rest alongside."""

from __future__ import annotations

from functools import partial
from typing import Any

from aiofeed.core.pytree import is_namedtuple, leaves, like_list, map_leaves
from aiofeed.core.types import HostTensor


def split(batch: Any, parts: int) -> list[Any]:
    """The parts of a batch, each of the batch's structure; views, nothing is copied.

    The number of samples N is that of the first tensor along dimension 0. Tensors, arrays of N rows, and lists and
    tuples of length N without tensors (texts, keys) are cut alike: the first ``N % parts`` parts get one sample more,
    as ``torch.tensor_split`` does it, and with fewer samples than parts the last ones are empty. What has no
    samples, tensors without dimensions among it, is in each part. Lists that hold lists of length N are cut within.

    Args:
        batch: nested; ``HostTensor`` and tensors.
        parts: how many.

    Raises:
        ValueError: tensors differ along dimension 0.
    """
    samples = _samples(batch)
    if samples is None:
        return [batch] * parts
    is_rows = partial(_is_rows, samples=samples)
    each, larger = divmod(samples, parts)
    found, start = [], 0
    for number in range(parts):
        stop = start + each + (number < larger)
        found.append(map_leaves(partial(_cut, samples=samples, start=start, stop=stop), batch, is_rows))
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
                f"over several devices the tensors of a batch are cut along dimension 0, so each needs as many rows as "
                f"the first, which has {samples}; found shape {list(shape)}. Give what belongs to all samples to "
                f"transform=, and pad or stack what differs from sample to sample"
            )
    return samples


def _shape(leaf: Any) -> tuple[int, ...]:
    """The user's shape of what becomes a tensor; empty for everything else."""
    if type(leaf) is HostTensor:
        shape = leaf.memory.shape
        return shape if leaf.axes is None else tuple(shape[axis] for axis in leaf.axes)
    return tuple(leaf.shape) if _is_tensor(leaf) else ()


def _is_tensor(leaf: Any) -> bool:
    return hasattr(leaf, "__torch_function__") and hasattr(leaf, "tensor_split") and not isinstance(leaf, type)


def _is_rows(tree: Any, samples: int) -> bool:
    """Whether a list or tuple has one entry per sample."""
    if not isinstance(tree, list | tuple) or is_namedtuple(tree) or len(tree) != samples:
        return False
    if tree and all(isinstance(item, list | tuple) and len(item) == samples for item in tree):
        return False
    return not any(type(leaf) is HostTensor or _is_tensor(leaf) for leaf in leaves(tree))


def _cut(leaf: Any, samples: int, start: int, stop: int) -> Any:
    if type(leaf) is HostTensor:
        if leaf.memory.ndim == 0:
            return leaf
        axis = 0 if leaf.axes is None else leaf.axes[0]
        rows = leaf.memory[(slice(None),) * axis + (slice(start, stop),)]
        return HostTensor(rows, leaf.axes, leaf.torch_dtype, leaf.pinned)
    if _is_tensor(leaf):
        return leaf.narrow(0, start, stop - start) if leaf.ndim else leaf
    if isinstance(leaf, list):
        return like_list(leaf, leaf[start:stop])
    if isinstance(leaf, tuple):
        return leaf[start:stop]
    rows_of = getattr(leaf, "shape", None)
    return leaf[start:stop] if isinstance(rows_of, tuple) and rows_of[:1] == (samples,) else leaf
