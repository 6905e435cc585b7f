"""In-memory data: tensors and arrays with one sample per row."""

from __future__ import annotations

import copy
import hashlib
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from aiofeed.common.mapped import MappedFiles, file_of
from aiofeed.kernel.core.faces import BaseSource, Exclusion
from aiofeed.kernel.core.formatting import kind_of
from aiofeed.kernel.core.types import Traits, public
from aiofeed.kernel.core.validation import check_bool
from aiofeed.kernel.runtime.tensors import is_plain, tensor_row_bytes
from aiofeed.kernel.sources.dataset import FromDataset
from aiofeed.kernel.sources.subset import IndexedSource, part_fingerprint

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# Enough to distinguish datasets, and hashed in a few milliseconds.
FINGERPRINT_ROWS = 1024
FINGERPRINT_BYTES = 1 << 20
_IN_MEMORY = "batches are views of the data in memory, and not collated from samples"


@public
class Tensors(IndexedSource):
    """Tensors or arrays of the same length; sample ``i`` is row ``i`` of each. They are referenced, not copied.

    Example:
        ```python
        import torch

        import aiofeed

        data = aiofeed.Tensors(torch.rand(1000, 8), torch.arange(1000))
        for x, y in aiofeed.Feeder(data, batch_size=100, shuffle=True, device="auto"):
            print(x.shape, y.device)
        ```

    A batch is a list of as many tensors with the same dtypes; ``Tensors(x)`` gives ``[x]``. Each rank copies all data
    to its device once. Batches are views of a buffer into which rows are permuted, in device or host memory. Do not
    change the data while they are fed.

    Args:
        tensors: Host tensors, device tensors or numpy arrays of numbers, each [N, ...].
        alias: Make unshuffled batches views of the data, if there is one rank. Writing into a batch then changes the
            data.

    Raises:
        TypeError: No tensors, an argument that is no dense tensor or array of numbers, or a tensor that requires grad.
        ValueError: A tensor without dimensions, or different lengths; with ``alias=True``, an array that is read-only
            or not contiguous.
    """

    traits: Traits = Traits(decode="none", in_memory=True)
    rows: NDArray[np.int64] | None = None
    # fmt: off
    excluded: ClassVar[Sequence[Exclusion]] = (
        (("batch_sampler=", "a plan"), ("Tensors on a device",), ValueError,
         f"{_IN_MEMORY}: pass torch.utils.data.TensorDataset(...) as the source"),
        (("collate_fn=",), ("Tensors on a device",), TypeError,
         f"{_IN_MEMORY}: pass transform=, which gets each batch, or torch.utils.data.TensorDataset(...) as the source"),
        (("cache=",), ("Tensors",), TypeError, "the data are in memory already: leave it out"),
        (("a list of devices",), ("Tensors on a device",), ValueError,
         "the data are on one device: create one feeder for each device, with shard=(rank, world_size)"),
        (("static_batches=True",), ("Tensors on a device",), ValueError,
         "batches are views, which need no copy: use copy_ to copy them into tensors of your own if addresses must not "
         "change"),
        (('engine="process"',), ("Tensors on a device",), ValueError, "the data are decoded already: leave it out"),
    )
    # fmt: on
    """The rows that are samples; ``None``: all."""

    def __init__(self, *tensors: torch.Tensor | NDArray[Any], alias: bool = False) -> None:
        if not tensors:
            raise TypeError("Tensors needs at least one tensor or array: Tensors(x, y)")
        check_bool("Tensors(alias=...)", alias)
        for number, tensor in enumerate(tensors):
            _check(tensor, f"argument {number} of Tensors", alias)
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) > 1:
            raise ValueError(f"the tensors of Tensors differ in length: {lengths}")
        self.tensors = tensors
        self.mapped: MappedFiles = MappedFiles([([file for each in tensors for file in file_of(each)], lengths[0])])
        self.alias = alias
        self.on_host: bool = all(isinstance(each, np.ndarray) or each.device.type == "cpu" for each in tensors)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.tensors[0] if self.rows is None else self.rows)

    def __repr__(self) -> str:
        found = ", ".join(f"{_name(tensor)} {list(tensor.shape)}" for tensor in self.tensors)
        return f"Tensors({found}{', alias=True' if self.alias else ''})"

    def key(self, index: int, /) -> str:
        """Return the index, because rows have no names."""
        return f"Tensors[{self.named(index)}]"

    def named(self, index: int, /) -> int:
        """Return the row of the tensors."""
        return index if self.rows is None else int(self.rows[index])

    def _part(self, rows: NDArray[np.int64]) -> Self:
        part = copy.copy(self)
        part.rows = rows if self.rows is None else self.rows[rows]
        return part

    def fingerprint(self) -> str:
        """Return a digest of dtypes, shapes and up to 1,024 evenly spaced rows, at most 1 MiB of each tensor."""
        digest = hashlib.sha256()
        for tensor in self.tensors:
            digest.update(f"{_name(tensor)} {list(tensor.shape)};".encode())
            count = min(len(tensor), FINGERPRINT_ROWS, max(FINGERPRINT_BYTES // max(tensor_row_bytes(tensor), 1), 1))
            for number in range(count):
                digest.update(_row(tensor, number * len(tensor) // count))
        found = digest.hexdigest()[:32]
        return found if self.rows is None else part_fingerprint(found, self.rows)

    def facts(self, arguments: Any) -> Mapping[str, str]:
        """Return that the data are in memory, and whether on a device."""
        names = ["Tensors"] if self.on_host else ["Tensors", "Tensors on a device"]
        return dict.fromkeys(names, repr(self))

    def as_samples(self) -> BaseSource:
        """Return rows in host memory as samples, for options that need samples; batches and states are the same."""
        if not self.on_host:
            return self
        import torch
        import torch.utils.data

        dataset: Any = torch.utils.data.TensorDataset(*map(torch.as_tensor, self.tensors))
        if self.rows is not None:
            dataset = torch.utils.data.Subset(dataset, self.rows.tolist())
        return FromDataset(dataset, fingerprint=self.fingerprint())


def with_own_rows(source: Any) -> Any:
    """Return a part of ``Tensors`` as tensors of its own, without the other rows; other data as they are."""
    is_part = isinstance(source, Tensors) and source.rows is not None
    return Tensors(*[tensor[source.rows] for tensor in source.tensors]) if is_part else source


def tensors_of(dataset: Any) -> Tensors | None:
    """Return the data of a ``TensorDataset`` in host memory or of a ``Subset`` of one; ``None`` for any other dataset.

    Its samples must be exactly the rows of dense, contiguous tensors, so that batches do not differ.
    """
    data, rows = sys.modules.get("torch.utils.data"), None
    if data is None:
        return None
    while type(dataset) is data.Subset:
        length = len(dataset.dataset)
        try:
            picked = np.fromiter(map(operator.index, dataset.indices), np.int64, len(dataset.indices))
        except (TypeError, OverflowError):
            return None
        if picked.size and (picked.min() < -length or picked.max() >= length):
            return None
        picked %= max(length, 1)
        dataset, rows = dataset.dataset, picked if rows is None else picked[rows]
    if type(dataset) is not data.TensorDataset or not all(map(_is_plain, dataset.tensors)):
        return None
    found = Tensors(*dataset.tensors)
    found.rows = rows
    return found


def _is_plain(tensor: Any) -> bool:
    import torch

    return (
        type(tensor) is torch.Tensor
        and (tensor.device.type, tensor.layout) == ("cpu", torch.strided)
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
    )


def _check(tensor: Any, what: str, alias: bool) -> None:
    if isinstance(tensor, np.ndarray):
        if type(tensor) not in (np.ndarray, np.memmap) or not is_plain(tensor.dtype.newbyteorder("=")):
            raise TypeError(f"{what} is {kind_of(tensor)} of {tensor.dtype}, which torch cannot convert")
        if not tensor.dtype.isnative:
            raise TypeError(f"{what} is not in native byte order ({tensor.dtype.str}): convert it with .astype")
        if alias and not tensor.flags.writeable:
            raise ValueError(f"{what} is read-only, but with alias=True its batches would be writable")
    elif hasattr(tensor, "__torch_function__") and hasattr(tensor, "layout"):
        import torch

        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise TypeError(f"{what} has the layout {tensor.layout}, but must be dense: pass .to_dense()")
        if tensor.requires_grad:
            raise TypeError(f"{what} requires grad: pass .detach()")
    else:
        raise TypeError(
            f"{what} must be a tensor or a numpy array, got {type(tensor).__name__}; torch.tensor makes one, "
            f"aiofeed.Table(frame) takes a frame, and Tensors(*tensors.values()) the values of a dict"
        )
    if tensor.ndim == 0:
        raise ValueError(f"{what} has no dimensions, so it has no rows")
    contiguous = tensor.flags.c_contiguous if isinstance(tensor, np.ndarray) else tensor.is_contiguous()
    if alias and not contiguous:
        raise ValueError(f"{what} is not contiguous, so batches cannot be views of it: pass .contiguous()")


def _name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _row(tensor: Any, index: int) -> bytes:
    if isinstance(tensor, np.ndarray):
        return tensor[index : index + 1].tobytes()
    import torch

    row = tensor[index : index + 1].cpu().resolve_conj().resolve_neg()
    # A single number is contiguous with any stride, but a view as bytes needs a stride of 1.
    row = row.clone(memory_format=torch.contiguous_format)
    return bytes(row.view(torch.uint8).numpy().tobytes())
