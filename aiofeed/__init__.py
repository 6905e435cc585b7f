"""aiofeed: feeds PyTorch training. Reads, decodes and copies the next batches while the present one is used."""

from __future__ import annotations

import os
import threading  # noqa: F401 - runtime/threads.py can detect the interpreter's exit if this is imported before it
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from aiofeed import testing
    from aiofeed.cache.disk import DiskCache
    from aiofeed.cache.encoded.database import EncodedCache
    from aiofeed.cache.host import HostCache
    from aiofeed.core.errors import (
        BatchFailedError,
        CacheError,
        CollateError,
        DecodeError,
        DeviceCopyError,
        FeedError,
        IteratorClosedError,
        ReadError,
        SampleError,
        StateError,
        TooManyFailures,
        WorkerDiedError,
    )
    from aiofeed.core.failure_policy import FailurePolicy
    from aiofeed.core.failures import Failure
    from aiofeed.core.limits import Limits
    from aiofeed.core.statistics import FeedStatistics, StorageStatistics
    from aiofeed.core.types import Decoder, Source
    from aiofeed.decoders.image import DecodeImage
    from aiofeed.decoders.media.audio import DecodeAudio
    from aiofeed.decoders.media.clips import Clips
    from aiofeed.decoders.pairs import DecodePair
    from aiofeed.decoders.records import DecodeJSON, DecodeNumpy, DecodeTensor
    from aiofeed.devices.scatter import scatter
    from aiofeed.diagnostics import DeviceReport, device_report
    from aiofeed.engine.fetch.sequences import pad_collate
    from aiofeed.feeder.attach import attach
    from aiofeed.feeder.dataloader import DataLoader
    from aiofeed.feeder.feeder import Feeder
    from aiofeed.feeder.prefetch import prefetch
    from aiofeed.feeder.serve import serve
    from aiofeed.processes.actors.options import RayEngine
    from aiofeed.processes.shared_tensors.api import SharedTensors, attach_tensors, share
    from aiofeed.reports.explanation import Explanation
    from aiofeed.reports.exporters import OpenTelemetryMetrics, PrometheusCollector
    from aiofeed.reports.headroom import Headroom
    from aiofeed.sampling.listers.length_plans import Buckets, TokenBudget
    from aiofeed.sampling.listers.packing import Pack
    from aiofeed.sources.arrays.tokens import Tokens
    from aiofeed.sources.dataset import FromDataset
    from aiofeed.sources.files import Files
    from aiofeed.sources.image_folder import FolderPairs, ImageFolder
    from aiofeed.sources.mixture import Mixture
    from aiofeed.sources.objects.manifest import Manifest
    from aiofeed.sources.shards.mds import MDSShards
    from aiofeed.sources.shards.parquet import ParquetRows
    from aiofeed.sources.shards.tar import TarShards
    from aiofeed.sources.shards.tfrecord import TFRecordShards
    from aiofeed.sources.shards.zip import ZipShards
    from aiofeed.sources.stream import Stream
    from aiofeed.sources.tables.table import Table
    from aiofeed.sources.tensors import Tensors

