"""The arguments of a feeder, each checked and converted by itself; those about the order become a ``FeedOrder``.

Each error says what was given and what to write instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from aiofeed.core.failure_policy import FailurePolicy, as_policy
from aiofeed.core.limits import Limits, ResolvedLimits, resolve_limits
from aiofeed.core.types import Collate, Source, decodes_in_place
from aiofeed.core.validation import check_callable, check_positive_int, is_async_function
from aiofeed.decoders.media.clips import Clips
from aiofeed.engine.fetch.sequences import PackCollate
from aiofeed.runtime import machine
from aiofeed.sampling.feed_order import FeedOrder, Lister
from aiofeed.sampling.listers.computed import ComputedOrder
from aiofeed.sampling.listers.length_plans import LengthPlan, PlanLister
from aiofeed.sampling.listers.mixture import MixtureOrder
from aiofeed.sampling.listers.packing import Pack
from aiofeed.sampling.listers.sampler import BatchSamplerAdapter
from aiofeed.sampling.listers.weighted import WeightedOrder
from aiofeed.sampling.listers.window import WindowOrder
from aiofeed.sampling.schedule import SHUFFLES, Schedule, Shuffle, is_shuffle, window_shards
from aiofeed.sources.arrays.tokens import Tokens
from aiofeed.sources.dataset import FromDataset, check_parts, is_iterable_dataset, is_map_dataset
from aiofeed.sources.mixture import Mixture
from aiofeed.sources.stream import Stream
from aiofeed.sources.stream_epochs import StreamOrder
from aiofeed.sources.tables.table import Table
from aiofeed.sources.tensors import Tensors

if TYPE_CHECKING:
    from aiofeed.processes.actors.options import RayEngine


# --- names of torch's DataLoader ---


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
DATALOADER_ARGUMENTS: Mapping[str, str | Callable[[Any], str]] = {
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
"""What to do instead of passing an argument of ``DataLoader`` or of a class that ``Feeder`` takes."""
DATALOADER_POSITIONS = (
    *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory"),
    *("drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
)
DATALOADER_HINT = "aiofeed.DataLoader takes them by position, as torch's DataLoader does"


# --- the source, the decoder and the engine ---


def adopt_source(source: Any) -> Source[Any] | FromDataset | Tensors:
    """Return the source itself, ``FromDataset`` of a torch ``Dataset``, or ``Stream`` of an ``IterableDataset``."""
    if isinstance(source, FromDataset | Tensors | Stream):
        return source
    if isinstance(source, Mixture):
        return source.combined
    if is_iterable_dataset(source):
        return Stream(source)
    if isinstance(source, type):
        raise TypeError(f"a source is an object, got the class {source.__name__}; pass an instance")
    if callable(getattr(source, "read", None)) or callable(getattr(source, "read_many", None)):
        missing = [name for name in ("__len__", "key", "read") if not hasattr(source, name)]
        if missing:
            raise TypeError(f"a source needs __len__, key and async read; {type(source).__name__} lacks {missing}")
        return source  # type: ignore[no-any-return]
    if isinstance(source, str | bytes | os.PathLike):
        path = os.fspath(source)
        raise TypeError(f"a source is an object, got the path {path!r}; did you mean aiofeed.ImageFolder({path!r})?")
    if isinstance(source, Mapping) and _has_names(source):
        raise TypeError(
            f"a feeder asks a source for samples 0, 1, ..., and this {type(source).__name__} has the keys "
            f"{list(source)[:8]}: pass one of its values, or for a dict of tensors aiofeed.Tensors(*tensors.values())"
        )
    if isinstance(source, tuple) and len(source) > 1 and _are_columns(source):
        raise TypeError(
            f"a tuple of {len(source)} tensors of {len(source[0])} rows each: pass aiofeed.Tensors(x, y, ...), or a "
            f"list if each tensor is a sample"
        )
    if type(source).__module__.partition(".")[0] in ("pyarrow", "polars"):
        raise TypeError(f"an item of a {type(source).__name__} is a column, not a row: pass aiofeed.Table(table)")
    if hasattr(type(source), "iloc"):  # on the type: a Dataset may delegate unknown attributes to a DataFrame
        raise TypeError(
            f"a pandas {type(source).__name__} is indexed by its index, not by position: pass "
            f'aiofeed.Table(frame), or aiofeed.Files(frame["path"], frame["label"])'
        )
    if is_map_dataset(source):
        check_parts(source)
        return FromDataset(source)
    if type(source).__name__ == "DataLoader" and "torch.utils.data" in sys.modules:
        raise TypeError(
            "a DataLoader yields batches, not samples: pass its dataset, or use aiofeed.prefetch(loader, device=...)"
        )
    raise TypeError(
        f"a source has __len__, key and async read, or is a Dataset with __len__ and __getitem__; got {source!r}. For "
        f"an iterable or a generator function pass aiofeed.Stream(...)"
    )


def _check_row(decode: Any) -> None:
    """Raise ``TypeError`` if torch has no tensors of the dtype of a decoder's rows."""
    dtype = np.dtype(decode.row.dtype)
    if dtype.kind not in "biufc" or not dtype.isnative:
        raise TypeError(
            f"the rows of {decode!r} have the dtype {dtype!s}, of which torch has no tensors: use numbers or bools in "
            f"the machine's byte order, or leave out decode_into and return something else"
        )


