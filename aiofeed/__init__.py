"""aiofeed: feeds PyTorch training. Reads, decodes and copies the next batches while the present one is used."""

from __future__ import annotations

import os
import threading  # noqa: F401 - runtime/threads.py can detect the interpreter's exit if this is imported before it
import warnings
from collections.abc import Callable
from typing import Any

# The public names by task (each has a page of the API) and their modules. A module is imported when a name of it is
# first used: a process that only decodes never pays for torch, nor one that only lists files. Names that a program
# types are in `aiofeed`; those that it only receives, or that serve one integration, are in the namespace before their
# dot.
_HOMES: dict[str, dict[str, str]] = {
    "Feed a training": {
        "Feeder": "aiofeed.feeder.feeder",
        "DataLoader": "aiofeed.feeder.dataloader",
        "Limits": "aiofeed.core.limits",
        "FailurePolicy": "aiofeed.core.failure_policy",
        "prefetch": "aiofeed.feeder.prefetch",
        "scatter": "aiofeed.devices.scatter",
    },
    "Form batches": {
        "Buckets": "aiofeed.sampling.listers.length_plans",
        "TokenBudget": "aiofeed.sampling.listers.length_plans",
        "Balanced": "aiofeed.sampling.listers.balanced",
        "Pack": "aiofeed.sampling.listers.packing",
        "pad_collate": "aiofeed.engine.fetch.sequences",
    },
    "Use more processes": {
        "Processes": "aiofeed.feeder.arguments",
        "serve": "aiofeed.feeder.serve",
        "attach": "aiofeed.feeder.attach",
        "processes.RayEngine": "aiofeed.processes.actors.cluster",
        "processes.share": "aiofeed.processes.shared_tensors.api",
        "processes.attach_tensors": "aiofeed.processes.shared_tensors.api",
        "processes.SharedTensors": "aiofeed.processes.shared_tensors.api",
    },
    "Observe a run": {
        "reports.FeedStatistics": "aiofeed.core.statistics",
        "reports.StorageStatistics": "aiofeed.core.statistics",
        "reports.Failure": "aiofeed.core.failures",
        "reports.StepSample": "aiofeed.reports.step_samples",
        "reports.Explanation": "aiofeed.reports.explanation",
        "reports.Headroom": "aiofeed.reports.headroom",
        "exporters.PrometheusCollector": "aiofeed.exporters",
        "exporters.OpenTelemetryMetrics": "aiofeed.exporters",
        "device_report": "aiofeed.reports.machine",
        "reports.DeviceReport": "aiofeed.reports.machine",
    },
    "Read data": {
        "Source": "aiofeed.core.types",
        "ImageFolder": "aiofeed.sources.image_folder",
        "Files": "aiofeed.sources.files",
        "FolderPairs": "aiofeed.sources.pairs.folder_pairs",
        "Manifest": "aiofeed.sources.objects.manifest",
        "FromDataset": "aiofeed.sources.dataset",
        "Tensors": "aiofeed.sources.tensors",
        "Tokens": "aiofeed.sources.tokens.windows",
        "Table": "aiofeed.sources.tables.table",
        "Clips": "aiofeed.decoders.media.clips",
        "Episodes": "aiofeed.sources.episodes.episodes",
        "Mixture": "aiofeed.sources.mixture",
        "Stream": "aiofeed.sources.stream",
        "TarShards": "aiofeed.sources.shards.tar",
        "ZipShards": "aiofeed.sources.shards.zip",
        "MDSShards": "aiofeed.sources.shards.mds",
        "TFRecordShards": "aiofeed.sources.shards.tfrecord",
        "ParquetRows": "aiofeed.sources.shards.parquet",
    },
    "Decode samples": {
        "Decoder": "aiofeed.core.types",
        "DecodeImage": "aiofeed.decoders.image",
        "DecodePair": "aiofeed.decoders.pairs",
        "DecodeAudio": "aiofeed.decoders.media.audio",
        "DecodeNumpy": "aiofeed.decoders.records",
        "DecodeTensor": "aiofeed.decoders.records",
        "DecodeJSON": "aiofeed.decoders.records",
    },
    "Cache samples": {
        "HostCache": "aiofeed.cache.host",
        "DiskCache": "aiofeed.cache.disk",
        "EncodedCache": "aiofeed.cache.disk",
    },
    "Handle errors": {
        "FeedError": "aiofeed.core.errors",
        "errors.SampleError": "aiofeed.core.errors",
        "errors.ReadError": "aiofeed.core.errors",
        "errors.DecodeError": "aiofeed.core.errors",
        "errors.CollateError": "aiofeed.core.errors",
        "errors.BatchFailedError": "aiofeed.core.errors",
        "errors.TooManyFailures": "aiofeed.core.errors",
        "errors.CacheError": "aiofeed.core.errors",
        "errors.DeviceCopyError": "aiofeed.core.errors",
        "errors.StateError": "aiofeed.core.errors",
        "errors.IteratorClosedError": "aiofeed.core.errors",
        "errors.WorkerDiedError": "aiofeed.core.errors",
    },
}
# Names that are not public: a word of a user, such as ``weights=``, makes the kernel load them, by ``_load_addon``.
_PLUGS: dict[str, str] = {
    "Augmentation": "aiofeed.decoders.augment",
    "BatchSamplerAdapter": "aiofeed.sampling.listers.sampler",
    "CachedMemory": "aiofeed.engine.resident.cached_data",
    "DataMemory": "aiofeed.engine.resident.data_memory",
    "DeviceCache": "aiofeed.cache.device",
    "DeviceGroup": "aiofeed.devices.scatter",
    "ExcludingOrder": "aiofeed.sampling.listers.computed",
    "LanceTable": "aiofeed.sources.tables.stored",
    "LookAhead": "aiofeed.engine.fetch.look_ahead",
    "MemoryTable": "aiofeed.sources.tables.memory",
    "PackCollate": "aiofeed.engine.fetch.sequences",
    "ParquetTable": "aiofeed.sources.tables.stored",
    "ProgressFeed": "aiofeed.reports.progress",
    "RemoteTokens": "aiofeed.sources.tokens.at_urls",
    "SampleAssembly": "aiofeed.engine.samples",
    "SampleSchedule": "aiofeed.sampling.samples",
    "SamplerAdapter": "aiofeed.sampling.listers.sampler",
    "StaticOutput": "aiofeed.devices.static_output",
    "StreamTable": "aiofeed.sources.tables.stored",
    "WeightedOrder": "aiofeed.sampling.listers.computed",
    "WindowOrder": "aiofeed.sampling.listers.computed",
    "check_picklable": "aiofeed.processes.workers.spawn",
    "dataset_pipeline": "aiofeed.engine.resident.dataset_windows",
    "explain_attached": "aiofeed.reports.remedies",
    "explain_feeder": "aiofeed.reports.feeder",
    "explain_loader": "aiofeed.reports.remedies",
    "explain_prefetch": "aiofeed.reports.remedies",
    "images_at": "aiofeed.sources.objects.samples",
    "list_classes": "aiofeed.sources.objects.samples",
    "measure_lengths": "aiofeed.engine.fetch.sequences",
    "objects_of": "aiofeed.sources.objects.samples",
    "open_workers": "aiofeed.processes.engine",
    "path_of_url": "aiofeed.sources.objects.urls",
    "rank_in_mesh": "aiofeed.sampling.mesh",
    "redacted": "aiofeed.sources.objects.urls",
    "samples_at": "aiofeed.reports.step_samples",
    "sequence_part": "aiofeed.sampling.mesh",
    "tensors_of": "aiofeed.sources.tensors",
    "write_timeline": "aiofeed.reports.timeline",
}
_MODULES = {name: module for names in _HOMES.values() for name, module in names.items()}

