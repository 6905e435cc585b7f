"""The adapters, one module per loader; see ``benchmarks.peers.work``."""

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
