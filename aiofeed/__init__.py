"""aiofeed: feeds PyTorch training. Reads, decodes and copies the next batches while the present one is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from aiofeed import testing
    from aiofeed.attached import attach
    from aiofeed.bridge import prefetch
    from aiofeed.cache.disk import DiskCache
    from aiofeed.cache.host import HostCache
    from aiofeed.config import Limits
    from aiofeed.counters import FeedStatistics
    from aiofeed.decoders.image import DecodeImage
    from aiofeed.diagnosis import DeviceReport, device_report
    from aiofeed.errors import (
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
    from aiofeed.failures import Failure
    from aiofeed.feeder import Feeder
    from aiofeed.policy import FailurePolicy
    from aiofeed.scattering import scatter
    from aiofeed.server import serve
    from aiofeed.sharing.shared_tensors import SharedTensors, attach_tensors, share
    from aiofeed.sources.dataset import FromDataset
    from aiofeed.sources.files import Files
    from aiofeed.sources.folder import ImageFolder
    from aiofeed.sources.tensors import Tensors
    from aiofeed.types import Decoder, Source

# Imported when first asked for: a process that only decodes never pays for torch, nor one that only lists files.
_HOMES = {
    # the one object, the bridge alone, and one batch over several devices
    "Feeder": "aiofeed.feeder",
    "prefetch": "aiofeed.bridge",
    "scatter": "aiofeed.scattering",
    # one feeder for several processes
    "serve": "aiofeed.server",
    "attach": "aiofeed.attached",
    # sources, decoders, and what keeps what they give
    "ImageFolder": "aiofeed.sources.folder",
    "Files": "aiofeed.sources.files",
    "FromDataset": "aiofeed.sources.dataset",
    "Tensors": "aiofeed.sources.tensors",
    "DecodeImage": "aiofeed.decoders.image",
    "HostCache": "aiofeed.cache.host",
    "DiskCache": "aiofeed.cache.disk",
    "Source": "aiofeed.types",
    "Decoder": "aiofeed.types",
    # between processes
    "share": "aiofeed.sharing.shared_tensors",
    "attach_tensors": "aiofeed.sharing.shared_tensors",
    "SharedTensors": "aiofeed.sharing.shared_tensors",
    # what may be used, and what was
    "Limits": "aiofeed.config",
    "FailurePolicy": "aiofeed.policy",
    "FeedStatistics": "aiofeed.counters",
    "Failure": "aiofeed.failures",
    "device_report": "aiofeed.diagnosis",
    "DeviceReport": "aiofeed.diagnosis",
    # errors
    "FeedError": "aiofeed.errors",
    "SampleError": "aiofeed.errors",
    "ReadError": "aiofeed.errors",
    "DecodeError": "aiofeed.errors",
    "CollateError": "aiofeed.errors",
    "BatchFailedError": "aiofeed.errors",
    "TooManyFailures": "aiofeed.errors",
    "CacheError": "aiofeed.errors",
    "DeviceCopyError": "aiofeed.errors",
    "StateError": "aiofeed.errors",
    "IteratorClosedError": "aiofeed.errors",
    "WorkerDiedError": "aiofeed.errors",
}

__all__ = [  # noqa: RUF022 - grouped as above
    "Feeder",
    "prefetch",
    "scatter",
    "serve",
    "attach",
    "ImageFolder",
    "Files",
    "FromDataset",
    "Tensors",
    "DecodeImage",
    "HostCache",
    "DiskCache",
    "Source",
    "Decoder",
    "share",
    "attach_tensors",
    "SharedTensors",
    "Limits",
    "FailurePolicy",
    "FeedStatistics",
    "Failure",
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
        if error.name == "PIL":
            raise ImportError(
                f"aiofeed.{name} needs Pillow or Pillow-SIMD: pip install 'aiofeed[simd]' or 'aiofeed[pillow]'"
            ) from error
        raise
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
