"""Which options of a feeder exclude each other, or a kind of source: one table, and what reads it.

What an add-on's source, plan or cache excludes stands in its own ``excluded``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from itertools import product
from typing import Any, TypeAlias

from aiofeed import _load_addon as load_addon
from aiofeed.kernel.core.faces import BaseCache, Exclusion, adapt_cache, bind_decoder
from aiofeed.kernel.sampling.schedule import window_shards

_ONE = "leave out {option}"
_DECODED = "its samples are decoded already; transform= gets each batch"
_FIXED = "it needs batches of one size"

# The first row that applies makes the message. docs/options.md is printed from this table and those of the add-ons.
# fmt: off
EXCLUDED: tuple[Exclusion, ...] = (
    # decoding
    (("decode=",), ("decoded samples",), TypeError, _DECODED),
    (("no decode=",), ("encoded samples",), TypeError,
     "it returns samples as they are stored: pass aiofeed.DecodeImage(size=224) for images, DecodeAudio(16000) "
     "for sound, or any function of a sample (decode=lambda sample: sample leaves it as it is); Clips reads videos"),
    # which samples come, and in which batches
    (("sampler=", "batch_sampler=", "an order by shuffle="), ("weights=",), ValueError,
     f"weights= draws samples with replacement: {_ONE}"),
    (("batch_size=", "sampler=", "shuffle=", "drop_last="), ("batch_sampler=",), ValueError,
     f"batch_sampler= makes the batches: {_ONE}"),
    (("exclude=",),
     ("sampler=", "batch_sampler=", "weights=", 'shuffle="replacement" or "window"'),
     ValueError, "it leaves out samples of shuffle=True, False or 'keyed' only: take them out of the source"),
    (("shuffle=",), ("sampler=",), ValueError, f"sampler= decides the order: {_ONE}"),
    (('shuffle="window"',), ("a source without shards",), ValueError,
     "it mixes the samples of shards: pass shuffle=True"),
    (("sampler=",), ("a plan",), ValueError, "a plan decides the order: leave out sampler="),
    (("shuffle= other than True",), ("a plan",), ValueError, "a plan shuffles a list: pass shuffle=True"),
    # batches that are filled with any samples
    (('in_order="samples"',), ("batch_sampler=", "a plan"), ValueError,
     "it moves samples to other batches: pass in_order=False, which returns whole batches as they are finished"),
    (('in_order="samples"',), ('engine="process"',), ValueError,
     'workers send whole batches: pass engine="thread", or in_order=False'),
    (("in_order= other than True",), ("a mesh with other dimensions",), ValueError,
     "ranks that should get the same batches would get them in different orders: pass in_order=True"),
    # caches
    (("cache= on the host",), ("rows",), TypeError,
     'it keeps decoded samples, and rows are decoded already: leave it out, or pass cache="device" for Tokens'),
    (('cache="device"',), ("rows of a Table",), TypeError,
     "it keeps decoded samples, and rows are decoded already: leave it out"),
    (("cache=",), ("rows with parts",), TypeError, "a cache cannot keep rows with parts: leave it out"),
    # batches at fixed addresses
    (("static_batches=True",), ("batches of different sizes",), ValueError,
     f"{_FIXED}, and the last one may be smaller: pass drop_last=True"),
    (("static_batches=True",), ('on_error="skip"',), ValueError,
     f"{_FIXED}, and skipped samples make them smaller: pass on_error='replace', or 'raise'"),
)

# The argument that a message shows for a fact; a message about another fact has its name.
_SHOWN: dict[str, tuple[str, ...]] = {
    "source": ("a source without shards", "decoded samples", "encoded samples", "a Dataset", "rows", "rows of a Table"),
    "shuffle": ("shuffle=", 'shuffle="window"', 'shuffle="replacement" or "window"', "an order by shuffle=",
                "shuffle= other than True"),
    "decode": ("rows with parts", "no decode="),
    "cache": ("cache=", "cache= on the host"),
    "on_error": ("retries", "max_failures as a share"),
    "batch_size": ("a plan", "a plan with lengths="),
    "engine": ('engine="process"',),
    "in_order": ("in_order= other than True",),
}
# fmt: on

Facts: TypeAlias = Mapping[str, str]
"""The facts that hold for the arguments of a feeder; those that an add-on declares with what messages show of them."""


def facts_of(a: Any) -> tuple[Facts, list[Exclusion]]:
    """Return the facts that hold for ``Arguments``, and the rows that their source, plan and cache exclude."""
    traits, policy, cached = a.traits, a.on_error, a.cache is not None
    plan, on_device = a.plan is not None, a.cache == "device"
    listed, tokens = plan or a.batch_sampler is not None, traits.rows and traits.decode == "none"
    unknown = a.exclude is not None or a.sampler is not None or traits.ordered or listed or not traits.indexed
    row = None if a.decode is None else bind_decoder(a.decode).row
    cache = None if not cached or (on_device and a.adopted.gathers_on_device) else cache_of(a.cache)
    # By identity: a dataclass with ``__eq__`` has no hash.
    declared = {id(each): each for each in (a.source, a.adopted, a.plan, cache) if each is not None}.values()
    kept = {name: words for each in declared for name, words in each.facts(a).items()}
    # Encoded windows of tokens at URLs can be kept on the disk.
    encoded = "EncodedCache" in kept and tokens and a.adopted.read_now is None
    found: dict[str, bool] = {
        "a source without shards": a.source.shard_starts is None,
        "decoded samples": traits.decode == "none",
        "encoded samples": traits.decode == "needed",
        "a Dataset": traits.items,
        "rows": traits.rows and a.decode is None,
        "rows of a Table": traits.rows and a.decode is None and not tokens,
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
        "drop_last=": a.drop_last,
        'in_order="samples"': a.in_order == "samples",
        "in_order= other than True": a.in_order is not True,
        "a mesh with other dimensions": a.replica[1] > 1,
        "decode=": a.decode is not None,
        "no decode=": a.decode is None,
        "rows with parts": row is not None and row.parts,
        "collate_fn=": a.collate_fn is not None,
        'engine="process"': a.engines > 0,
        "a list of devices": a.backend is not None and a.backend.splits,
        "retries": policy.retries > 0 or policy.read_timeout_s is not None,
        "max_failures as a share": policy.action != "raise" and isinstance(policy.max_failures, float),
        'on_error="skip"': policy.action == "skip",
        'on_error="replace"': policy.action == "replace",
        "cache=": cached,
        'cache="device"': on_device,
        "cache= on the host": cached and not on_device and not encoded,
        "static_batches=True": a.static_batches,
        "batches of different sizes": not (a.drop_last and (not listed or (plan and a.plan.shapes > 0)))
        and (unknown or a.length % a.samples > 0),
    }
    rows = [row for each in declared for row in each.excluded]
    return dict.fromkeys([fact for fact, holds in found.items() if holds], "") | kept, rows


def cache_of(cache: Any) -> BaseCache:
    """Return the cache that ``cache=`` names, or is.

    Raises:
        TypeError: It is none.
    """
    if isinstance(cache, str) and (name := {"host": "HostCache", "device": "DeviceCache"}.get(cache)) is not None:
        cache = load_addon(name, f"cache={cache!r}")()
    if (found := adapt_cache(cache)) is None:
        is_path = isinstance(cache, str) and (os.sep in cache or "." in cache)
        raise TypeError(
            f'cache must be "host", "device", aiofeed.HostCache(...), aiofeed.DiskCache(path) or '
            f"aiofeed.EncodedCache(path, max_bytes), got {cache!r}"
            + (f"; did you mean aiofeed.DiskCache({cache!r})?" if is_path else "")
        )
    return found


def conflict(facts: Collection[str], rows: Iterable[Exclusion]) -> tuple[str, str, type[Exception], str] | None:
    """Return the first row of which an option and what excludes it both hold, with these two."""
    for options, others, error, why in rows:
        for option, other in product(options, others):
            if option in facts and other in facts:
                return option, other, error, why
    return None


def check(a: Any) -> tuple[Facts, list[Exclusion]]:
    """Return ``facts_of`` arguments. Raise an error if two of the facts exclude each other."""
    facts, rows = facts_of(a)
    if (found := conflict(facts, [*rows, *EXCLUDED])) is not None:
        option, other, error, why = found
        given = facts[option] or _words(option, a)
        why = why.replace("{option}", given)
        raise error(f"{given} is not possible with {facts[other] or _words(other, a)}: {why}")
    return facts, rows


def _words(fact: str, a: Any) -> str:
    shown = next((argument for argument, facts in _SHOWN.items() if fact in facts), None)
    return fact if shown is None else repr(a.source) if shown == "source" else f"{shown}={getattr(a, shown)!r}"
