"""Which options of a feeder exclude each other, or a kind of source: one table, and what reads it."""

from __future__ import annotations

import os
from collections.abc import Container
from itertools import product
from typing import Any, Literal, TypeAlias, cast

from aiofeed import _load_addon as load_addon
from aiofeed.kernel.core.types import decodes_in_place, traits_of
from aiofeed.kernel.engine.fetchers import Cache
from aiofeed.kernel.sampling.schedule import window_shards

_ONE = "leave out {option}"
_DECODED = "its samples are decoded already; transform= gets each batch"
_IN_MEMORY = "batches are views of the data in memory, and not collated from samples"
_THREAD = 'it is memory of this process: pass engine="thread", or cache=DiskCache(path), which processes share'
_DEVICES = "create one feeder for each device, with shard=(rank, world_size)"
_FIXED = "it needs batches of one size"

# fmt: off
Fact: TypeAlias = Literal[
    "Stream", "a Mixture with weights", "a source without shards", "decoded samples", "encoded samples", "a Dataset",
    "Tensors", "Tensors on a device", "rows", "rows of a Table", "Tokens on the device", "Tokens at URLs",
    "windows of Episodes", "shuffle=", 'shuffle="window"', 'shuffle="replacement" or "window"',
    "neighbours come together", "an order by shuffle=", "shuffle= other than True", "sampler=", "weights=",
    "batch_sampler=", "batch_size=", "a plan", "a plan with lengths=", "Pack", "exclude=", "drop_last=",
    'in_order="samples"', "in_order= other than True", "a mesh with other dimensions", "decode=", "no decode=",
    "rows with parts", "a random decoder", "collate_fn=", 'engine="process"', "a list of devices", "retries",
    "max_failures as a share", 'on_error="skip"', 'on_error="replace"', "cache=", 'cache="device"',
    "cache= on the host", "cache in host memory", "EncodedCache", "static_batches=True", "batches of different sizes",
]
"""A fact about the arguments of a feeder, of which the table below excludes pairs."""