def _are_columns(values: tuple[Any, ...]) -> bool:
    """Return whether all values are tensors or arrays with the same number of rows."""
    rows = {value.shape[0] if getattr(value, "ndim", 0) else None for value in values}
    return len(rows) == 1 and None not in rows


def _has_names(mapping: Mapping[Any, Any]) -> bool:
    """Return whether a mapping has no samples 0, 1, ...; a TensorDict, unlike a dict, has rows that are not keys."""
    return 0 not in mapping if isinstance(mapping, dict) else isinstance(next(iter(mapping), None), str)


def unpack_clips(source: Any, decode: Any) -> tuple[Any, Any]:
    """Return the source of ``Clips``, and their decoder; anything else as it is."""
    if not isinstance(source, Clips):
        return source, decode
    if decode is not None:
        raise TypeError("Clips decode videos themselves, so decode= makes no sense; transform= gets each batch")
    if isinstance(adopt_source(source.source), FromDataset | Tensors | Tokens):
        raise TypeError(
            f"Clips takes a source of encoded videos, such as aiofeed.Files(paths), got {source.source!r}, whose items "
            f"are decoded already"
        )
    return source.source, source.decoder


def adopt_decoder(source: Source[Any] | FromDataset | Tensors, decode: Any) -> Callable[..., Any] | None:
    """Return the decoder, or ``None`` if the source returns decoded samples."""
    if isinstance(source, Tensors):
        if decode is not None:
            raise TypeError("Tensors are decoded already, so decode= makes no sense; transform= gets each batch")
        return None
    if isinstance(source, Tokens):
        if decode is not None:
            raise TypeError("Tokens are decoded already, so decode= makes no sense; transform= gets each batch")
        return source.decoder
    if isinstance(source, Table) and decode is None:
        return None
    if isinstance(source, FromDataset):
        if decode is None:
            return None
        items, instead = source.dataset, "decode in the dataset"
        if isinstance(items, list | tuple) and items and isinstance(items[0], str | os.PathLike):
            instead = f"a {type(items).__name__} is used as a Dataset; for files pass aiofeed.Files(paths)"
        raise TypeError(f"a Dataset's items are decoded, so decode= makes no sense: {instead}")
    if decode is None:
        if isinstance(source, Stream):
            return None
        raise TypeError(
            f"{type(source).__name__} returns samples as they are stored, so decode= is needed: "
            f"aiofeed.DecodeImage(size=224) for the bytes of images, or any function of a sample "
            f"(decode=lambda sample: sample leaves it as it is)"
        )
    if not callable(decode):
        raise TypeError(f"decode must be callable, got {decode!r}")
    if isinstance(decode, type) and "__call__" in dir(decode):  # its instances decode; others are like functions
        raise TypeError(f"decode must be a decoder, got the class {decode.__name__}; pass an instance")
    if is_async_function(decode):
        raise TypeError(
            f"decode must be an ordinary function, which threads call; {decode!r} is `async def`: await in the "
            f"source's `async read` instead"
        )
    if decodes_in_place(decode):
        _check_row(decode)
    return decode  # type: ignore[no-any-return]


