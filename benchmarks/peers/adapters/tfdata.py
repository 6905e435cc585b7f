"""tf.data: reads, decodes and resizes in its graph, then ``batch``, ``prefetch(AUTOTUNE)``.

Always its own decoder: libjpeg-turbo and bilinear ``tf.image.resize``, which does not antialias, then rounded to uint8.
"AUTOTUNE" chooses the number of parallel calls; "pool of 8" adds a private thread pool, as its performance guide
suggests; "antialiased" resizes with antialiasing. For "draft" and "turbo" it decodes at a quarter ("at 1/4", at least
twice the side for these files) or an eighth ("at 1/8").
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.peers.work import Batches, Epoch, Work, channels_first

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

NAME = "tf.data"
NEEDS = ("tensorflow",)
IMPORTS = ("tensorflow", "numpy")
WAYS = ("AUTOTUNE", "pool of 8", "antialiased", "at 1/4", "at 1/8")
RATIOS = {"at 1/4": 4, "at 1/8": 8}


@contextmanager
def loader(work: Work, way: str) -> Iterator[Epoch]:
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

    def epoch() -> Batches:
        for images, labels in batches.as_numpy_iterator():
            yield channels_first(images), labels

    yield epoch
