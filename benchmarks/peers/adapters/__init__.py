"""The adapters by the names of their loaders; no loader shuffles."""

from __future__ import annotations

from benchmarks.peers.adapters import own_decoders, processes, threads
from benchmarks.peers.work import Adapter

_TORCH = "torch.utils.data"

ADAPTERS = {
    "aiofeed": Adapter(threads.feeder, ("thread", "process:2"), ("torch", "aiofeed:Feeder", "aiofeed:DecodeImage")),
    "DataLoader": Adapter(processes.data_loader, ("persistent", "new workers"), (_TORCH,), ("torch",)),
    "torchdata.nodes": Adapter(threads.nodes, ("per item", "by batches"), (_TORCH, "torchdata.nodes"), ("torchdata",)),
    "SPDL": Adapter(threads.spdl, ("by batches", "per item", "ffmpeg"), ("torch", "spdl.pipeline"), ("spdl",)),
    "Grain": Adapter(threads.grain, ("whole batches", "per item"), ("grain", "numpy"), ("grain",)),
    "WebDataset": Adapter(
        processes.webdataset, ("tars",), (_TORCH, "webdataset", "numpy"), ("webdataset",), processes.tars
    ),
    "LitData": Adapter(processes.litdata, ("raw",), (_TORCH, "litdata", "numpy"), ("litdata",)),
    "MosaicML": Adapter(
        processes.mosaicml,
        ("MDS",),
        (_TORCH, "benchmarks.peers.adapters.mosaicml_package"),
        ("streaming",),
        processes.mds,
    ),
    "tf.data": Adapter(
        own_decoders.tf_data,
        ("AUTOTUNE", "pool of 8", "antialiased", "at 1/4", "at 1/8"),
        ("tensorflow", "numpy"),
        ("tensorflow",),
    ),
    "DALI": Adapter(
        own_decoders.dali,
        ("CPU",),
        ("nvidia.dali", "nvidia.dali.fn", "nvidia.dali.plugin.base_iterator", "numpy"),
        ("nvidia.dali",),
    ),
    "FFCV": Adapter(own_decoders.ffcv, (".beton",), ("torch", "numpy", "ffcv.loader"), ("ffcv",), own_decoders.beton),
}
