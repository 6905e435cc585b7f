"""Loaders that decode in threads, with the same decoder: aiofeed, torchdata.nodes, SPDL and Grain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.contenders import single_epochs
from benchmarks.peers.work import Batches, Epoch, Work


@contextmanager
def feeder(work: Work, way: str) -> Iterator[Epoch]:
    """aiofeed itself: a ``Feeder``, with its engine in threads or in two processes."""
    import aiofeed

    size = (work.side, work.side)
    decode: Any = work.decode
    if work.decoder == "pillow":
        decode = aiofeed.DecodeImage(size, backend="pillow", scaled=False)
    elif work.decoder != "linear":
        backend: Any = {"draft": "pillow"}.get(work.decoder, work.decoder)
        decode = aiofeed.DecodeImage(size, backend=backend)
    engine: Any = way
    with aiofeed.Feeder(
        aiofeed.ImageFolder(work.folder), decode=decode, batch_size=work.batch, engine=engine
    ) as feeder:
        yield single_epochs(feeder)


@contextmanager
def nodes(work: Work, way: str) -> Iterator[Epoch]:
    """Batches of indices, each decoded and collated by ``ParallelMapper`` in threads.

    "per item" is the map over single samples of its examples, which uses a queue for each sample and is slower.
    """
    from torch.utils.data import SequentialSampler, default_collate
    from torchdata.nodes import Batcher, Loader, ParallelMapper, Prefetcher, SamplerWrapper

    paths, targets, decode = work.paths, work.targets, work.decode

    def one(index: int) -> tuple[Any, int]:
        return decode.file(paths[index]), targets[index]

    def whole(indices: list[int]) -> tuple[Any, Any]:
        images, labels = default_collate([one(index) for index in indices])
        return images, labels

    node: Any = SamplerWrapper(SequentialSampler(range(len(paths))))
    if way == "per item":
        node = ParallelMapper(node, one, num_workers=work.workers, method="thread")
        node = ParallelMapper(Batcher(node, work.batch, drop_last=False), default_collate, 1)
    else:
        node = ParallelMapper(Batcher(node, work.batch, drop_last=False), whole, work.workers, method="thread")
    # Loader starts a new epoch at each iter().
    loader: Any = Loader(Prefetcher(node, 2))
    yield lambda: loader


@contextmanager
def spdl(work: Work, way: str) -> Iterator[Epoch]:
    """``PipelineBuilder`` with threads.

    "by batches": paths are aggregated into batches, which two threads decode and stack. "per item": a pipe over single
    files, then ``aggregate``, as in its first example. "ffmpeg": its own decoder, ``spdl.io.load_image_batch``, two at
    a time.
    """
    import numpy as np
    import torch
    from spdl.pipeline import PipelineBuilder

    decode, threads = work.decode, work.workers

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

    samples = list(zip(work.paths, work.targets, strict=True))

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
            yield from pipeline

    yield epoch


@contextmanager
def grain(work: Work, way: str) -> Iterator[Epoch]:
    """A ``MapDataset`` whose samples are whole batches, decoded and stacked in two of its threads.

    "per item" is its usual chain: a map over single samples, ``batch`` and ``to_iter_dataset`` with its default of 16
    threads. The batches are numpy arrays.
    """
    import grain
    import numpy as np

    paths, targets, decode, size = work.paths, np.array(work.targets), work.decode, work.batch

    def whole(number: int) -> tuple[Any, Any]:
        these = slice(number * size, (number + 1) * size)
        return np.stack([decode.file(path) for path in paths[these]]), targets[these]

    def one(index: int) -> tuple[Any, Any]:
        return decode.file(paths[index]), targets[index]

    batches: Any
    if way == "whole batches":
        options = grain.ReadOptions(num_threads=work.workers, prefetch_buffer_size=work.workers + 1)
        batches = grain.MapDataset.range(-(-len(paths) // size)).map(whole).to_iter_dataset(options)
    else:
        dataset: Any = grain.MapDataset.range(len(paths)).map(one)
        batches = dataset.to_iter_dataset(grain.ReadOptions()).batch(size, drop_remainder=False)
    yield lambda: batches
