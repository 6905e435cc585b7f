"""The parts of a mixture of any sources: each is read, gathered and decoded as it is alone."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aiofeed.common.parts import in_order
from aiofeed.kernel.core.errors import CollateError
from aiofeed.kernel.core.faces import BaseSource, BoundDecoder, bind_decoder
from aiofeed.kernel.core.formatting import kind_of
from aiofeed.kernel.core.pytree import leaves, map_leaves
from aiofeed.kernel.core.types import BatchPlan, Gathered, HostTensor, Row
from aiofeed.kernel.engine.fetch.collate import RowBatchBuilder
from aiofeed.kernel.runtime.buffers import BufferLease, HostBufferPool, array
from aiofeed.kernel.runtime.cancellation import caught
from aiofeed.kernel.runtime.tensors import as_array, as_tensor, is_plain, is_tensor, tensor_of
from aiofeed.kernel.runtime.time_limits import JobControl
from aiofeed.kernel.sources.dataset import has_getitems
from aiofeed.kernel.sources.dataset_slots import DatasetCalls, DatasetSlot

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Found(NamedTuple):
    """A sample of a mixture: the number of its part, the index in it, and what was read."""

    part: int
    at: int
    value: Any


@dataclass(eq=False)
class Group:
    """The samples of a batch that are of one part.

    Args:
        number: The number of the part.
        places: Their places in the batch, int64, ascending.
        local: Their indices in the part, int64.
        plan: The plan of the batch; ``None``: unknown.
        values: What was read of them, or the error of each.
    """

    number: int
    places: NDArray[np.int64]
    local: NDArray[np.int64]
    plan: BatchPlan | None = None
    values: Any = ()


class Rows(Gathered):
    """Samples that a source gathers from memory."""

    def __init__(self, source: Any, local: NDArray[np.int64]) -> None:
        super().__init__(len(local))
        self._source, self._local = source, local
        self._rows = source.gathered(local, HostBufferPool(0))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._source.read_now(self._local.tolist()))

    def batch(self, lease: BufferLease) -> tuple[Any, int]:
        """Return the batch."""
        rows = list(map(tensor_of, self._rows))
        return rows if self._source.form_batch is None else self._source.form_batch(rows), 0


class Part:
    """A source of a mixture.

    Args:
        name: The name of the source.
        source: The source.
        decode: Decodes what the source reads, or changes the samples that it has decoded; ``None``: nothing does.
        together: Whether its samples of a batch are gathered or collated by the source, and not decoded one by one.
    """

    def __init__(
        self, name: str, source: BaseSource, decode: Callable[..., Any] | None = None, together: bool = False
    ) -> None:
        self.name: str = name
        self.source: Any = source
        self.decode: Callable[..., Any] | None = decode
        self.together: bool = together
        own = source.decoder if source.traits.decode == "none" else None
        self.decoders: list[BoundDecoder] = [bind_decoder(each) for each in (own, decode) if each is not None]
        self.takes_rng: bool = any(decoder.takes_rng for decoder in self.decoders)
        self._calls: DatasetCalls | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Part, (self.name, self.source, self.decode, self.together)

    def in_batches(self) -> Part:
        """Return the part with samples that are gathered together, if it can."""
        source, row = self.source, self._row
        if self.decode is None and (row is None or self._gathers_rows):
            found = source.in_batches()
            known = None not in (source.structure() or {"": None}).values()  # no sparse rows
            gathers = self._gathers_rows or (source.traits.rows and found.collate is not None and known)
            if gathers and found.target is None:
                return Part(self.name, found, together=True)
        return self

    @property
    def _row(self) -> Row | None:
        return self.decoders[-1].row if self.decoders else None

    @property
    def _gathers_rows(self) -> bool:
        many = [decoder.decode_many_into for decoder in self.decoders if not decoder.takes_seed]
        return self.source.traits.rows and self._row is not None and many != [None]

    @property
    def _gathers_now(self) -> bool:
        source = self.source
        return self.together and source.gathered is not None and source.answers_at_once and not source.read_planned

    @property
    def in_memory(self) -> bool:
        """Whether batches are gathered from memory, as rows of tensors."""
        if not self.together or self.source.gathered is None or not self.source.in_memory:
            return False
        if not self._gathers_now:  # a table that will be read
            return True
        try:
            batch, _ = Rows(self.source, np.zeros(1, np.int64)).batch(HostBufferPool(0))
        except OSError:  # the loop names the sample
            return False
        return all(is_tensor(leaf) and len(leaf) == 1 for leaf in leaves(batch))

    # --- reading

    async def read(self, group: Group, places: Sequence[int]) -> Sequence[Any]:
        """Return what is read of samples, which are at ``places`` of their batch, or the error of each."""
        source, indices = self.source, group.local.tolist()
        if self._gathers_now:
            return await asyncio.to_thread(self.read_now, group.local)
        if source.traits.items:
            return await self._call(indices)
        if group.plan is not None and source.read_planned is not None:
            return await source.read_planned(indices, group.plan, places)  # type: ignore[no-any-return]
        if source.read_many is not None:
            return await source.read_many(indices)  # type: ignore[no-any-return]
        singly = await asyncio.gather(*[caught(source.read(each)) for each in indices])
        return [sample if error is None else error for sample, error in singly]

    def read_now(self, local: NDArray[np.int64]) -> Sequence[Any]:
        """Read samples in the calling thread."""
        return Rows(self.source, local) if self._gathers_now else self.source.read_now(local.tolist())

    async def gather(self, shards: Mapping[int, Sequence[tuple[Group, NDArray[np.int64]]]], run: Any) -> None:
        """Read samples of shards ahead, or all of a batch: for each shard groups, and places in these."""
        source, [(first, _), *_] = self.source, next(iter(shards.values()))
        gathers = isinstance(first.values, Gathered)
        if gathers and source.gather_several is not None:
            await source.gather_several({shard: _targets(each) for shard, each in shards.items()}, run)
            return
        for shard, each in shards.items():
            local, (group, _) = np.concatenate([group.local[at] for group, at in each]), each[0]
            if gathers:
                await source.gather_ahead(local, _targets(each), run, shard)
            elif source.looks_ahead:
                values = iter(await self.read(Group(group.number, local, local), ()))
                for group, at in each:
                    for place in at.tolist():
                        group.values[place] = next(values)
            else:
                group.values = await self.read(group, group.places.tolist())

    async def _call(self, indices: Sequence[int]) -> list[Any]:
        """Request the items of a ``Dataset`` in a thread, as soon as its ``threads=`` allow."""
        stop = threading.Event()
        try:
            return await asyncio.to_thread(self._items, indices, JobControl(stop))
        except asyncio.CancelledError:
            stop.set()
            raise

    def _items(self, indices: Sequence[int], control: JobControl) -> list[Any]:
        source, found = self.source, list[Any]()
        self._calls = self._calls or DatasetCalls(source)

        def request() -> None:
            # Together, if it can do that; then one by one, so that an error becomes the value of its sample.
            for some in [*([indices] if has_getitems(source.dataset) else ()), *([each] for each in indices)]:
                if control.stop.is_set() or len(found) == len(indices):
                    return
                try:
                    found.extend(source.items(some))
                except BaseException as error:  # noqa: BLE001 - the user's Dataset may raise anything
                    found.extend([error] * (len(some) == 1))

        with DatasetSlot(self._calls, indices[0], control) as slot:
            slot.call(request)
        return found

    # --- samples and batches

    def sample(self, found: Found, rng: Any) -> Any:
        """Return a decoded sample, with its target."""
        value, target = found.value, self.source.target
        for decoder in self.decoders:
            options = {"rng": rng} if decoder.takes_rng else {}
            if decoder.takes_target and target is not None:
                options["target"], target = target(found.at), None
            value = decoder.call(value, **options)
        sample = value if is_tensor(value) else map_leaves(_tensor, value, _is_numbers)
        return sample if target is None else (sample, target(found.at))

    def batch(self, values: Sequence[Any], lease: BufferLease) -> Any:
        """Return a batch of samples that are gathered together."""
        if isinstance(values, Gathered) and (type(values) is Rows or not self._gathers_rows):
            return values.batch(lease)[0]
        if not self._gathers_rows:
            return self.source.collate(list(values))
        assert self._row is not None
        builder = RowBatchBuilder(self._row, len(values), lease, targets=False)
        self.decoders[-1].decode_many_into(values, builder.rows, None)  # type: ignore[misc]
        return builder.finish(())

    def described(self) -> Any:
        """Return what is known of its samples: a dict, a list of parts or a leaf; ``None``: only decoding tells."""
        row, shapes = self._row, self.source.structure() if self.decode is None else None
        found: Any = None
        if row is not None:
            axes = row.axes or range(len(row.shape))
            shape = tuple(row.shape[axis] for axis in axes)
            found = [Leaf(row.dtype, shape[1:])] * shape[0] if row.parts else Leaf(row.dtype, shape)
        elif shapes:
            leaves = {name: Leaf(None, shape) for name, shape in shapes.items()}
            found = list(leaves.values()) if all(type(name) is int for name in leaves) else leaves
        takes = any(decoder.takes_target for decoder in self.decoders)
        return found if self.source.target is None or takes else [found, None]


def _targets(groups: Sequence[tuple[Group, Any]]) -> list[tuple[Any, Any]]:
    return [(group.values, at) for group, at in groups]


def _is_numbers(value: Any) -> bool:
    """Return whether a value is a list of numbers, such as tokens, which stays one for ``Pack`` and ``collate_fn=``."""
    return type(value) is list and {*map(type, value)} <= {int, float}


def _tensor(leaf: Any) -> Any:
    """Return an array or a number as a tensor, of the dtype that ``default_collate`` gives it; others as they are."""
    if isinstance(leaf, int | float | np.generic):
        leaf = np.asarray(leaf)
    if type(leaf) is np.ndarray and is_plain(leaf.dtype):
        return as_tensor(HostTensor(leaf if leaf.flags.writeable else leaf.copy()))
    return leaf


# --- what fits together


class Leaf(NamedTuple):
    """An array of a sample: the name of its dtype and its shape, as far as they are known."""

    dtype: str | None
    shape: Sequence[int] | None

    def __str__(self) -> str:
        return f"{self.dtype or 'numbers'} {'' if self.shape is None else list(self.shape)}".rstrip()


def text_of(described: Any) -> str:
    """Return what is known of samples, for messages."""
    if isinstance(described, dict):
        return f"{{{', '.join(f'{name!r}: {text_of(each)}' for name, each in described.items())}}}"
    if isinstance(described, list):
        return f"({', '.join(map(text_of, described))}{',' * (len(described) == 1)})"
    return "..." if described is None else str(described)


def may_fit(one: Any, other: Any) -> bool:
    """Return whether samples may fit into one batch, by what is known of them."""
    if one is None or other is None:
        return True
    if isinstance(one, Leaf) and isinstance(other, Leaf):
        return one.shape is None or other.shape is None or tuple(one.shape) == tuple(other.shape)
    if isinstance(one, Leaf | str) or isinstance(other, Leaf | str):
        return bool(one == other)
    if type(one) is not type(other) or len(one) != len(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(may_fit(one[name], other[name]) for name in one)
    return all(map(may_fit, one, other))


def array_of(leaf: Any) -> Any:
    """Return the array of a leaf of a batch; ``None`` if it has none, or numpy lacks its dtype."""
    if type(leaf) is HostTensor:
        return leaf.memory if leaf.axes is None and leaf.torch_dtype is None else None
    found, torch_dtype = as_array(leaf)
    return found if torch_dtype is None else None


def merged(batches: Sequence[Any], places: Sequence[Any], lease: BufferLease) -> Any:
    """Return one batch of the batches of several parts, which fit together and whose samples have these places."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Mapping):
        return {name: merged([batch[name] for batch in batches], places, lease) for name in first}
    if isinstance(first, list | tuple) and _kind(first) != "texts":
        return [merged(each, places, lease) for each in zip(*batches, strict=True)]
    count = sum(map(len, places))
    if isinstance(first, list | tuple):
        return type(first)(in_order(count, zip(places, batches, strict=True)))
    arrays = list(map(array_of, batches))
    if len({None if each is None else each.dtype for each in arrays}) == 1 and arrays[0] is not None:
        out = array(lease, (count, *arrays[0].shape[1:]), arrays[0].dtype)
        for part, at in zip(arrays, places, strict=True):
            out[at] = part
        return HostTensor(out, pinned=lease.pinned)
    import torch

    tensors = [as_tensor(batch) if type(batch) is HostTensor else batch for batch in batches]
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])  # as torch.stack does
    found = torch.empty((count, *tensors[0].shape[1:]), dtype=dtype)
    for tensor, at in zip(tensors, places, strict=True):
        found[torch.as_tensor(at)] = tensor.to(dtype)
    return found


