"""The parts of a mixture of any sources: each is read, gathered and decoded as it is alone."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from aiofeed.common.parts import in_order
from aiofeed.kernel.core.errors import CollateError
from aiofeed.kernel.core.faces import BaseSource, BoundDecoder, bind_decoder
from aiofeed.kernel.core.formatting import kind_of
from aiofeed.kernel.core.pytree import map_leaves
from aiofeed.kernel.core.types import BatchPlan, Gathered, HostTensor, Row
from aiofeed.kernel.engine.fetch.collate import DefaultCollateBuilder, RowBatchBuilder
from aiofeed.kernel.runtime.buffers import BufferLease, array
from aiofeed.kernel.runtime.cancellation import caught
from aiofeed.kernel.runtime.tensors import as_array, as_tensor, is_plain, is_tensor
from aiofeed.kernel.runtime.time_limits import JobControl
from aiofeed.kernel.sources.dataset import has_getitems
from aiofeed.kernel.sources.dataset_slots import DatasetCalls, DatasetSlot


class Found(NamedTuple):
    """A sample of a mixture: the number of its part, the index in it, and what was read."""

    part: int
    at: int
    value: Any


class At(NamedTuple):
    """A sample at a place of what its part has gathered for a batch."""

    gathered: Gathered
    place: int


class Keys(Sequence[str]):
    """The keys of the samples at some places; each is made when it is asked for."""

    def __init__(self, keys: Sequence[str], places: Sequence[int]) -> None:
        self._keys, self._places = keys, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, at: Any) -> Any:
        return self._keys[self._places[at]]


class Part:
    """A source of a mixture.

    Args:
        name: The name of the source.
        source: The source.
        decode: Decodes what the source reads, or changes the samples that it has decoded; ``None``: nothing does.
        together: Whether its samples of a batch are gathered or collated by the source, and not decoded one by one.
    """

    def __init__(
        self, name: str, source: BaseSource, decode: Callable[..., Any] | None = None, *, together: bool = False
    ) -> None:
        self.name: str = name
        self.source: BaseSource = source
        self.decode: Callable[..., Any] | None = decode
        self.together: bool = together
        own = source.decoder if source.traits.decode == "none" else None
        self.decoders: list[BoundDecoder] = [bind_decoder(each) for each in (own, decode) if each is not None]
        self.takes_rng: bool = any(decoder.takes_rng for decoder in self.decoders)
        self.reads_now: bool = source.read_now is not None
        self._calls: DatasetCalls | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _part, (self.name, self.source, self.decode, self.together)

    def in_batches(self) -> Part:
        """Return the part with samples that are gathered together, if it can."""
        source, row = self.source, self._row
        if self.decode is None and (row is None or self._gathers_rows):
            found = source.in_batches()
            known = None not in (source.structure() or {"": None}).values()  # no sparse rows
            if self._gathers_rows or (source.traits.rows and found.collate is not None and known):
                return Part(self.name, found, together=True)
        return self

    @property
    def _row(self) -> Row | None:
        return self.decoders[-1].row if self.decoders else None

    @property
    def _gathers_rows(self) -> bool:
        many = [decoder.decode_many_into for decoder in self.decoders if not decoder.takes_seed]
        return self.source.traits.rows and self._row is not None and many != [None]

    # --- reading

    async def read(self, indices: Sequence[int], plan: BatchPlan | None, places: Sequence[int]) -> Sequence[Any]:
        """Return what is read of samples, or the error of each."""
        source = self.source
        if source.traits.items:
            return await self._call(indices)
        if plan is not None and source.read_planned is not None:
            return await source.read_planned(indices, plan, places)
        if source.read_many is not None:
            return await source.read_many(indices)
        singly = await asyncio.gather(*[caught(source.read(each)) for each in indices])
        return [sample if error is None else error for sample, error in singly]

    async def _call(self, indices: Sequence[int]) -> list[Any]:
        """Request the items of a ``Dataset`` in a thread, as soon as its ``threads=`` allow."""
        stop = threading.Event()
        try:
            return await asyncio.to_thread(self._items, indices, JobControl(stop))
        except asyncio.CancelledError:
            stop.set()
            raise

    def _items(self, indices: Sequence[int], control: JobControl) -> list[Any]:
        source: Any = self.source
        if self._calls is None:
            self._calls = DatasetCalls(source)
        found: list[Any] = []

        def request() -> None:
            if has_getitems(source.dataset):
                try:
                    found.extend(source.items(indices))
                    return
                except BaseException:  # noqa: BLE001 - the user's Dataset may raise anything; one by one, it gets a name
                    found.clear()
            for index in indices:
                if control.stop.is_set():
                    return
                try:
                    found.extend(source.items([index]))
                except BaseException as error:  # noqa: BLE001 - as above: it becomes the value of this sample
                    found.append(error)

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
        sample = value if is_tensor(value) else map_leaves(_tensor, value)
        return sample if target is None else (sample, target(found.at))

    def batch(self, found: Sequence[Found], keys: Sequence[str], lease: BufferLease) -> Any:
        """Return a batch of samples that are gathered together."""
        values: Any = [each.value for each in found]
        if type(values[0]) is At:
            # With in_order="samples" those of several chunks come together.
            every = {id(value.gathered): value.gathered for value in values}
            gathered = values[0].gathered
            if len(every) == 1 and [value.place for value in values] == list(range(len(gathered))):
                values = gathered
            else:
                samples = {number: list(each) for number, each in every.items()}
                values = [samples[id(value.gathered)][value.place] for value in values]
        if self._row is not None:
            builder = RowBatchBuilder(self._row, len(found), lease, targets=False)
            self.decoders[-1].decode_many_into(values, builder.rows, None)  # type: ignore[misc]
            batch = builder.finish(keys)
        elif isinstance(values, Gathered):
            batch, _ = values.batch(lease)
        else:
            assert self.source.collate is not None
            batch = self.source.collate(values)
        if (target := self.source.target) is None:
            return batch
        return [batch, collated([target(each.at) for each in found], keys, lease)]

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


def _part(name: str, source: BaseSource, decode: Any, together: bool) -> Part:
    return Part(name, source, decode, together=together)


def _tensor(leaf: Any) -> Any:
    """Return an array or a number as a tensor, of the dtype that ``default_collate`` gives it; others as they are."""
    if isinstance(leaf, int | float | np.generic):
        leaf = np.asarray(leaf)
    if type(leaf) is np.ndarray and is_plain(leaf.dtype):
        return as_tensor(HostTensor(leaf if leaf.flags.writeable else leaf.copy()))
    return leaf


def collated(samples: Sequence[Any], keys: Sequence[str], lease: BufferLease) -> Any:
    """Return the batch of samples by the rules of ``default_collate``."""
    builder = DefaultCollateBuilder(len(samples), lease, may_keep=True)
    for position, sample in enumerate(samples):
        builder.put(position, sample)
    return builder.finish(keys)


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


def merged(batches: Sequence[Any], places: Sequence[Sequence[int]], lease: BufferLease) -> Any:
    """Return one batch of the batches of several parts, which fit together and whose samples have these places."""
    first = batches[0]
    if isinstance(first, Mapping):
        return {name: merged([batch[name] for batch in batches], places, lease) for name in first}
    if isinstance(first, list | tuple) and _kind(first) != "texts":
        return [merged(each, places, lease) for each in zip(*batches, strict=True)]
    count = sum(map(len, places))
    if isinstance(first, list | tuple):
        return type(first)(in_order(count, zip(places, batches, strict=True)))
    arrays = [as_array(as_tensor(batch) if type(batch) is HostTensor else batch) for batch in batches]
    (memory, torch_dtype), kinds = arrays[0], {(each.dtype, name) for each, name in arrays if each is not None}
    if len(kinds) > 1 or memory is None:
        import torch

        tensors = [as_tensor(batch) if type(batch) is HostTensor else batch for batch in batches]
        dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])  # as torch.stack does
        found = torch.empty((count, *tensors[0].shape[1:]), dtype=dtype)
        for tensor, at in zip(tensors, places, strict=True):
            found[torch.as_tensor(at)] = tensor.to(dtype)
        return found
    out = array(lease, (count, *memory.shape[1:]), memory.dtype)
    for (part, _), at in zip(arrays, places, strict=True):
        out[np.asarray(at)] = part
    return HostTensor(out, torch_dtype=torch_dtype, pinned=lease.pinned)


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


def check_forms(forms: Sequence[tuple[str, Any, int]], keys: Sequence[str]) -> None:
    """Raise ``CollateError`` if samples of two parts differ; each is given as part, form and the place of a sample."""
    one = forms[0]
    for other in forms:
        if not may_fit(one[1], other[1]):
            raise CollateError(
                f"the samples of a batch do not fit together: those of {one[0]!r} are {text_of(one[1])}, those of "
                f"{other[0]!r} {text_of(other[1])} ({keys[one[2]]!r} and {keys[other[2]]!r}); make them alike with "
                f"Mixture(decode={{...}}), or pass collate_fn="
            )
