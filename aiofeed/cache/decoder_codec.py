"""How a decoder is taken apart for a cache: what is kept of a sample, and how the sample is made of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from aiofeed.cache.layout import Layout
from aiofeed.core.types import HostTensor, Row, RowDecoder
from aiofeed.runtime.tensors import as_array, as_tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray


class NotCacheableError(Exception):
    """A sample cannot be kept; the message says why."""


class SampleCodec(Protocol):
    """A decoder in two steps."""

    @property
    def layout(self) -> Layout | None:
        """What is kept of each sample, where it is known before one was decoded."""
        ...

    @property
    def direct(self) -> bool:
        """Whether what is kept is the sample itself."""
        ...

    def decode(self, data: Any) -> tuple[NDArray[Any], Layout]:
        """What is to be kept of a sample.

        Raises:
            UnfitError: it has no fixed form.
        """
        ...

    def fill(self, kept: NDArray[Any], out: NDArray[Any], seed: int | None) -> None:
        """Make the sample in its row of a batch."""
        ...

    def sample(self, kept: NDArray[Any], layout: Layout, rng: Callable[[], Any]) -> Any:
        """Make the sample, in memory of its own.

        Args:
            kept: read-only.
            layout: of ``kept``.
            rng: the sample's own generator.
        """
        ...


class RowCodec:
    """A decoder that fills rows. What is kept is the row, or what ``augment_into`` makes one of."""

    def __init__(self, decoder: Any) -> None:
        self._decoder: Any = decoder
        self._row: Row = decoder.row
        kept: Row = getattr(decoder, "cached_row", decoder.row)
        self.layout: Layout = Layout(kept.shape, kept.dtype)
        self.direct = not decoder.takes_seed
        self._into: Callable[[Any, Any], None] = getattr(decoder, "decode_cached_into", decoder.decode_into)

    def decode(self, data: Any) -> tuple[NDArray[Any], Layout]:
        """The row, or what is kept in its place."""
        kept = np.empty(self.layout.shape, self.layout.dtype)
        self._into(data, kept)
        return kept, self.layout

    def fill(self, kept: NDArray[Any], out: NDArray[Any], seed: int | None) -> None:
        """Copy or augment."""
        if self.direct:
            out[...] = kept
        else:
            self._decoder.augment_into(kept, out, seed)

    def sample(self, kept: NDArray[Any], layout: Layout, rng: Callable[[], Any]) -> Any:
        """As calling the decoder gives it."""
        import torch

        # The number that the decoder itself takes from a generator.
        seed = None if self.direct else int(torch.randint(2**63 - 1, (), generator=rng(), device="cpu"))
        out = np.empty(self._row.shape, self._row.dtype)
        self.fill(kept, out, seed)
        return as_tensor(HostTensor(out, self._row.axes))


class PlainCodec:
    """A decoder that returns one array or tensor, without random numbers."""

    layout = None
    direct = True

    def __init__(self, decode: Callable[[Any], Any]) -> None:
        self._decode = decode

    def decode(self, data: Any) -> tuple[NDArray[Any], Layout]:
        """What the decoder returns."""
        value = self._decode(data)
        kept, torch_dtype = as_array(value)
        if kept is None:
            raise NotCacheableError(
                f"the decoder returned a {type(value).__name__}, where one plain CPU tensor or array can be kept"
            )
        if not kept.size:
            raise NotCacheableError(f"it has no elements: its shape is {list(kept.shape)}")
        return kept, Layout(kept.shape, kept.dtype.name, torch_dtype, tensor=not isinstance(value, np.ndarray))

    def fill(self, kept: NDArray[Any], out: NDArray[Any], seed: int | None) -> None:
        """Copy."""
        out[...] = kept

    def sample(self, kept: NDArray[Any], layout: Layout, rng: Callable[[], Any]) -> Any:
        """A copy."""
        return _as_it_was(kept.copy(), layout)


class SplitCodec(PlainCodec):
    """A decoder with ``decode_cached`` and ``augment``."""

    direct = False

    def __init__(self, decoder: Any) -> None:
        super().__init__(decoder.decode_cached)
        self._augment: Callable[..., Any] = decoder.augment

    def sample(self, kept: NDArray[Any], layout: Layout, rng: Callable[[], Any]) -> Any:
        """What ``augment`` makes of it."""
        # torch knows no memory that may not be written to.
        return self._augment(_as_it_was(kept.copy() if layout.tensor else kept, layout), rng=rng())


def _as_it_was(kept: NDArray[Any], layout: Layout) -> Any:
    return as_tensor(HostTensor(kept, torch_dtype=layout.torch_dtype)) if layout.tensor else kept


def is_split(decoder: object) -> bool:
    """Whether a decoder has the two steps that a cache stands between."""
    return callable(getattr(decoder, "decode_cached", None)) and callable(getattr(decoder, "augment", None))


def form_of(decoder: Any, *, rows: bool, random: bool) -> SampleCodec:
    """How a decoder is taken apart.

    Args:
        decoder: the user's.
        rows: whether it fills rows.
        random: whether it takes random numbers.

    Raises:
        TypeError: it is random, and does not say what comes before that.
    """
    if rows:
        row_decoder: RowDecoder = decoder
        if not row_decoder.takes_seed or hasattr(decoder, "augment_into"):
            return RowCodec(decoder)
    elif is_split(decoder):
        return SplitCodec(decoder)
    elif not random:
        return PlainCodec(decoder)
    raise TypeError(
        f"cache= with decode={decoder!r}: what it makes of a sample is random, so that keeping it would show the same "
        "in every epoch. Give it two methods: decode_cached(data), which returns one array or tensor of a fixed shape "
        "without random numbers, and augment(cached, *, rng), which returns the sample"
    )