def _kind(batch: Any) -> Any:
    """Return what batches must have in common; the texts of a batch are a list or a tuple."""
    if isinstance(batch, Mapping):
        return {*batch}
    if isinstance(batch, list | tuple):
        return "texts" if batch and isinstance(batch[0], str | bytes) else len(batch)
    return "array"


def form_of(sample: Any, axes: int = 0) -> Any:
    """Return what a sample is, as ``described``, or what those of a batch are, with ``axes=1``."""
    if isinstance(sample, Mapping):
        return {name: form_of(each, axes) for name, each in sample.items()}
    if isinstance(sample, list | tuple):
        return "text" if axes and _kind(sample) == "texts" else [form_of(each, axes) for each in sample]
    found = as_tensor(sample) if type(sample) is HostTensor else sample
    if is_tensor(found):
        return Leaf(str(found.dtype).removeprefix("torch."), tuple(found.shape[axes:]))
    if isinstance(found, int | float | np.generic | np.ndarray):
        found = np.asarray(found)
        return Leaf(found.dtype.name, found.shape[axes:])
    return "text" if isinstance(found, str | bytes) else kind_of(found)


def check_forms(forms: Sequence[tuple[str, Any, int]], key: Callable[[int], str]) -> None:
    """Raise ``CollateError`` if samples of two parts differ; each is given as part, form and the index of a sample."""
    (name, form, index), *others = forms
    for other, found, at in others:
        if not may_fit(form, found):
            raise CollateError(
                f"the samples of a batch do not fit together: those of {name!r} are {text_of(form)}, those of "
                f"{other!r} {text_of(found)} ({key(index)!r} and {key(at)!r}); make them alike with "
                f"Mixture(decode={{...}}), or pass collate_fn="
            )
