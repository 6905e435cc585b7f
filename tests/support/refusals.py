"""Which source does not go with which option, or which other source: what the error says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SHUFFLES = ("shuffle=True", 'shuffle="keyed"', 'shuffle="window"', 'shuffle="replacement"')
PLANS = ("Buckets", "TokenBudget", "Balanced", "Pack", 'lengths="measure"')
SAMPLES = ('cache="host"', "DiskCache")
CACHES = (*SAMPLES, 'cache="device"', "EncodedCache")
ROWS = ("Table", "a Table with decode=", "Documents", "Arrays", "Episodes")

# fmt: off
REFUSED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("a stream", SHUFFLES, "a stream has an order of its own: pass Stream(..., shuffle_buffer=N)"),
    ("a stream", ("sampler=", "weights="), "a stream has no indices: choose items in the iterable"),
    ("a stream", ("batch_sampler=",), "a stream has no indices: pass batch_size="),
    ("a stream", PLANS, "a stream has no list of lengths: pass Buckets, TokenBudget or Pack without lengths="),
    ("a stream", CACHES, "a stream has no indices, by which a cache finds samples: leave it out"),
    ("a stream", ('in_order="samples"',), "a stream gives the items of a batch together: pass in_order=False"),
    ("a stream", ("retries",), "a stream gives each item once, so that a read cannot be timed or repeated"),
    ("a stream", ('engine="process"',), 'a stream is read in this process: pass engine="thread"'),
    ("a stream", ("exclude=",), "it leaves out samples of shuffle=True, False or 'keyed' only"),
    ("a Mixture with weights", ("sampler=", "weights=", "batch_sampler=", *SHUFFLES[2:]),
     "a Mixture decides which samples come"),
    ("samples in no shards", ('shuffle="window"',), "it mixes the samples of shards: pass shuffle=True"),
    ("Tensors", CACHES, "the data are in memory already: leave it out"),
    ("Tensors", ("Pack", "a plan without lengths="), "a row of Tensors is a tuple, a document one tensor"),
    *[(source, ("Pack", "a plan without lengths="), "a document is a row of tokens, or a dict of such columns")
      for source in ("samples with targets", "Tokens with targets", "a Dataset of tuples", "Clips", "Episodes",
                     "Episodes with a camera")],
    ("samples of unknown length", ("a plan without lengths=",), "measures the items of a Stream: pass lengths="),
    ("Tokens at URLs", ('cache="device"',), "they are copied from files: download them, or pass cache=EncodedCache"),
    ("Tokens", SAMPLES, 'rows are decoded already: leave it out, or pass cache="device" for Tokens'),
    ("rows", (*SAMPLES, "EncodedCache"), "rows are decoded already: leave it out"),
    ("Table", ('cache="device"',), "rows are decoded already: leave it out"),
    ("Documents", ('cache="device"',), "rows are decoded already: leave it out"),
    ("Arrays", ('cache="device"',), "rows are decoded already: leave it out"),
    ("Episodes", ('cache="device"',), "rows are decoded already: leave it out"),
    ("decoded dicts", ('cache="device"',), "it keeps one array of each sample"),
    ("Episodes with a camera", ('cache="device"',), "it keeps one array of each sample"),
    ("Episodes with a camera", ("EncodedCache",), "those of a window are parts of videos that others need"),
    ("Mixture of any sources", ("EncodedCache",), "give the sources that are far away a cache of their own"),
    ("Dataset", ("EncodedCache",), "it keeps the bytes that a source reads, and the items of a Dataset are decoded"),
    ("encoded samples", ("no decode=",), "it returns samples as they are stored: pass aiofeed.DecodeImage(size=224)"),
    *[(source, ("decode=",), "its samples are decoded already; transform= gets each batch")
      for source in ("Dataset", "Tensors", "Tokens", "decoded samples")],
)
"""Each row: a source, options, and what the constructor of ``Feeder`` says. The first row that applies counts."""

UNKNOWN_BEFORE: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("a decoder of tuples", ("Pack",), "has tokens in a tuple: Pack takes a tensor, an array or a list of ints"),
    ("a decoder of tuples", ('cache="device"',), "cannot be cached: the decoder returned a tuple of 2"),
)
"""The same of what only a decoded sample tells: the first batch says it."""

MIXED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("Tokens with targets", ("Tokens without targets",),
     "differ in block or targets, so they do not fit into one batch"),
    ("samples of one structure and shape", ("samples of another",),
     "their samples do not fit into one batch: choose equal columns, make them alike"),
)
"""Each row: a source, others, and what the constructor of ``Mixture``, or of its ``Feeder``, says of both."""

MIXED_UNKNOWN_BEFORE: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("samples of one structure and shape", ("samples of another",),
     "the samples of a batch do not fit together"),
)
"""The same of what only decoded samples tell: the first batch that has both says it."""
# fmt: on


def sentences(
    rows: Sequence[tuple[str, tuple[str, ...], str]], kinds: Iterable[str], others: Iterable[str]
) -> list[str]:
    """What the rows say about the kinds of a source, and an option or the kinds of another source."""
    found, against = {*kinds}, {"anything", *others}
    return [text for kind, excluded, text in rows if kind in found and not against.isdisjoint(excluded)]
