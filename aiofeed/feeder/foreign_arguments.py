"""Arguments that a ``Feeder`` does not have: ``DataLoader``'s, and slips of the pen."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

_DATALOADER_ARGUMENTS: Mapping[str, str] = {
    "num_workers": "reading and decoding run in threads here, bounded by Limits(decode_threads=...); "
    'engine="process:{value}" has them run in so many processes, and a Dataset that is thread-safe goes in as '
    "FromDataset(dataset, threads={value})",
    "pin_memory": "memory is pinned wherever device= is an accelerator",
    "pin_memory_device": "pass device=",
    "prefetch_factor": "pass limits=Limits(prefetch_batches={value})",
    "persistent_workers": "threads live as long as the feeder does",
    "worker_init_fn": "there are no worker processes; random numbers come per sample through the decoder's `rng`",
    "multiprocessing_context": "there are no worker processes",
    "batch_sampler": "pass sampler= and batch_size=",
    "timeout": "pass on_error=FailurePolicy(read_timeout_s={value})",
    "generator": "pass seed=",
    "dataset": "it is the first argument",
}
# What is not worth a word of what to write instead: without workers, or without a limit, is what a feeder is.
_LEAVE_OUT: Mapping[str, object] = {"num_workers": 0, "timeout": 0, "prefetch_factor": None}


def refuse_foreign_arguments(unknown: Mapping[str, object], *, known: Iterable[str]) -> None:
    """``TypeError`` for an argument that ``Feeder`` does not have, naming what stands in its place.

    Args:
        unknown: what was given, by name.
        known: names of the arguments there are.
    """
    for name, value in unknown.items():
        if name in _LEAVE_OUT and value == _LEAVE_OUT[name]:
            raise TypeError(
                f"Feeder has no argument {name!r} ({name}={value!r}): leave it out; reading and decoding run in threads"
            )
        if name in _DATALOADER_ARGUMENTS:
            instead = _DATALOADER_ARGUMENTS[name].format(value=value)
            raise TypeError(f"Feeder has no argument {name!r} ({name}={value!r}): {instead}")
        near = difflib.get_close_matches(name, [*known, "batch_size"], n=1)
        raise TypeError(f"Feeder has no argument {name!r}" + (f"; did you mean {near[0]}=?" if near else ""))
