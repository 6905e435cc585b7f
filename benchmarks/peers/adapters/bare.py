"""Bare threads or processes that only read and decode, 16 files at a time, without batches and labels.

This module is no adapter: it gives contenders directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks import jpeg
from benchmarks.harness import Contender, Measure
from benchmarks.peers.decoders import IMPORTS, Decode, quiet_helpers

COUNTS = {1: "one", 2: "two"}


def contender(kind: str, work: Mapping[str, Any], workers: int = 2) -> Contender:
    """A contender of ``kind`` "threads" or "processes"."""
    options = {key: work[key] for key in ("folder", "side", "decoder")} | {"kind": kind, "workers": workers}
    label = f"{COUNTS[workers]} bare {kind if workers > 1 else kind.rstrip('s')}"
    return Contender(label, bare, options, IMPORTS[str(work["decoder"])])


@contextmanager
def bare(folder: str, side: int, decoder: str, kind: str, workers: int) -> Iterator[Measure]:
    quiet_helpers()
    way = jpeg.bare_threads if kind == "threads" else jpeg.bare_processes
    with way(folder, Decode(decoder, side).file, side, workers) as measure:
        yield measure
