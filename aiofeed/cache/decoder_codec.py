"""Convert samples to the arrays that a cache stores, and back: the interface, and the codecs of decoders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.cache.layout import RECORDS, Layout, NotCacheableError, Parts, describe, unpack_record
from aiofeed.kernel.core.types import HostTensor, Row, RowDecoder, decodes_in_place, takes_rng, takes_target
from aiofeed.kernel.runtime.tensors import as_array, as_tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray


class SampleCodec(ABC):
    """Converts what a source gives to the arrays that are cached (parts), and these to a sample."""

    layout: Layout | None = None
    """Layout of a cached sample, if it is known before the first sample."""
    random = False
    """Whether random augmentation turns the cached arrays into the sample."""
    advice = "let the decoder return one array or tensor, of the same shape and dtype for every sample"
    """What to change if a sample cannot be cached; part of the error message."""

    def decode(self, value: Any) -> Any:
        """Return what ``encode`` takes, given encoded bytes or an item."""
        return value

    @abstractmethod
    def encode(self, decoded: Any, layout: Layout | None, out: Parts | None = None) -> tuple[Parts, Layout]:
        """Return the arrays to cache of a sample, and their layout.

        Args:
            decoded: What ``decode`` returns.
            layout: Layout of the cached samples; ``None`` before the first.
            out: The sample's memory in a batch; returned if the sample is decoded into it.

        Raises:
            NotCacheableError: The sample has another layout, or none.
        """

    @abstractmethod
    def sample(self, parts: Parts, layout: Layout, rng: Callable[[], Any]) -> Any:
        """Return the sample of cached arrays, in memory of its own; ``rng`` returns its ``torch.Generator``."""

    def sample_with_target(self, parts: Parts, layout: Layout, rng: Callable[[], Any], target: Any) -> Any:
        """Return the sample with its target."""
        return self.sample(parts, layout, rng), target

    def fill(self, parts: Parts, out: Parts, seed: int | None) -> None:
        """Write the sample into its memory in a batch."""
        for array, memory in zip(parts, out, strict=True):
            memory[...] = array

    def row(self, layout: Layout) -> Row:
        """Return the row of a batch that the first array of a sample fills."""
        return Row(layout.parts[0].shape, layout.parts[0].dtype)

    def batch(self, columns: list[Any], layout: Layout) -> Any:
        """Return the decoded part of a batch, given one tensor for each part."""
        return columns[0]


class RowCodec(SampleCodec):
    """Codec of a decoder that fills rows. It caches the row, or what ``augment_into`` takes."""

    def __init__(self, decoder: Any) -> None:
        self._decoder: Any = decoder
        self._row: Row = decoder.row
        cached: Row = getattr(decoder, "cached_row", decoder.row)
        self.layout: Layout = Layout(cached.shape, cached.dtype)
        self.random: bool = bool(decoder.takes_seed)
        self._decode_into: Callable[[Any, Any], None] = getattr(decoder, "decode_cached_into", decoder.decode_into)

    def encode(self, decoded: Any, layout: Layout | None, out: Parts | None = None) -> tuple[Parts, Layout]:
        """Decode into ``out`` if the row itself is cached, otherwise into new memory."""
        if out is not None and not self.random:
            self._decoder.decode_into(decoded, out[0], None)
            return out, self.layout
        array = np.empty(self.layout.shape, self.layout.dtype)
        self._decode_into(decoded, array)
        return [_read_only(array) if self.random else array], self.layout

    def sample(self, parts: Parts, layout: Layout, rng: Callable[[], Any]) -> Any:
        """Return the tensor that calling the decoder returns."""
        import torch

        # The same number that the decoder draws from a generator.
        seed = int(torch.randint(2**63 - 1, (), generator=rng(), device="cpu")) if self.random else None
        out = np.empty(self._row.shape, self._row.dtype)
        self.fill(parts, [out], seed)
        return as_tensor(HostTensor(out, self._row.axes))

    def fill(self, parts: Parts, out: Parts, seed: int | None) -> None:
        """Copy or augment."""
        if self.random:
            self._decoder.augment_into(parts[0], out[0], seed)
        else:
            out[0][...] = parts[0]

    def row(self, layout: Layout) -> Row:
        """Return the decoder's row."""
        return self._row


