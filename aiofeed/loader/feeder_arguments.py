"""What to write in place of an argument of torch's ``DataLoader``, or of a class that ``Feeder`` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from aiofeed.kernel.core.failure_policy import FailurePolicy
from aiofeed.kernel.core.limits import Limits


def _threads_instead(workers: object) -> str:
    if workers == 0:
        return "leave it out; reading and decoding run in threads"
    return (
        f"aiofeed.DataLoader takes it. For a Feeder, reading and decoding run in threads, limited by "
        f'Limits(decode_threads=...); engine="process:{workers}" uses that many worker processes; '
        f"pass a thread-safe Dataset as FromDataset(dataset, threads={workers})"
    )


def _part_of(argument: str, kind: type[Any], name: str) -> Callable[[Any], str]:
    return lambda value: f"pass {argument}={kind.__name__}({name}={value!r})"


_NO_WORKERS = "there are no worker processes"
_WAYS: Mapping[str, str | Callable[[Any], str]] = {
    "num_workers": _threads_instead,
    "pin_memory": "memory is pinned if device= is an accelerator; aiofeed.DataLoader takes pin_memory=",
    "pin_memory_device": "pass device=",
    "prefetch_factor": lambda n: "leave it out" if n is None else f"pass limits=Limits(prefetch_batches={n})",
    "persistent_workers": "threads live as long as the feeder",
    "worker_init_fn": (
        f"aiofeed.DataLoader takes it. For a Feeder, {_NO_WORKERS}: FromDataset(dataset, setup=function) calls "
        f"function(dataset) in each thread that will call the dataset; the decoder's `rng` gives each sample its own "
        f"random numbers"
    ),
    "multiprocessing_context": f"{_NO_WORKERS}; aiofeed.DataLoader takes it",
    "timeout": lambda s: "leave it out" if s == 0 else f"pass on_error=FailurePolicy(read_timeout_s={s})",
    "generator": "aiofeed.DataLoader takes it. For a Feeder, pass seed=",
    "dataset": "it is the first argument",
    **dict.fromkeys(("rank", "world_size", "num_replicas"), "pass shard=(rank, world_size)"),
    "num_threads": _part_of("limits", Limits, "decode_threads"),
    **{each.name: _part_of("limits", Limits, each.name) for each in fields(Limits)},
    **{each.name: _part_of("on_error", FailurePolicy, each.name) for each in fields(FailurePolicy)},
}


def ways_for_feeder() -> Mapping[str, str | Callable[[Any], str]]:
    """Return what to write, by the name of an argument that ``Feeder`` does not have."""
    return _WAYS