# Each row: options, what excludes each of them, the type of the error, why and what to do instead. The
# first row that applies makes the message, in which {option} is the option. docs/options.md is printed from this table.
EXCLUDED: tuple[tuple[tuple[Fact, ...], tuple[Fact, ...], type[Exception], str], ...] = (
    # a stream
    (("shuffle=",), ("Stream",), ValueError, "a stream has an order of its own: pass Stream(..., shuffle_buffer=N)"),
    (("sampler=", "weights="), ("Stream",), ValueError, "a stream has no indices: choose items in the iterable"),
    (("batch_sampler=",), ("Stream",), ValueError, "a stream has no indices: pass batch_size="),
    (("a plan with lengths=",), ("Stream",), ValueError,
     "a stream has no list of lengths: pass Buckets, TokenBudget or Pack without lengths=, which measure the items"),
    (("cache=",), ("Stream",), ValueError, "a stream has no indices, by which a cache finds samples: leave it out"),
    (('in_order="samples"',), ("Stream",), ValueError,
     "a stream gives the items of a batch together: pass in_order=False"),
    (('engine="process"',), ("Stream",), ValueError, 'a stream is read in this process: pass engine="thread"'),
    (("retries",), ("Stream",), ValueError,
     "a stream gives each item once, so that a read cannot be timed or repeated: do that in the iterable"),
    (("max_failures as a share",), ("Stream",), ValueError,
     "a stream has no length of which it is a fraction: pass on_error=FailurePolicy(..., max_failures=100)"),
    # decoding
    (("decode=",), ("decoded samples",), TypeError, _DECODED),
    (("no decode=",), ("encoded samples",), TypeError,
     "it returns samples as they are stored: pass aiofeed.DecodeImage(size=224) for the bytes of images, or any "
     "function of a sample (decode=lambda sample: sample leaves it as it is)"),
    # which samples come, and in which batches
    (("weights=", "sampler=", "batch_sampler=", 'shuffle="replacement" or "window"'), ("a Mixture with weights",),
     ValueError, f"a Mixture decides which samples come: {_ONE}"),
    (("sampler=", "batch_sampler=", "an order by shuffle="), ("weights=",), ValueError,
     f"weights= draws samples with replacement: {_ONE}"),
    (("batch_size=", "sampler=", "shuffle=", "drop_last="), ("batch_sampler=",), ValueError,
     f"batch_sampler= makes the batches: {_ONE}"),
    (("exclude=",),
     ("Stream", "sampler=", "batch_sampler=", "weights=", "a Mixture with weights",
      'shuffle="replacement" or "window"'),
     ValueError, "it leaves out samples of shuffle=True, False or 'keyed' only: take them out of the source"),
    (("shuffle=",), ("sampler=",), ValueError, f"sampler= decides the order: {_ONE}"),
    (('shuffle="window"',), ("a source without shards",), ValueError,
     "it mixes the samples of shards: pass shuffle=True"),
    (("sampler=",), ("a plan",), ValueError, "a plan decides the order: leave out sampler="),
    (("shuffle= other than True",), ("a plan",), ValueError, "a plan shuffles a list: pass shuffle=True"),
    # collate functions
    (("collate_fn=",), ("Pack",), ValueError, "Pack puts the batches together; transform= gets each batch"),
    # batches that are filled with any samples
    (('in_order="samples"',), ("batch_sampler=", "a plan"), ValueError,
     "it moves samples to other batches: pass in_order=False, which returns whole batches as they are finished"),
    (('in_order="samples"',), ('engine="process"',), ValueError,
     'workers send whole batches: pass engine="thread", or in_order=False'),
    (("in_order= other than True",), ("a mesh with other dimensions",), ValueError,
     "ranks that should get the same batches would get them in different orders: pass in_order=True"),
    # data in memory
    (("batch_sampler=", "a plan"), ("Tensors on a device",), ValueError,
     f"{_IN_MEMORY}: pass torch.utils.data.TensorDataset(...) as the source"),
    (("collate_fn=",), ("Tensors on a device",), TypeError,
     f"{_IN_MEMORY}: pass transform=, which gets each batch, or torch.utils.data.TensorDataset(...) as the source"),
    (("cache=",), ("Tensors",), TypeError, "the data are in memory already: leave it out"),
    (("a list of devices",), ("Tensors on a device",), ValueError, f"the data are on one device: {_DEVICES}"),
    (("static_batches=True",), ("Tensors on a device",), ValueError,
     "batches are views, which need no copy: use copy_ to copy them into tensors of your own if addresses must not "
     "change"),
    (('engine="process"',), ("Tensors on a device",), ValueError, "the data are decoded already: leave it out"),
    # caches
    (("cache= on the host",), ("rows",), TypeError,
     'it keeps decoded samples, and rows are decoded already: leave it out, or pass cache="device" for Tokens'),
    (('cache="device"',), ("rows of a Table",), TypeError,
     "it keeps decoded samples, and rows are decoded already: leave it out"),
    (("batch_sampler=", "a plan", "collate_fn=", 'engine="process"', "static_batches=True", "a list of devices"),
     ("Tokens on the device",),
     ValueError, f"batches are gathered on one device, in its own memory and in one size: {_ONE}"),
    (("Tokens on the device",), ("Tokens at URLs",), ValueError,
     "they are copied from files: download them, or pass cache=EncodedCache(path, max_bytes), which keeps windows on "
     "the local disk"),
    (("cache=",), ("rows with parts",), TypeError, "a cache cannot keep rows with parts: leave it out"),
    (("EncodedCache",), ("a Dataset",), TypeError,
     "it keeps the bytes that a source reads, and the items of a Dataset are decoded: pass cache=DiskCache(path), or a "
     "source of bytes such as aiofeed.Files(paths) with decode="),
    (("EncodedCache",), ("windows of Episodes",), TypeError,
     "it keeps the bytes of samples, and those of a window are parts of videos that others need: copy the data set to "
     "the local disk, or pass cache=DiskCache(path), which keeps decoded samples"),
    # documents that are packed
    (("Tensors",), ("Pack",), ValueError,
     "a row of Tensors is a tuple, a document one tensor: pass a Dataset of those"),
    (('on_error="replace"',), ("Pack",), ValueError,
     "it plans the place of every token, and a replacement has another length and is used twice: pass on_error='skip', "
     "which leaves padding, or 'raise'"),
    (("a list of devices",), ("Pack",), ValueError, f"cu_seqlens is one for all rows of a batch: {_DEVICES}"),
    (("static_batches=True",), ("Pack",), ValueError, f"{_FIXED}, and cu_seqlens of Pack varies: leave it out"),
    (('cache="device"',), ("Pack",), ValueError,
     "it returns views of permuted rows, and Pack copies tokens: leave it out"),
    # decoded samples on the device
    (('cache="device"',), ("a random decoder",), ValueError,
     'its augmentation runs on the CPU, sample by sample: use cache="host", or augment batches in transform='),
    (("collate_fn=",), ('cache="device"',), ValueError,
     'batches are views of permuted rows: pass transform=, which gets each batch, or use cache="host"'),
    (('engine="process"',), ('cache="device"', "cache in host memory"), ValueError, _THREAD),
    (("a list of devices",), ('cache="device"',), ValueError,
     f'it keeps samples on one device: {_DEVICES}, or use cache="host"'),
    (("static_batches=True",), ('cache="device"',), ValueError,
     'batches are views, which need no copy: use copy_ to copy them into tensors of your own if addresses must not '
     'change, or use cache="host"'),
    # batches at fixed addresses
    (("static_batches=True",), ("batches of different sizes",), ValueError,
     f"{_FIXED}, and the last one may be smaller: pass drop_last=True"),
    (("static_batches=True",), ('on_error="skip"',), ValueError,
     f"{_FIXED}, and skipped samples make them smaller: pass on_error='replace', or 'raise'"),
)