class ValueCodec(SampleCodec):
    """Codec of a decoder that returns one array or tensor.

    Args:
        decode: Returns what is cached, without random numbers.
        augment: Turns a cached array or tensor into the sample; ``None`` if it is the sample.
        takes_target: Whether ``augment`` has a keyword ``target``, and returns the sample with it.
    """

    def __init__(
        self, decode: Callable[[Any], Any], augment: Callable[..., Any] | None = None, *, takes_target: bool = False
    ) -> None:
        self._decode = decode
        self._augment = augment
        self._takes_target = takes_target
        self.random: bool = augment is not None

    def decode(self, value: Any) -> Any:
        """Return what the decoder returns."""
        return self._decode(value)

    def encode(self, decoded: Any, layout: Layout | None, out: Parts | None = None) -> tuple[Parts, Layout]:
        """Return the memory of a decoded array or tensor."""
        array, torch_dtype = as_array(decoded)
        if array is None:
            raise NotCacheableError(f"the decoder returned {describe(decoded)}, not one plain CPU tensor or array")
        if not array.size:
            raise NotCacheableError(f"it has no elements: its shape is {list(array.shape)}")
        found = Layout(array.shape, array.dtype.name, torch_dtype, tensor=not isinstance(decoded, np.ndarray))
        if layout is not None and found != layout:
            raise NotCacheableError(f"the others are each a {layout}, this one is a {found}")
        return [_read_only(array) if self.random else array], layout or found

    def sample(self, parts: Parts, layout: Layout, rng: Callable[[], Any]) -> Any:
        """Return a copy, or what ``augment`` returns."""
        value = self._cached(parts, layout)
        return value if self._augment is None else self._augment(value, rng=rng())

    def sample_with_target(self, parts: Parts, layout: Layout, rng: Callable[[], Any], target: Any) -> Any:
        """Return the sample with its target, by ``augment`` if it takes that."""
        if not self._takes_target:
            return super().sample_with_target(parts, layout, rng, target)
        assert self._augment is not None
        return self._augment(self._cached(parts, layout), rng=rng(), target=target)

    def _cached(self, parts: Parts, layout: Layout) -> Any:
        if layout is RECORDS:
            value = unpack_record(parts[0])
            return _read_only(value) if self.random and isinstance(value, np.ndarray) else value
        # ``augment`` gets an array that it cannot write to. torch has no read-only memory.
        return parts[0] if self.random and not layout.tensor else plain_value(parts[0], layout)


def plain_value(array: NDArray[Any], layout: Layout) -> Any:
    """Return a copy of a cached array, as the array or tensor that it was."""
    copied = array.copy()
    return as_tensor(HostTensor(copied, torch_dtype=layout.torch_dtype)) if layout.tensor else copied


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view that the user's augmentation cannot write to: the array is cached afterwards."""
    view = array.view()
    view.flags.writeable = False
    return view


def decoder_codec(decoder: Any) -> SampleCodec:
    """Return the codec of a user's decoder.

    Raises:
        TypeError: It is random and lacks separate methods for decoding and augmentation.
    """
    if decodes_in_place(decoder):
        row_decoder: RowDecoder = decoder
        if not row_decoder.takes_seed or hasattr(decoder, "augment_into"):
            return RowCodec(decoder)
    elif callable(getattr(decoder, "augment_cached", None)):  # augment= of DecodePair is an argument
        return ValueCodec(decoder.decode_cached, decoder.augment_cached, takes_target=takes_target(decoder))
    elif callable(getattr(decoder, "decode_cached", None)) and callable(getattr(decoder, "augment", None)):
        return ValueCodec(decoder.decode_cached, decoder.augment)
    elif not takes_rng(decoder):
        return ValueCodec(decoder)
    advice = getattr(
        decoder,
        "cache_advice",
        "Give it two methods: decode_cached(data), which returns what is cached, without random numbers, and "
        "augment(cached, *, rng), which returns the sample",
    )
    raise TypeError(
        f"cache= with decode={decoder!r}: the decoder is random, so every epoch would show the same cached samples. "
        f"{advice}"
    )