# Imported when first asked for: a process that only decodes never pays for torch, nor one that only lists files.
_HOMES = {
    # the one object, the bridge alone, and one batch over several devices
    "Feeder": "aiofeed.feeder.feeder",
    "DataLoader": "aiofeed.feeder.dataloader",
    "Buckets": "aiofeed.sampling.listers.length_plans",
    "TokenBudget": "aiofeed.sampling.listers.length_plans",
    "Pack": "aiofeed.sampling.listers.packing",
    "pad_collate": "aiofeed.engine.fetch.sequences",
    "prefetch": "aiofeed.feeder.prefetch",
    "scatter": "aiofeed.devices.scatter",
    # one feeder for several processes
    "serve": "aiofeed.feeder.serve",
    "attach": "aiofeed.feeder.attach",
    # sources, decoders, and what keeps what they give
    "ImageFolder": "aiofeed.sources.image_folder",
    "Files": "aiofeed.sources.files",
    "FolderPairs": "aiofeed.sources.image_folder",
    "Manifest": "aiofeed.sources.objects.manifest",
    "FromDataset": "aiofeed.sources.dataset",
    "Tensors": "aiofeed.sources.tensors",
    "Table": "aiofeed.sources.tables.table",
    "Tokens": "aiofeed.sources.arrays.tokens",
    "Clips": "aiofeed.decoders.media.clips",
    "Mixture": "aiofeed.sources.mixture",
    "Stream": "aiofeed.sources.stream",
    "TarShards": "aiofeed.sources.shards.tar",
    "ZipShards": "aiofeed.sources.shards.zip",
    "MDSShards": "aiofeed.sources.shards.mds",
    "TFRecordShards": "aiofeed.sources.shards.tfrecord",
    "ParquetRows": "aiofeed.sources.shards.parquet",
    "DecodeImage": "aiofeed.decoders.image",
    "DecodePair": "aiofeed.decoders.pairs",
    "DecodeAudio": "aiofeed.decoders.media.audio",
    "DecodeNumpy": "aiofeed.decoders.records",
    "DecodeTensor": "aiofeed.decoders.records",
    "DecodeJSON": "aiofeed.decoders.records",
    "HostCache": "aiofeed.cache.host",
    "DiskCache": "aiofeed.cache.disk",
    "EncodedCache": "aiofeed.cache.encoded.database",
    "Source": "aiofeed.core.types",
    "Decoder": "aiofeed.core.types",
    # between processes
    "share": "aiofeed.processes.shared_tensors.api",
    "attach_tensors": "aiofeed.processes.shared_tensors.api",
    "SharedTensors": "aiofeed.processes.shared_tensors.api",
    # what may be used, and what was
    "Limits": "aiofeed.core.limits",
    "RayEngine": "aiofeed.processes.actors.options",
    "FailurePolicy": "aiofeed.core.failure_policy",
    "FeedStatistics": "aiofeed.core.statistics",
    "StorageStatistics": "aiofeed.core.statistics",
    "Failure": "aiofeed.core.failures",
    "Explanation": "aiofeed.reports.explanation",
    "Headroom": "aiofeed.reports.headroom",
    "PrometheusCollector": "aiofeed.reports.exporters",
    "OpenTelemetryMetrics": "aiofeed.reports.exporters",
    "device_report": "aiofeed.diagnostics",
    "DeviceReport": "aiofeed.diagnostics",
    # errors
    "FeedError": "aiofeed.core.errors",
    "SampleError": "aiofeed.core.errors",
    "ReadError": "aiofeed.core.errors",
    "DecodeError": "aiofeed.core.errors",
    "CollateError": "aiofeed.core.errors",
    "BatchFailedError": "aiofeed.core.errors",
    "TooManyFailures": "aiofeed.core.errors",
    "CacheError": "aiofeed.core.errors",
    "DeviceCopyError": "aiofeed.core.errors",
    "StateError": "aiofeed.core.errors",
    "IteratorClosedError": "aiofeed.core.errors",
    "WorkerDiedError": "aiofeed.core.errors",
}

__all__ = [  # noqa: RUF022 - grouped as above
    "Feeder",
    "DataLoader",
    "Buckets",
    "TokenBudget",
    "Pack",
    "pad_collate",
    "prefetch",
    "scatter",
    "serve",
    "attach",
    "ImageFolder",
    "Files",
    "FolderPairs",
    "Manifest",
    "FromDataset",
    "Tensors",
    "Table",
    "Tokens",
    "Clips",
    "Mixture",
    "Stream",
    "TarShards",
    "ZipShards",
    "MDSShards",
    "TFRecordShards",
    "ParquetRows",
    "DecodeImage",
    "DecodePair",
    "DecodeAudio",
    "DecodeNumpy",
    "DecodeTensor",
    "DecodeJSON",
    "HostCache",
    "DiskCache",
    "EncodedCache",
    "Source",
    "Decoder",
    "share",
    "attach_tensors",
    "SharedTensors",
    "Limits",
    "RayEngine",
    "FailurePolicy",
    "FeedStatistics",
    "StorageStatistics",
    "Failure",
    "Explanation",
    "Headroom",
    "PrometheusCollector",
    "OpenTelemetryMetrics",
    "device_report",
    "DeviceReport",
    "FeedError",
    "SampleError",
    "ReadError",
    "DecodeError",
    "CollateError",
    "BatchFailedError",
    "TooManyFailures",
    "CacheError",
    "DeviceCopyError",
    "StateError",
    "IteratorClosedError",
    "WorkerDiedError",
    "testing",
]


def _log_to_stderr(level: str) -> None:
    """``AIOFEED_LOG=debug``: print what aiofeed does, one line per step of an epoch."""
    import logging

    log, handler = logging.getLogger("aiofeed"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(relativeCreated)9.1f ms %(threadName)s %(name)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(level.upper())
    log.propagate = False


if _level := os.environ.get("AIOFEED_LOG"):
    _log_to_stderr(_level)


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "testing":
        return import_module("aiofeed.testing")
    if name == "__version__":
        return import_module("importlib.metadata").version("aiofeed")
    if name not in _HOMES:
        raise AttributeError(f"module 'aiofeed' has no attribute {name!r}")
    try:
        module = import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        if error.name != "PIL":
            raise
        value: object = _without_pillow(name)
    else:
        value = getattr(module, name)
    globals()[name] = value
    return value


def _without_pillow(name: str) -> type:
    """A class in place of one that needs Pillow. It fails when it is used, so that ``import *`` and ``help`` do not."""

    def __init__(self: object, *_: object, **__: object) -> None:  # noqa: N807
        raise ImportError(
            f"aiofeed.{name} needs Pillow or Pillow-SIMD: pip install 'aiofeed[simd]' or 'aiofeed[pillow]'"
        )

    return type(name, (), {"__init__": __init__, "__module__": "aiofeed", "__doc__": "Needs Pillow."})


def __dir__() -> list[str]:
    """Public names, for tab completion."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