def an_engine(value: object) -> tuple[int, RayEngine | None]:
    """Return the number of worker processes or actors that ``engine=`` requests, and the options of Ray.

    Raises:
        TypeError, ValueError: The value is not "thread", "process", of the form "process:4", "ray" or a ``RayEngine``.
        ImportError: Ray is not installed.
    """
    expected = 'expected "thread", "process", or "process:4" for four processes; for a Ray cluster "ray" or RayEngine()'
    if value == "thread":
        return 0, None
    kind, colon, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    if isinstance(value, str) and (
        kind not in ("process", "ray") or (colon and not (number.isascii() and number.isdigit() and int(number) > 0))
    ):
        raise ValueError(f"engine={value!r}: {expected}")
    if kind != "process":
        from aiofeed.processes.actors.options import RayEngine

        ray = value if kind != "ray" else RayEngine(int(number)) if colon else RayEngine()
        if not isinstance(ray, RayEngine):
            raise TypeError(f"engine must be a str, got {value!r}; {expected}")
        if find_spec("ray") is None:
            raise ImportError(f"engine={value!r} needs Ray: pip install 'aiofeed[ray]'")
        return ray.actors, ray
    if not machine.passes_descriptors():
        raise ValueError(
            f'engine={value!r} needs Unix sockets that pass descriptors, which Windows lacks: use engine="thread"'
        )
    return int(number) if colon else 1, None


def a_batch_size(value: object) -> int:
    """Return ``value`` if it is a valid ``batch_size``."""
    if value is None:
        raise TypeError(
            "batch_size must be an int, got None: a Feeder makes the batches. aiofeed.DataLoader(dataset, "
            "batch_size=None) gives single items; aiofeed.prefetch(batches, device=...) takes batches that you made"
        )
    return check_positive_int("batch_size", value)


def a_collate_fn(value: object, batch_size: object) -> Collate | PackCollate | None:
    """Return ``value`` if it is a valid ``collate_fn``; for ``Pack``, its own.

    Raises:
        TypeError, ValueError: It is no such function, or ``Pack`` excludes it.
    """
    collate_fn: Collate | None = check_callable("collate_fn", value)
    if not isinstance(batch_size, Pack):
        return collate_fn
    if collate_fn is not None:
        raise ValueError("Pack puts the batches together, so leave out collate_fn=; transform= gets each batch")
    return PackCollate(batch_size.rows, batch_size.context, batch_size.separator, batch_size.pad)


def length_of(source: Source[Any] | FromDataset | Tensors) -> int:
    """Return the number of samples of a source; 0 for a stream, whose end is not known before it is read."""
    return 0 if isinstance(source, Stream) else len(source)


def check_stream(source: object, **arguments: Any) -> None:
    """Raise ``ValueError`` if ``source`` is a ``Stream`` and one of some arguments of ``Feeder`` excludes it."""
    if not isinstance(source, Stream):
        return
    policy = as_policy(arguments["on_error"])
    unbounded = policy.action != "raise" and isinstance(policy.max_failures, float)
    number = f"FailurePolicy({policy.action!r}, max_failures=100)"
    for name, excluded, why in (
        ("shuffle", a_shuffle(arguments["shuffle"]), "has an order of its own: pass Stream(..., shuffle_buffer=N)"),
        ("sampler", arguments["sampler"] is not None, "has no indices: choose items in the iterable"),
        ("weights", arguments["weights"] is not None, "has no indices: choose items in the iterable"),
        ("batch_sampler", arguments["batch_sampler"] is not None, "has no indices: pass batch_size="),
        ("batch_size", isinstance(arguments["batch_size"], LengthPlan), "has no list of lengths: pass a number"),
        ("cache", arguments["cache"] is not None, "has no indices, by which a cache finds samples: leave it out"),
        ("in_order", arguments["in_order"] == "samples", "gives the items of a batch together: pass in_order=False"),
        ("engine", an_engine(arguments["engine"])[0], 'is read in this process: pass engine="thread"'),
        (
            "on_error",
            policy.retries or policy.read_timeout_s is not None,
            "gives each item once, so that a read cannot be timed or repeated: do that in the iterable",
        ),
        (
            "on_error",
            unbounded,
            f"has no length of which max_failures={policy.max_failures} is a fraction: pass on_error={number}",
        ),
    ):
        if excluded:
            raise ValueError(f"{name}={arguments[name]!r} is not possible with {source!r}: a stream {why}")


def limits_for(
    limits: Limits | None, batch_size: int, source: object, engines: int, ray: RayEngine | None = None
) -> ResolvedLimits:
    """Return all limits as numbers for this machine or the actors of ``ray``, and for a source.

    Raises:
        TypeError: ``limits`` is not a ``Limits``.
        ValueError: A limit that processes share is smaller than their number.
    """
    if limits is not None and not isinstance(limits, Limits):
        raise TypeError(f"limits must be aiofeed.Limits(...), got {limits!r}")
    if limits is not None and not isinstance(source, FromDataset):  # each process has its own copy of a Dataset
        for name in ("read_concurrency", "decode_threads"):
            given = getattr(limits, name)
            if given is not None and given < engines:
                kind, what = ("ray", "actors") if ray else ("process", "processes")
                raise ValueError(
                    f'Limits({name}={given}) with engine="{kind}:{engines}": the {what} share the limit, and each '
                    f'needs 1; use at least {engines}, or fewer {what}, as engine="{kind}:{given}"'
                )
    return resolve_limits(
        limits or Limits(),
        batch_size=batch_size,
        cpus=ray.actors * ray.cpus_per_actor if ray else machine.cpus(),
        free_memory=machine.free_memory(),
        most_threads=source.threads if isinstance(source, FromDataset) else None,
        engines=engines,
    )


