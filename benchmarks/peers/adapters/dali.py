"""DALI on the CPU, in two threads: its file reader, ``decoders.image`` and ``resize`` (triangular, antialiased).

The pipeline prefetches across epochs, as always, so an epoch may start with batches that are ready.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.peers.work import Batches, Epoch, Work, channels_first

NAME = "DALI"
NEEDS = ("nvidia.dali",)
IMPORTS = ("nvidia.dali", "nvidia.dali.fn", "nvidia.dali.plugin.base_iterator", "numpy")
WAYS = ("CPU",)


@contextmanager
def loader(work: Work, way: str) -> Iterator[Epoch]:
    import numpy as np
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=work.batch, num_threads=work.workers, device_id=None)  # type: ignore[misc]
    def images() -> Any:
        data, label = fn.readers.file(files=work.paths, labels=work.targets, name="files", pad_last_batch=True)
        pixels = fn.decoders.image(data, device="cpu", output_type=types.RGB)
        return fn.resize(pixels, resize_x=work.side, resize_y=work.side, interp_type=types.INTERP_TRIANGULAR), label

    pipe: Any = images(prefetch_queue_depth=2)
    pipe.build()
    count = len(work.paths)

    def epoch() -> Batches:
        for first in range(0, count, work.batch):
            pixels, labels = pipe.run()
            size = min(work.batch, count - first)  # the last batch is padded
            yield channels_first(pixels.as_array()[:size]), labels.as_array().reshape(-1)[:size].astype(np.int64)

    yield epoch
