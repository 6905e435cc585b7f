"""``aiofeed replay``: prints the samples of a step, from a saved state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from aiofeed.kernel.core.errors import StateError
from aiofeed.kernel.feeder.arguments import as_source
from aiofeed.kernel.sampling.feed_order import FeedOrder
from aiofeed.kernel.sampling.schedule import uncompared
from aiofeed.kernel.sampling.state import ORDERS, SavedState, states_in
from aiofeed.kernel.sources.subset import fingerprint_of
from aiofeed.mixtures.mixture_order import MixtureOrder
from aiofeed.reports.commands.data_set import open_data_set
from aiofeed.reports.step_samples import samples_at


def replay(path: str, data: Sequence[str], *, at: str | None, step: int, epoch: int, rank: int | None) -> int:
    """Print the samples of a step as JSON, one a line; returns the exit code."""
    state = SavedState.from_dict(_read(path, at))
    mixture, schedule = None, state.schedule
    if state.order == ORDERS["mixture"]:
        mixture = MixtureOrder.of_state(state.sampler, schedule.seed, shuffle=bool(schedule.shuffle))
    elif state.sampler:
        raise StateError(f"the state does not have the whole order, {state.order}: call feeder.samples({step})")
    source = as_source(open_data_set(data).source) if data else None
    if source is not None and uncompared(state.fingerprint, fingerprint_of(source, len(source))) is None:
        raise StateError(f"the state is of other data than {source!r}")
    order = FeedOrder(schedule, (schedule.rank, schedule.world_size), mixture)
    for sample in samples_at(order, step, epoch, rank, lambda at: None if source is None else str(source.key(at))):
        print(json.dumps(asdict(sample)))
    return 0


def _read(path: str, at: str | None) -> Mapping[str, Any]:
    """Read the state of a feeder from JSON or ``torch.save``, also within a checkpoint, there by its place."""
    with open(path, "rb") as file:
        content = file.read(1)
        if content == b"{":
            saved = json.loads(content + file.read())
        else:
            import torch

            try:
                saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except Exception as error:  # noqa: BLE001 - those of torch, zip files and pickles
                raise StateError(f"{path} is no JSON, nor a safe file of torch.save: {error}") from None
    states = list(states_in(saved, "handed_out"))
    found = [state for name, state in states if at is None or at == ".".join(map(str, name))]
    if len(found) == 1:
        return found[0]  # type: ignore[no-any-return]
    places = [".".join(map(str, name)) for name, _ in states]
    way = f": choose one of them, as in --at {places[-1]}" if places else ""
    raise StateError(f"{path} has {len(states)} states of feeders, at {[name for name, _ in states]}, and not one{way}")