# The argument that a message shows for a fact; a message about another fact has its name.
_SHOWN: dict[str, tuple[Fact, ...]] = {
    "source": ("Stream", "a Mixture with weights", "a source without shards", "decoded samples", "encoded samples",
               "a Dataset", "rows", "rows of a Table", "Tokens at URLs", "Tensors", "Tensors on a device",
               "windows of Episodes"),
    "shuffle": ("shuffle=", 'shuffle="window"', 'shuffle="replacement" or "window"', "an order by shuffle=",
                "shuffle= other than True"),
    "decode": ("rows with parts", "a random decoder", "no decode="),
    "cache": ("cache=", "cache= on the host", "cache in host memory", "EncodedCache", "Tokens on the device"),
    "on_error": ("retries", "max_failures as a share"),
    "batch_size": ("a plan", "a plan with lengths="),
    "engine": ('engine="process"',),
    "in_order": ("in_order= other than True",),
}
# fmt: on


def facts_of(a: Any) -> set[Fact]:
    """Return what holds for the ``Arguments`` of a feeder, by the names of the table."""
    traits, policy, cached = a.traits, a.on_error, a.cache is not None
    plan, on_device = a.plan is not None, a.cache == "device"
    listed, tokens = plan or a.batch_sampler is not None, traits.rows and traits.decode == "none"
    unknown = a.exclude is not None or a.sampler is not None or traits.ordered or listed or not traits.indexed
    at_urls = tokens and getattr(a.adopted, "whole", a.adopted).looks_ahead
    cache = None if not cached or (tokens and on_device) else cache_of(a.cache)
    decode = a.decode or getattr(a.adopted, "decoder", None)
    kept: set[Fact] = getattr(cache, "facts", lambda decode: set())(decode)
    found: dict[Fact, bool] = {
        "Stream": not traits.indexed,
        "a Mixture with weights": traits.ordered,
        "a source without shards": getattr(a.source, "shard_starts", None) is None,
        "decoded samples": traits.decode == "none",
        "encoded samples": traits.decode == "needed",
        "a Dataset": traits.items,
        "Tensors": traits_of(a.source).in_memory,
        "Tensors on a device": traits.in_memory and not a.source.on_host,
        "rows": traits.rows and a.decode is None,
        "rows of a Table": traits.rows and a.decode is None and not tokens,
        "Tokens on the device": tokens and on_device,
        "Tokens at URLs": at_urls,
        "shuffle=": bool(a.shuffle),
        'shuffle="window"': window_shards(a.shuffle) is not None,
        'shuffle="replacement" or "window"': a.shuffle not in (True, False, "keyed"),
        "neighbours come together": not unknown and (a.shuffle is False or window_shards(a.shuffle) is not None),
        "an order by shuffle=": a.shuffle not in (False, "replacement"),
        "shuffle= other than True": a.shuffle not in (True, False) and a.weights is None and not traits.ordered,
        "sampler=": a.sampler is not None,
        "weights=": a.weights is not None,
        "batch_sampler=": a.batch_sampler is not None,
        "batch_size=": a.batch_size is not None,
        "a plan": plan,
        "exclude=": a.exclude is not None,
        "a plan with lengths=": plan and not a.plan.streams,
        "Pack": plan and a.plan.packs,
        "drop_last=": a.drop_last,
        'in_order="samples"': a.in_order == "samples",
        "in_order= other than True": a.in_order is not True,
        "a mesh with other dimensions": a.replica[1] > 1,
        "decode=": a.decode is not None,
        "no decode=": a.decode is None,
        "rows with parts": bool(getattr(getattr(a.decode, "row", None), "parts", False)),
        "collate_fn=": a.collate_fn is not None,
        'engine="process"': a.engines > 0,
        "a list of devices": hasattr(a.backend, "backends"),
        "retries": policy.retries > 0 or policy.read_timeout_s is not None,
        "max_failures as a share": policy.action != "raise" and isinstance(policy.max_failures, float),
        'on_error="skip"': policy.action == "skip",
        'on_error="replace"': policy.action == "replace",
        "cache=": cached,
        "cache= on the host": cached and not on_device and not (at_urls and "EncodedCache" in kept),
        # A window is a dict; clips, of which the bytes of videos can be kept, are decoded in place.
        "windows of Episodes": traits.decode == "none"
        and not (traits.rows or traits.items or traits.in_memory or decodes_in_place(decode)),
        "static_batches=True": a.static_batches,
        "batches of different sizes": not (a.drop_last and (not listed or (plan and a.plan.shapes > 0)))
        and (unknown or a.length % a.samples > 0),
    }
    return {fact for fact, holds in found.items() if holds} | kept


