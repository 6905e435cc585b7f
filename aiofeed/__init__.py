"""aiofeed: feeds PyTorch training. Reads, decodes and copies the next batches while the present one is used."""

from __future__ import annotations

import logging
import os
import sys
import threading  # noqa: F401 - kernel/runtime/threads.py can detect the interpreter's exit if this is imported before it
import warnings
from collections.abc import Callable
from typing import Any, TextIO

# The public names by task (each has a page of the API) and their modules. A module is imported when a name of it is
# first used: a process that only decodes never pays for torch, nor one that only lists files. Names that a program
# types are in `aiofeed`; those that it only receives, or that serve one integration, are in the namespace before their
# dot.
_HOMES: dict[str, dict[str, str]] = {
    "Feed a training": {
        "Feeder": "aiofeed.kernel.feeder.feeder",
        "DataLoader": "aiofeed.loader.dataloader",
        "Limits": "aiofeed.kernel.core.limits",
        "FailurePolicy": "aiofeed.kernel.core.failures",
        "prefetch": "aiofeed.loader.prefetch",
        "scatter": "aiofeed.device_groups.scatter",
    },
    "Form batches": {
        "Buckets": "aiofeed.plans.length_plans",
        "TokenBudget": "aiofeed.plans.length_plans",
        "Balanced": "aiofeed.plans.balanced",
        "Pack": "aiofeed.plans.packing",
        "pad_collate": "aiofeed.plans.sequences",
    },
    "Use more processes": {
        "Processes": "aiofeed.kernel.feeder.arguments",
        "serve": "aiofeed.serving.serve",
        "attach": "aiofeed.serving.attach",
        "processes.RayEngine": "aiofeed.workers.ray.cluster",
        "processes.share": "aiofeed.serving.shared_tensors.api",
        "processes.attach_tensors": "aiofeed.serving.shared_tensors.api",
        "processes.SharedTensors": "aiofeed.serving.shared_tensors.api",
    },
    "Observe a run": {
        "reports.FeedStatistics": "aiofeed.kernel.core.statistics",
        "reports.StorageStatistics": "aiofeed.kernel.core.statistics",
        "reports.Failure": "aiofeed.kernel.core.failures",
        "reports.StepSample": "aiofeed.reports.step_samples",
        "reports.Explanation": "aiofeed.reports.explanation",
        "reports.Headroom": "aiofeed.reports.headroom",
        "reports.Timeline": "aiofeed.reports.timeline",
        "exporters.PrometheusCollector": "aiofeed.exporters",
        "exporters.OpenTelemetryMetrics": "aiofeed.exporters",
        "device_report": "aiofeed.reports.machine",
        "reports.DeviceReport": "aiofeed.reports.machine",
    },
    "Read data": {
        "Source": "aiofeed.kernel.core.types",
        "ImageFolder": "aiofeed.kernel.sources.image_folder",
        "Files": "aiofeed.kernel.sources.files",
        "VideoFolder": "aiofeed.media.folders",
        "AudioFolder": "aiofeed.media.folders",
        "FolderPairs": "aiofeed.media.folder_pairs",
        "Manifest": "aiofeed.tables.manifest",
        "FromDataset": "aiofeed.kernel.sources.dataset",
        "Tensors": "aiofeed.resident.tensors",
        "Tokens": "aiofeed.tokens.windows",
        "Documents": "aiofeed.tokens.documents",
        "Table": "aiofeed.tables.table",
        "Arrays": "aiofeed.arrays.arrays",
        "Clips": "aiofeed.media.clips",
        "Episodes": "aiofeed.episodes.episodes",
        "Mixture": "aiofeed.mixtures.mixture",
        "Stream": "aiofeed.streams.stream",
        "TarShards": "aiofeed.shards.tar",
        "ZipShards": "aiofeed.shards.zip",
        "MDSShards": "aiofeed.shards.mds",
        "TFRecordShards": "aiofeed.shards.tfrecord",
        "ArrayRecordShards": "aiofeed.shards.foreign.array_record",
        "LitDataShards": "aiofeed.shards.foreign.litdata",
        "ParquetRows": "aiofeed.shards.parquet",
    },
    "Decode samples": {
        "Decoder": "aiofeed.kernel.core.types",
        "DecodeImage": "aiofeed.kernel.decoders.image",
        "DecodePair": "aiofeed.media.pairs",
        "DecodeAudio": "aiofeed.media.audio",
        "DecodeNumpy": "aiofeed.media.records",
        "DecodeTensor": "aiofeed.media.records",
        "DecodeJSON": "aiofeed.media.records",
    },
    "Cache samples": {
        "HostCache": "aiofeed.cache.host",
        "DiskCache": "aiofeed.cache.disk",
        "EncodedCache": "aiofeed.cache.disk",
    },
    "Handle errors": {
        "FeedError": "aiofeed.kernel.core.errors",
        "errors.SampleError": "aiofeed.kernel.core.errors",
        "errors.ReadError": "aiofeed.kernel.core.errors",
        "errors.DecodeError": "aiofeed.kernel.core.errors",
        "errors.CollateError": "aiofeed.kernel.core.errors",
        "errors.BatchFailedError": "aiofeed.kernel.core.errors",
        "errors.TooManyFailures": "aiofeed.kernel.core.errors",
        "errors.CacheError": "aiofeed.kernel.core.errors",
        "errors.DeviceCopyError": "aiofeed.kernel.core.errors",
        "errors.StateError": "aiofeed.kernel.core.errors",
        "errors.IteratorClosedError": "aiofeed.kernel.core.errors",
        "errors.WorkerDiedError": "aiofeed.kernel.core.errors",
    },
}
# Names that are not public: a word of a user, such as ``weights=``, makes the kernel load them, by ``_load_addon``.
_PLUGS: dict[str, str] = {
    "Augmentation": "aiofeed.media.augment",
    "BatchSamplerAdapter": "aiofeed.plans.sampler",
    "InlineData": "aiofeed.resident.pipeline",
    "InlinePlans": "aiofeed.resident.planned_windows",
    "DeviceCache": "aiofeed.resident.device_cache",
    "DeviceGroup": "aiofeed.device_groups.scatter",
    "ExcludingOrder": "aiofeed.plans.computed",
    "LanceTable": "aiofeed.tables.stored",
    "LookAhead": "aiofeed.objects.look_ahead",
    "MemoryTable": "aiofeed.tables.memory",
    "PackCollate": "aiofeed.plans.sequences",
    "ParquetTable": "aiofeed.tables.stored",
    "ParsedTable": "aiofeed.tables.parsed",
    "ProgressFeed": "aiofeed.reports.progress",
    "RemoteTokens": "aiofeed.tokens.at_urls",
    "SampleAssembly": "aiofeed.sample_order.sample_assembly",
    "SampleSchedule": "aiofeed.sample_order.sample_schedule",
    "SamplerAdapter": "aiofeed.plans.sampler",
    "StreamTable": "aiofeed.tables.stored",
    "WeightedOrder": "aiofeed.plans.computed",
    "WindowOrder": "aiofeed.plans.computed",
    "check_kept": "aiofeed.media.pictures.kept",
    "check_picklable": "aiofeed.workers.spawn",
    "decode_first": "aiofeed.streams.decoded",
    "decode_kept": "aiofeed.media.pictures.kept",
    "decode_plain": "aiofeed.media.pictures.plain",
    "dataset_pipeline": "aiofeed.resident.dataset_windows",
    "explain_attached": "aiofeed.reports.remedies",
    "explain_feeder": "aiofeed.reports.feeder",
    "explain_loader": "aiofeed.reports.remedies",
    "explain_prefetch": "aiofeed.reports.remedies",
    "hint_at": "aiofeed.loader.habits",
    "images_at": "aiofeed.objects.samples",
    "list_classes": "aiofeed.objects.samples",
    "measure_lengths": "aiofeed.plans.sequences",
    "objects_of": "aiofeed.objects.samples",
    "open_workers": "aiofeed.workers.engine",
    "path_of_url": "aiofeed.objects.urls",
    "rank_in_mesh": "aiofeed.plans.mesh",
    "required_simplejpeg_decoder": "aiofeed.media.pictures.plain",
    "samples_at": "aiofeed.reports.step_samples",
    "sequence_part": "aiofeed.plans.mesh",
    "tensors_of": "aiofeed.resident.tensors",
    "with_static_outputs": "aiofeed.device_groups.static_output",
    "write_timeline": "aiofeed.reports.timeline",
}
_MODULES = {name: module for names in _HOMES.values() for name, module in names.items()}

