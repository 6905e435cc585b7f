"""The loaders, one small module each: ``benchmarks.peers.work`` says what an adapter is."""

from __future__ import annotations

ADAPTERS = (
    "feeder",
    "dataloader",
    "nodes",
    "spdl_threads",
    "grain_threads",
    "webdataset_tars",
    "litdata_raw",
    "mosaicml",
    "tfdata",
    "dali",
    "ffcv_beton",
)
