"""SPDL: its ``PipelineBuilder`` with threads.

"by batches": paths are aggregated into batches, which two threads decode and stack. "per item": a pipe over single
files, then ``aggregate``, as in its first example. "ffmpeg": its own decoder, ``spdl.io.load_image_batch``, two at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.peers.work import Batches, Epoch, Work, channels_first

NAME = "SPDL"
NEEDS = ("spdl",)
IMPORTS = ("torch", "spdl.pipeline")
WAYS = ("by batches", "per item", "ffmpeg")


@contextmanager
def loader(work: Work, way: str) -> Iterator[Epoch]:
    import numpy as np
    import torch
    from spdl.pipeline import PipelineBuilder

    decode, targets, threads = work.decode, np.array(work.targets), work.workers

    def one(sample: tuple[str, int]) -> tuple[Any, int]:
        return decode.file(sample[0]), sample[1]

    def stacked(samples: list[tuple[Any, int]]) -> tuple[Any, Any]:
        images, labels = zip(*samples, strict=True)
        return torch.from_numpy(np.stack(images)), torch.tensor(labels)

    def whole(samples: list[tuple[str, int]]) -> tuple[Any, Any]:
        return stacked([one(sample) for sample in samples])

    def ffmpeg(samples: list[tuple[str, int]]) -> tuple[Any, Any]:
        import spdl.io

        paths, labels = zip(*samples, strict=True)
        # Without its default, which keeps the aspect ratio and pads with black.
        scale = spdl.io.get_video_filter_desc(
            scale_width=work.side, scale_height=work.side, scale_mode=None, pix_fmt="rgb24"
        )
        buffer = spdl.io.load_image_batch(list(paths), width=None, height=None, pix_fmt=None, filter_desc=scale)
        return spdl.io.to_torch(buffer), torch.tensor(labels)

    samples = list(zip(work.paths, targets.tolist(), strict=True))

    def epoch() -> Batches:
        builder: Any = PipelineBuilder().add_source(samples)
        if way == "per item":
            builder = builder.pipe(one, concurrency=threads, output_order="input")
            builder = builder.aggregate(work.batch).pipe(stacked)
        else:
            job = ffmpeg if way == "ffmpeg" else whole
            builder = builder.aggregate(work.batch).pipe(job, concurrency=threads, output_order="input")
        pipeline: Any = builder.add_sink(2).build(num_threads=threads)
        with pipeline.auto_stop():
            for images, labels in pipeline:
                yield channels_first(images), labels

    yield epoch
