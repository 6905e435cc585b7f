"""aiofeed: feeds PyTorch training. Reads, decodes and copies the next batches while the present one is used."""

from __future__ import annotations

import os
import threading  # noqa: F401 - runtime/threads.py can detect the interpreter's exit if this is imported before it

# The public names, as docs/api.md groups them, and their modules. A module is imported when a name of it is first used:
# a process that only decodes never pays for torch, nor one that only lists files.
_HOMES: dict[str, dict[str, str]] = {
    "Feeding": {
        "Feeder": "aiofeed.feeder.feeder",
        "DataLoader": "aiofeed.feeder.dataloader",
        "Buckets": "aiofeed.sampling.listers.length_plans",
        "TokenBudget": "aiofeed.sampling.listers.length_plans",
        "Balanced": "aiofeed.sampling.listers.balanced",
        "Pack": "aiofeed.sampling.listers.packing",
        "pad_collate": "aiofeed.engine.fetch.sequences",
        "Limits": "aiofeed.core.limits",
        "Processes": "aiofeed.feeder.arguments",
        "RayEngine": "aiofeed.processes.actors.cluster",
        "FailurePolicy": "aiofeed.core.failure_policy",
        "FeedStatistics": "aiofeed.core.statistics",
        "StorageStatistics": "aiofeed.core.statistics",
        "Failure": "aiofeed.core.failures",
        "StepSample": "aiofeed.sampling.receipts",
        "Explanation": "aiofeed.reports.explanation",
        "Headroom": "aiofeed.reports.headroom",
        "prefetch": "aiofeed.feeder.prefetch",
        "scatter": "aiofeed.devices.scatter",
        "serve": "aiofeed.feeder.serve",
        "attach": "aiofeed.feeder.attach",
        "share": "aiofeed.processes.shared_tensors.api",
        "attach_tensors": "aiofeed.processes.shared_tensors.api",
        "SharedTensors": "aiofeed.processes.shared_tensors.api",
    },
    "Monitoring": {
        "PrometheusCollector": "aiofeed.reports.exporters",
        "OpenTelemetryMetrics": "aiofeed.reports.exporters",
    },
    "The machine": {
        "device_report": "aiofeed.reports.machine",
        "DeviceReport": "aiofeed.reports.machine",
    },
    "Sources": {
        "Source": "aiofeed.core.types",
        "ImageFolder": "aiofeed.sources.image_folder",
        "Files": "aiofeed.sources.files",
        "FolderPairs": "aiofeed.sources.image_folder",
        "Manifest": "aiofeed.sources.objects.manifest",
        "FromDataset": "aiofeed.sources.dataset",
        "Tensors": "aiofeed.sources.tensors",
        "Tokens": "aiofeed.sources.tokens.windows",
        "Table": "aiofeed.sources.tables.table",
        "Clips": "aiofeed.decoders.media.clips",
        "Mixture": "aiofeed.sources.mixture",
        "Stream": "aiofeed.sources.stream",
        "TarShards": "aiofeed.sources.shards.tar",
        "ZipShards": "aiofeed.sources.shards.zip",
        "MDSShards": "aiofeed.sources.shards.mds",
        "TFRecordShards": "aiofeed.sources.shards.tfrecord",
        "ParquetRows": "aiofeed.sources.shards.parquet",
    },
    "Decoders": {
        "Decoder": "aiofeed.core.types",
        "DecodeImage": "aiofeed.decoders.image",
        "DecodePair": "aiofeed.decoders.pairs",
        "DecodeAudio": "aiofeed.decoders.media.audio",
        "DecodeNumpy": "aiofeed.decoders.records",
        "DecodeTensor": "aiofeed.decoders.records",
        "DecodeJSON": "aiofeed.decoders.records",
    },
    "Caches": {
        "HostCache": "aiofeed.cache.host",
        "DiskCache": "aiofeed.cache.disk",
        "EncodedCache": "aiofeed.cache.encoded.database",
    },
    "Errors": {
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
    },
}
_MODULES = {name: module for names in _HOMES.values() for name, module in names.items()}

__all__ = [*_MODULES, "testing"]


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
    if name not in _MODULES:
        raise AttributeError(f"module 'aiofeed' has no attribute {name!r}")
    try:
        module = import_module(_MODULES[name])
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
