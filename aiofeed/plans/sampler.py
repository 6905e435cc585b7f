"""A user's sampler: listed once per epoch, not sharded, and restored if it can be."""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from aiofeed.kernel.core.errors import StateError
from aiofeed.kernel.core.formatting import format_error
from aiofeed.kernel.core.validation import check_epoch, length_of
from aiofeed.kernel.sampling.lister import Lister
from aiofeed.kernel.sampling.order import BatchLists, EpochList, Int64
from aiofeed.kernel.sampling.schedule import Position
from aiofeed.kernel.sampling.state import json_dict

# A sampler that gives more indices than this many per sample, more than this many in all, and more than its length, is
# taken for endless.
MOST_PER_SAMPLE = 16
MOST_ALWAYS = 1 << 20
# Nor is a length believed that would take minutes and 10 GB to list, and is more than MOST_PER_SAMPLE, too.
MOST_LISTED = 1 << 28


class SamplerAdapter(Lister):
    """A sampler, and the state that makes it list the same epoch again.

    The list of an epoch depends on the sampler's ``set_epoch``, ``state_dict`` or ``generator``, whichever it has. The
    state before the list was made is saved with a digest of the list. A resumed epoch must have the same digest.

    Args:
        sampler: A ``torch.utils.data.Sampler``, or any iterable of indices that can be iterated more than once.
        length: The number of samples of the source.

    Raises:
        TypeError: The sampler is not iterable, or is an iterator, which gives one epoch only.
    """

    argument = "sampler"
    listed_once = True
    distributed = True

    def __init__(self, sampler: Iterable[int], length: int) -> None:
        if not isinstance(sampler, Iterable) and not hasattr(sampler, "__getitem__"):
            raise TypeError(f"sampler must be an iterable of indices, got {sampler!r}")
        # Does not call iter(): a sampler may draw its epoch there.
        if isinstance(sampler, Iterator):
            raise TypeError("sampler is an iterator, which gives one epoch only; pass a list or a Sampler")
        self._sampler = sampler
        super().__init__(length)
        self.sized: bool = length_of(sampler) is not None
        replicas = getattr(self._owner, "num_replicas", 1)
        self.ranks: int = replicas if isinstance(replicas, int) else 1
        # An epoch and the state before its list was made: of a loaded state, and of the epoch listed last.
        self._loaded: tuple[int, dict[str, Any]] | None = None
        self._last: tuple[int, dict[str, Any]] | None = None

    @property
    def _owner(self) -> Any:
        """The sampler on which the order depends."""
        return self._sampler

    def __str__(self) -> str:
        return type(self._sampler).__name__

    def __len__(self) -> int:
        """Samples per epoch, by the sampler's length."""
        if (length := length_of(self._sampler)) is None:
            raise TypeError(f"{type(self._sampler).__name__} has no len(), so the feeder has none")
        return length

    def list_epoch(self, epoch: int, *, resumed: bool) -> EpochList:
        """Return the indices or batches of an epoch, in order.

        Args:
            epoch: Passed to the sampler's ``set_epoch`` if it has one.
            resumed: Whether the rest of this epoch is wanted, so that the list must be the same as before.

        Raises:
            StateError: The epoch is resumed and the sampler gives another list.
        """
        owner: Any = self._owner
        settable = hasattr(owner, "set_epoch")
        if settable:
            owner.set_epoch(epoch)
        loaded, self._loaded = self._loaded, None
        saved = loaded[1] if loaded is not None and loaded[0] == epoch else {}
        wanted = saved.get("digest")
        # With set_epoch, a state may be a position within the list (torchdata's StatefulDistributedSampler).
        if not (settable and "state" in saved):
            self._apply(saved)
        indices, before = self._list()
        if settable and "state" in saved and wanted not in (None, before["digest"]):
            self._apply(saved)
            indices, before = self._list()
        if resumed and wanted != before["digest"]:
            raise StateError(
                f"epoch {epoch} cannot be resumed: {type(self._sampler).__name__} gives other indices than when the "
                f"epoch was started (another digest). It needs set_epoch, state_dict and load_state_dict, or a "
                f"generator of its own (generator=torch.Generator().manual_seed(...))"
            )
        self._last = (epoch, before)
        return indices

    def _list(self) -> tuple[EpochList, dict[str, Any]]:
        before = self._capture()
        length, likely = length_of(self._sampler) or 0, MOST_PER_SAMPLE * self._length
        if length * self.typical_samples > max(likely, MOST_LISTED):
            raise ValueError(
                f"{type(self._sampler).__name__} has a length of {length:,} for {self._length:,} samples, and a Feeder "
                f'lists a sampler once per epoch: give it a shorter epoch, or pass shuffle="replacement" in its place; '
                f"aiofeed.DataLoader(threads=...) reads it as it goes"
            )
        most = max(length, likely, MOST_ALWAYS)
        listed = list(itertools.islice(iter(self._sampler), most + 1))
        if len(listed) > most:
            raise ValueError(
                f"{type(self._sampler).__name__} gave more than {most:,} indices for {self._length:,} samples and does "
                f"not seem to end. A sampler has to end with its epoch: give it a length (RandomSampler(dataset, "
                f"num_samples=...)) or cut it (itertools.islice in __iter__)"
            )
        epoch, digest = self._checked(listed)
        return epoch, before | {"digest": digest}

    def _checked(self, listed: list[Any]) -> tuple[EpochList, str]:
        """Return the epoch of a list of the sampler's items, and its digest."""
        array = index_array(listed, self._length)
        return array, hashlib.sha256(array.tobytes()).hexdigest()[:32]

    def identity(self) -> str:
        """Return the digest of the epoch listed last."""
        return "" if self._last is None else str(self._last[1]["digest"])

    def repeat_last_epoch(self) -> None:
        """List the last epoch again from the same state, because it returned no batch."""
        if self._loaded is None:
            self._loaded = self._last

    def state(self, position: Position) -> str:
        """Return the state that restores the sampler for the epoch of a position, as JSON.

        Raises:
            StateError: The sampler's state is not JSON.
        """
        epoch, known = position.epoch, self._loaded or self._last
        state = known[1] if known is not None and known[0] == epoch else self._capture()
        try:
            return json.dumps({"epoch": epoch, **state})
        except TypeError as error:
            raise StateError(
                f"the state of {type(self._sampler).__name__} must be plain values that JSON has: {error}"
            ) from error

    def load_state(self, text: str) -> None:
        """Restore a state when its epoch is listed.

        Raises:
            StateError: The text is not a state.
        """
        state = json_dict(text)
        try:
            epoch = check_epoch("its epoch", state.pop("epoch"))
            bytes.fromhex(state.get("generator", ""))
        except (TypeError, ValueError, KeyError) as error:
            raise StateError(f"the state is damaged: sampler has {text!r:.200}: {error}") from error
        self._loaded = (epoch, state)

    def _capture(self) -> dict[str, Any]:
        sampler = self._owner
        if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
            return {"state": sampler.state_dict()}
        generator = getattr(sampler, "generator", None)
        if generator is not None and hasattr(generator, "get_state"):
            return {"generator": bytes(generator.get_state().tolist()).hex()}
        return {}

    def _apply(self, state: dict[str, Any]) -> None:
        try:
            if "state" in state:
                self._owner.load_state_dict(state["state"])
            elif "generator" in state and (generator := getattr(self._owner, "generator", None)) is not None:
                import torch

                generator.set_state(torch.frombuffer(bytearray(bytes.fromhex(state["generator"])), dtype=torch.uint8))
        except Exception as error:  # the user's sampler may raise anything
            raise StateError(f"the sampler {self} refuses its saved state: {format_error(error)}") from error


