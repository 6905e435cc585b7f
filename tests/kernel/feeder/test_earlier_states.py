"""A state that another version has saved is refused in words, and not called damaged."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from aiofeed import DataLoader, Feeder, Mixture, Stream
from aiofeed.errors import StateError


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


class Items(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


MAKERS: dict[str, Callable[[], Any]] = {
    "feeder": lambda: Feeder(Numbers(), batch_size=2, shuffle=True),
    "stream": lambda: Feeder(Stream(Items()), batch_size=2, decode=torch.tensor),
    "mixture": lambda: Feeder(Mixture({"a": Numbers(), "b": Numbers()}, weights=[1, 2]), batch_size=2),
    "loader": lambda: DataLoader(Numbers(), 2, shuffle=True),
    "loader of a feeder": lambda: DataLoader(Numbers(), 2, shuffle=True, on_error="skip"),
    "loader with workers": lambda: DataLoader(Numbers(), 2, num_workers=1),
}
# Entries that a state may lack, or by which its kind is known.
OPTIONAL = {
    *(("trail",), ("receipt",)),
    *(("sampler", key) for key in ("mixture", "course", "samples", "epoch", "snapshot")),
}


def entries(state: dict[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The places of the entries of a state, and of the dicts in it."""
    for key, value in state.items():
        yield (*place, key)
        if key == "sampler" and isinstance(value, str) and value.startswith("{"):
            value = json.loads(value)
        if isinstance(value, dict) and key not in ("snapshot", "dataset", "samples"):
            yield from entries(value, (*place, key))


def without(state: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    changed = copy.deepcopy(state)
    holder: Any = changed
    for key in place[:-1]:
        if isinstance(holder[key], str):
            inner = json.loads(holder[key])
            del inner[place[-1]]
            holder[key] = json.dumps(inner)
            return changed
        holder = holder[key]
    del holder[place[-1]]
    return changed


@pytest.mark.parametrize("kind", MAKERS)
def test_a_state_without_an_entry_is_of_another_version(kind: str) -> None:
    """The error names the entry, the version that is read, and the way out."""
    maker = MAKERS[kind]()
    iterator = iter(maker)
    next(iterator)
    state = json.loads(json.dumps(maker.state_dict()))
    refused = 0
    for place in itertools.filterfalse(OPTIONAL.__contains__, entries(state)):
        if place == ("version",):
            continue
        with pytest.raises(StateError) as caught:
            MAKERS[kind]().load_state_dict(without(state, place))
        said = str(caught.value)
        assert f"of version 1 as this aiofeed reads it: it lacks {place[-1]!r}" in said, place
        assert "another aiofeed has saved it" in said
        assert "damaged" not in said
        refused += 1
    assert refused > 6
    maker = MAKERS[kind]()
    with pytest.raises(StateError, match="version 2; this aiofeed reads"):
        maker.load_state_dict({**state, "version": 2})
    maker.load_state_dict(state)
    del iterator