_NAMESPACES = ("errors", "exporters", "processes", "reports", "testing")

__all__ = [*(name for name in _MODULES if "." not in name), *_NAMESPACES]


def _log_to_stderr(level: str) -> None:
    """``AIOFEED_LOG=debug``: print what aiofeed does, one line per step of an epoch."""
    import logging

    if not isinstance(logging.getLevelName(level.upper()), int):
        # An import that fails for a log would end the script.
        warnings.warn(f"AIOFEED_LOG={level!r} is no level: set it to debug, info, warning or error", stacklevel=2)
        return
    log, handler = logging.getLogger("aiofeed"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(relativeCreated)9.1f ms %(threadName)s %(name)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(level.upper())
    log.propagate = False


if _level := os.environ.get("AIOFEED_LOG"):
    _log_to_stderr(_level)


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _NAMESPACES:
        return import_module(f"aiofeed.{name}")
    if name == "__version__":
        return import_module("importlib.metadata").version("aiofeed")
    if name in ("load_ipython_extension", "unload_ipython_extension"):
        return getattr(import_module("aiofeed.feeder.run.hook"), name)
    if name not in _MODULES:
        moved = next((each for each in _MODULES if each.endswith(f".{name}")), None)
        if moved is None:
            raise AttributeError(f"module 'aiofeed' has no attribute {name!r}")
        warnings.warn(f"aiofeed.{name} is now aiofeed.{moved}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(f"aiofeed.{moved.partition('.')[0]}"), name)  # type: ignore[no-any-return]
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


def _namespace(module: str) -> tuple[list[str], Callable[[str], object]]:
    """``__all__`` and ``__getattr__`` of a module that has public names."""
    prefix = f"{module.removeprefix('aiofeed.')}."
    homes = {name.removeprefix(prefix): home for name, home in _MODULES.items() if name.startswith(prefix)}

    def get(name: str) -> object:
        from importlib import import_module

        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)  # type: ignore[no-any-return]

    return list(homes), get


def _load_addon(name: str, needed_by: str) -> Any:
    """Return a name of ``_HOMES`` or ``_PLUGS``. The kernel imports add-ons in no other way.

    Args:
        name: Such as "Stream" or "reports.Headroom".
        needed_by: The argument or call of a user that needs it, such as "weights=", for the message.

    Raises:
        ImportError: The add-on is missing.
    """
    from importlib import import_module

    try:
        return getattr(import_module(_MODULES.get(name) or _PLUGS[name]), name.rpartition(".")[2])
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("aiofeed."):
            raise
        addon = ".".join(error.name.split(".")[:2])
        raise ImportError(f"{needed_by} needs {addon}, which is missing here: install aiofeed with it") from error


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
