"""A user's sampler: listed once per epoch, respected as it is, and restored where it can be."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from aiofeed.core.errors import StateError
from aiofeed.sampling.order import ListPermutation
from aiofeed.sampling.schedule import digest, listed


class SamplerAdapter:
    """A sampler, and what is needed to list the same epoch again.

    What decides an epoch's list is its ``set_epoch``, its ``state_dict`` or its ``generator``, whichever it has; what
    it was before the list was made is remembered, with a digest of the list. After a resume the list must be the same.

    Args:
        sampler: a ``torch.utils.data.Sampler``, or any iterable of indices that can be iterated more than once.
        length: samples of the source.

    Raises:
        TypeError: it is not iterable, or an iterator, which gives one epoch only.
    """

    def __init__(self, sampler: Iterable[int], length: int) -> None:
        if not isinstance(sampler, Iterable) and not hasattr(sampler, "__getitem__"):
            raise TypeError(f"sampler must be an iterable of indices, got {sampler!r}")
        # Not by iter(): a sampler may draw its epoch there.
        if isinstance(sampler, Iterator):
            raise TypeError("sampler is an iterator, which gives one epoch only; pass a list or a Sampler")
        self._sampler = sampler
        self._length = length
        self._restored: tuple[int, dict[str, Any]] | None = None
        self._last: tuple[int, dict[str, Any]] | None = None

    @property
    def sized(self) -> bool:
        """Whether the sampler says how long an epoch is."""
        return hasattr(self._sampler, "__len__")

    def __len__(self) -> int:
        """Samples per epoch, by the sampler's own word."""
        try:
            return len(self._sampler)  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(f"{type(self._sampler).__name__} has no len(), so the feeder has none") from None

    def list_epoch(self, epoch: int, *, resumed: bool) -> ListPermutation:
        """The indices of an epoch, in order.

        Args:
            epoch: given to the sampler's ``set_epoch`` where it has one.
            resumed: the rest of this epoch is wanted: the list must be the one that was begun.

        Raises:
            StateError: the sampler gives another list than it did, and so cannot be resumed.
        """
        settable = hasattr(self._sampler, "set_epoch")
        if settable:
            self._sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        restored, self._restored = self._restored, None
        saved = restored[1] if restored is not None and restored[0] == epoch else {}
        wanted = saved.get("digest")
        # Beside set_epoch, a state is how far into its list the sampler was (torchdata's StatefulDistributedSampler).
        if not (settable and "state" in saved):
            self._put_back(saved)
        indices, before = self._list()
        if settable and "state" in saved and wanted not in (None, before["digest"]):
            self._put_back(saved)
            indices, before = self._list()
        if resumed and wanted != before["digest"]:
            raise StateError(
                f"epoch {epoch} cannot be resumed: {type(self._sampler).__name__} gives other indices than when the "
                f"epoch was begun. It needs set_epoch, state_dict and load_state_dict, or a generator of its own "
                f"(generator=torch.Generator().manual_seed(...))"
            )
        self._last = (epoch, before)
        return indices

    def _list(self) -> tuple[ListPermutation, dict[str, Any]]:
        before = self._before()
        indices = listed(list(self._sampler), self._length)
        return indices, before | {"digest": digest(indices)}

    def again(self) -> None:
        """The epoch listed last handed out nothing: list it again from where the sampler stood then."""
        if self._restored is None:
            self._restored = self._last

    def saved(self, epoch: int) -> str:
        """What restores the sampler for ``epoch``, as JSON."""
        known = self._restored or self._last
        state = known[1] if known is not None and known[0] == epoch else self._before()
        try:
            return json.dumps({"epoch": epoch, **state})
        except TypeError as error:
            raise StateError(f"the state of {type(self._sampler).__name__} is not plain: {error}") from error

    def restore(self, saved: str) -> None:
        """Take up what ``saved`` gave; counts when the epoch is listed."""
        try:
            state = json.loads(saved)
            epoch = int(state.pop("epoch"))
        except (ValueError, KeyError, AttributeError) as error:
            raise StateError(f"the sampler's part of the state is damaged: {error}") from error
        self._restored = (epoch, state)

    def _before(self) -> dict[str, Any]:
        sampler = self._sampler
        if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
            return {"state": sampler.state_dict()}
        generator = getattr(sampler, "generator", None)
        if generator is not None and hasattr(generator, "get_state"):
            return {"generator": bytes(generator.get_state().tolist()).hex()}
        return {}

    def _put_back(self, before: dict[str, Any]) -> None:
        if "state" in before:
            self._sampler.load_state_dict(before["state"])  # type: ignore[attr-defined]
        elif "generator" in before and (generator := getattr(self._sampler, "generator", None)) is not None:
            import torch

            state = torch.frombuffer(bytearray(bytes.fromhex(before["generator"])), dtype=torch.uint8)
            generator.set_state(state)