def cache_of(cache: Any) -> Cache:
    """Return the cache that ``cache=`` names, or is.

    Raises:
        TypeError: It is none.
    """
    if isinstance(cache, str) and (name := {"host": "HostCache", "device": "DeviceCache"}.get(cache)) is not None:
        found: Cache = load_addon(name, f"cache={cache!r}")()
        return found
    if isinstance(cache, type) or not (hasattr(cache, "open_store") or hasattr(cache, "wrap")):
        is_path = isinstance(cache, str) and (os.sep in cache or "." in cache)
        raise TypeError(
            f'cache must be "host", "device", aiofeed.HostCache(...), aiofeed.DiskCache(path) or '
            f"aiofeed.EncodedCache(path, max_bytes), got {cache!r}"
            + (f"; did you mean aiofeed.DiskCache({cache!r})?" if is_path else "")
        )
    return cast("Cache", cache)


def conflict(facts: Container[Fact]) -> tuple[Fact, Fact, type[Exception], str] | None:
    """Return the first row of the table of which an option and what excludes it both hold, with these two."""
    for options, others, error, why in EXCLUDED:
        for option, other in product(options, others):
            if option in facts and other in facts:
                return option, other, error, why
    return None


def check(facts: Container[Fact], a: Any) -> None:
    """Raise an error if two of the facts of ``a`` exclude each other."""
    if (found := conflict(facts)) is not None:
        option, other, error, why = found
        given = _words(option, a)
        raise error(f"{given} is not possible with {_words(other, a)}: {why.replace('{option}', given)}")


def _words(fact: Fact, a: Any) -> str:
    shown = next((argument for argument, facts in _SHOWN.items() if fact in facts), None)
    return fact if shown is None else repr(a.source) if shown == "source" else f"{shown}={getattr(a, shown)!r}"