class BatchSamplerAdapter(SamplerAdapter):
    """A batch sampler, such as torch's ``BatchSampler``: gives lists of indices. The batches are sharded by rank.

    Attributes:
        distributed: Whether its sampler gives each rank other samples, so that the batches must not be sharded again.
    """

    argument = "batch_sampler"
    by_batches = True

    def __init__(self, sampler: Iterable[Sequence[int]], length: int) -> None:
        super().__init__(sampler, length)  # type: ignore[arg-type]
        self.distributed: bool = hasattr(self._owner, "num_replicas")
        # Torch's ``BatchSampler`` has a batch size; the batches of others are not known yet.
        size = getattr(sampler, "batch_size", None)
        self.typical_samples: int = size if isinstance(size, int) and size > 0 else 32

    @property
    def _owner(self) -> Any:
        sampler = self._sampler
        own = ("set_epoch", "state_dict", "generator", "num_replicas")
        inner = getattr(sampler, "sampler", None)
        return sampler if inner is None or any(hasattr(sampler, name) for name in own) else inner

    def _checked(self, listed: list[Any]) -> tuple[EpochList, str]:
        lists = batch_lists(listed, self._length)
        return lists, lists.digest()


def batch_lists(batches: Iterable[Sequence[int]], length: int) -> BatchLists:
    """Return the batches of a batch sampler for a source of ``length`` samples.

    Raises:
        TypeError: A batch is not a list of ints.
        ValueError: A batch is empty, or an index is outside the source.
    """
    offsets = [0]
    flat: list[int] = []
    for number, batch in enumerate(batches):
        try:
            flat.extend(batch)
        except TypeError:
            raise TypeError(
                f"a batch sampler must give lists of indices, got {batch!r} (sampler= takes single indices)"
            ) from None
        if len(flat) == offsets[-1]:
            raise ValueError(f"the batch sampler gave an empty batch, number {number}")
        offsets.append(len(flat))
    return BatchLists(index_array(flat, length), np.array(offsets, np.int64))


def index_array(indices: Sequence[int], length: int) -> Int64:
    """Return the indices of a sampler for a source of ``length`` samples.

    Raises:
        TypeError: One of them is not an int.
        ValueError: One of them is outside the source.
    """
    try:
        array = np.fromiter(map(operator.index, indices), dtype=np.int64, count=len(indices))
    except TypeError as error:
        raise TypeError(f"a sampler must give one int per sample (batch_size= makes the batches): {error}") from None
    if array.size and (array.min() < 0 or array.max() >= length):
        wrong = int(array[(array < 0) | (array >= length)][0])
        raise ValueError(f"the sampler gave the index {wrong}, but the source has {length} sample{'s' * (length != 1)}")
    return array