# --- the order ---


def a_shuffle(value: object) -> Shuffle:
    """Return ``value`` if it is a valid ``shuffle``."""
    if is_shuffle(value):
        return value
    hint = ": pass False; aiofeed.DataLoader takes None, too" if value is None else ""
    kind = ValueError if isinstance(value, str) else TypeError
    raise kind(f"shuffle must be True, False, {SHUFFLES}, got {value!r}{hint}")


def new_lister(
    source: object, weights: Any, order: Schedule, *, sampled: bool, listed: bool
) -> MixtureOrder | ComputedOrder | None:
    """Return the order of a mixture, of weights or of shards; ``None`` for the schedule's own order.

    Raises:
        TypeError, ValueError: The arguments exclude each other, or the weights do not fit the source.
    """
    if isinstance(source, Mixture):
        given = {
            "weights=": weights is not None,
            "sampler=": sampled,
            "batch_sampler=": listed,
            f"shuffle={order.shuffle!r}": order.shuffle not in (True, False, "keyed"),
        }
        if excluded := [name for name, is_given in given.items() if is_given]:
            raise ValueError(f"a Mixture decides which samples come, so leave out {', '.join(excluded)}")
        return source.order(order.seed, shuffle=bool(order.shuffle))
    shards = window_shards(order.shuffle)
    if weights is None and (shards is None or sampled or listed):  # those exclude shuffle=
        return None
    if weights is None and shards is not None:
        starts = getattr(source, "shard_starts", None)
        if starts is None:
            raise ValueError(
                f"shuffle={order.shuffle!r} mixes the samples of shards, and {source!r} has none: pass shuffle=True"
            )
        return WindowOrder(starts, shards, order.seed)
    if sampled or listed or order.shuffle not in (False, "replacement"):
        other = "sampler=" if sampled else "batch_sampler=" if listed else f"shuffle={order.shuffle!r}"
        raise ValueError(f"weights= draws samples with replacement, so leave out {other}")
    return WeightedOrder(weights, order.length, order.seed)


def new_batches(
    batch_size: object,
    batch_sampler: Any,
    order: Schedule,
    lister: MixtureOrder | ComputedOrder | None,
    *,
    sampled: bool,
) -> BatchSamplerAdapter | PlanLister | None:
    """Return the lister of a plan or of a batch sampler; ``None`` for a ``batch_size`` that is a number.

    Raises:
        TypeError, ValueError: The arguments exclude each other, or the plan does not fit the source.
    """
    if batch_sampler is not None:
        given = {
            "batch_size": batch_size is not None,
            "sampler": sampled,
            "shuffle": bool(order.shuffle),
            "drop_last": order.drop_last,
        }
        if excluded := [f"{name}=" for name, is_given in given.items() if is_given]:
            raise ValueError(f"batch_sampler= makes the batches, so leave out {', '.join(excluded)}")
        return BatchSamplerAdapter(batch_sampler, order.length)
    if not isinstance(batch_size, LengthPlan):
        return None
    if sampled:
        raise ValueError(f"{type(batch_size).__name__} decides the order, so leave out sampler=")
    if order.shuffle not in (True, False) and (lister is None or isinstance(lister, WindowOrder)):
        name = type(batch_size).__name__
        raise ValueError(f"{name} shuffles a list: pass shuffle=True instead of {order.shuffle!r}")
    batch_size.bind(order.length)
    shuffle = bool(order.shuffle) or isinstance(lister, WeightedOrder)
    return PlanLister(batch_size, order.seed, shuffle=shuffle, drop_last=order.drop_last, order=lister)


def new_order(
    source: object,
    base: Schedule,
    sampler: Iterable[int] | None,
    shard: tuple[int, int] | Literal["auto"] | None,
    lister: Lister | None,
) -> FeedOrder:
    """Return the order of a feeder; see ``FeedOrder``."""
    if isinstance(source, Stream):
        return StreamOrder(base, shard, source)
    return FeedOrder(base, sampler, shard, lister)