_NAMESPACES = ("errors", "exporters", "processes", "reports", "testing")

__all__ = [*(name for name in _MODULES if "." not in name), *_NAMESPACES]


class _LastResort(logging.StreamHandler[TextIO]):
    """Prints warnings with the name of aiofeed if the program has no handler for them.

    ``logging.lastResort`` prints the message alone.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        self.stream = sys.stderr  # of now: notebooks and tests replace it
        return not logging.root.handlers and logging.getLogger("aiofeed").handlers == [self]


_last_resort = _LastResort()
_last_resort.setLevel(logging.WARNING)
_last_resort.setFormatter(logging.Formatter("aiofeed: %(message)s"))
logging.getLogger("aiofeed").addHandler(_last_resort)


def _log_to_stderr(level: str) -> None:
    """``AIOFEED_LOG=debug``: print what aiofeed does, one line per step of an epoch."""
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
        return getattr(import_module("aiofeed.loader.run.hook"), name)
    if name not in _MODULES:
        moved = next((each for each in _MODULES if each.endswith(f".{name}")), None)
        if moved is None:
            hint = "" if name.startswith("_") else _hint_at("aiofeed", name)
            raise AttributeError(f"module 'aiofeed' has no attribute {name!r}{hint}")
        warnings.warn(f"aiofeed.{name} is now aiofeed.{moved}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(f"aiofeed.{moved.partition('.')[0]}"), name)  # type: ignore[no-any-return]
    try:
        value: object = getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "PIL":
            raise
        value = _without_pillow(name)
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


def _hint_at(owner: str, name: Any) -> Any:
    """Return what to write in place of a name or source that users of other loaders try; empty without the add-on."""
    try:
        return _load_addon("hint_at", "a hint")(owner, name)
    except ImportError:
        return ""


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
