"""Loaders with decoders of their own: tf.data, DALI and FFCV."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.data import QUALITY, generate
from benchmarks.peers.adapters.processes import Images
from benchmarks.peers.work import Batches, Epoch, Work

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

RATIOS = {"at 1/4": 4, "at 1/8": 8}


@contextmanager
def tf_data(work: Work, way: str) -> Iterator[Epoch]:
    """tf.data reads, decodes and resizes in its graph, then ``batch``, ``prefetch(AUTOTUNE)``.

    Always its own decoder: libjpeg-turbo and bilinear ``tf.image.resize``, which does not antialias, then rounded to
    uint8. "AUTOTUNE" chooses the number of parallel calls; "pool of 8" adds a private thread pool, as its performance
    guide suggests; "antialiased" resizes with antialiasing. "at 1/4" (at least twice the side, for large files) and
    "at 1/8" decode at a scale.
    """
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    side = work.side

    def decode(path: Any, label: Any) -> Any:
        pixels = tf.io.decode_jpeg(tf.io.read_file(path), channels=3, ratio=RATIOS.get(way, 1))
        small = tf.image.resize(pixels, (side, side), antialias=way == "antialiased")
        return tf.cast(tf.round(small), tf.uint8), label

    files: Any = tf.data.Dataset.from_tensor_slices((work.paths, tf.constant(work.targets, tf.int64)))
    batches: Any = files.map(decode, num_parallel_calls=tf.data.AUTOTUNE).batch(work.batch).prefetch(tf.data.AUTOTUNE)
    if way == "pool of 8":
        options = tf.data.Options()
        options.threading.private_threadpool_size = 8
        batches = batches.with_options(options)
    yield batches.as_numpy_iterator


@contextmanager
def dali(work: Work, way: str) -> Iterator[Epoch]:
    """DALI on the CPU, in two threads: its file reader, ``decoders.image`` and ``resize`` (triangular, antialiased).

    The pipeline prefetches across epochs, as always, so an epoch may start with batches that are ready.
    """
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
            yield pixels.as_array()[:size], labels.as_array().reshape(-1)[:size].astype(np.int64)

    yield epoch


@contextmanager
def ffcv(work: Work, way: str) -> Iterator[Epoch]:
    """FFCV: the same pictures as JPEG in its .beton file, by its own ``Loader`` and its own libjpeg-turbo decoder.

    Uses ``RandomResizedCropRGBImageDecoder`` on the whole picture, which resizes without cropping, with OpenCV's
    ``INTER_AREA``; all files must have the same shape for that. Its compilation by Numba counts for the first batch.
    """
    import torch
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import Squeeze, ToTensor
    from PIL import Image

    with Image.open(work.paths[0]) as picture:
        shape = picture.width / picture.height
    decoder = RandomResizedCropRGBImageDecoder((work.side, work.side), (1.0, 1.0), (shape, shape))
    loader: Any = Loader(
        str(beton(work) / "images.beton"),
        batch_size=work.batch,
        num_workers=work.workers,
        os_cache=True,
        order=OrderOption.SEQUENTIAL,
        drop_last=False,
        pipelines={"image": [decoder, ToTensor()], "label": [IntDecoder(), ToTensor(), Squeeze()]},
    )
    yield lambda: ((images, labels.to(torch.int64).reshape(-1)) for images, labels in loader)


class Pictures(Images):
    """A dataset for FFCV's writer, which takes pictures and encodes them again, with the quality of the files."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        return Image.open(self._paths[index]), self._targets[index]


def beton(work: Work) -> Path:
    def write(folder: Path) -> None:
        from ffcv.fields import IntField, RGBImageField
        from ffcv.writer import DatasetWriter

        fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=QUALITY), "label": IntField()}
        DatasetWriter(str(folder / "images.beton"), fields, num_workers=1).from_indexed_dataset(Pictures(work))

    return generate(work.converted / "beton", write)
