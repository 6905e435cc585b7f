"""The loaders: how each is used, and their adapters by name. No loader shuffles."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.contenders import single_epochs
from benchmarks.data import QUALITY, generate
from benchmarks.peers.work import WORKERS, Adapter, Batches, Epoch, Work


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


@contextmanager
def data_loader(work: Work, way: str) -> Iterator[Epoch]:
    """torch's ``DataLoader``: a map-style Dataset of [H, W, 3] arrays, two worker processes, its own collation.

    "persistent" keeps the workers from epoch to epoch; "new workers" is its default, which starts them for each.
    """
    from torch.utils.data import DataLoader

    dataset: Any = Images(work)
    loader: Any = DataLoader(dataset, work.batch, num_workers=work.workers, persistent_workers=way == "persistent")
    yield lambda: loader


class Images:
    """A Dataset of pictures and class numbers."""

    def __init__(self, work: Work) -> None:
        self._paths, self._targets, self._decode = work.paths, work.targets, work.decode

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._decode.file(self._paths[index]), self._targets[index]


@contextmanager
def webdataset(work: Work, way: str) -> Iterator[Epoch]:
    """The same files in a tar shard for each of two workers, decoded and batched inside the workers.

    The loader is a ``WebLoader`` with ``batch_size=None``, as its documentation recommends.
    """
    import numpy as np
    import torch
    import webdataset

    decode = work.decode

    def collate(samples: list[tuple[bytes, bytes]]) -> tuple[Any, Any]:
        images = np.stack([decode(data) for data, _ in samples])
        return torch.from_numpy(images), torch.tensor([int(label) for _, label in samples])

    urls = sorted(map(str, tars(work).glob("*.tar")))
    dataset: Any = webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=webdataset.single_node_only)
    dataset = dataset.to_tuple("jpg", "cls").batched(work.batch, collation_fn=collate, partial=True)
    loader: Any = webdataset.WebLoader(
        dataset, batch_size=None, num_workers=work.workers, persistent_workers=True, multiprocessing_context="fork"
    )
    yield lambda: loader


def tars(work: Work) -> Path:
    """Shards with batch after batch in rotation, so that two workers give the files in their order."""

    def write(folder: Path) -> None:
        for shard in range(WORKERS):
            with tarfile.open(folder / f"{shard:03d}.tar", "w") as tar:
                for number, path in enumerate(work.paths):
                    if number // work.batch % WORKERS == shard:
                        tar.add(path, f"{number:08d}.jpg")
                        label = str(work.targets[number]).encode()
                        member = tarfile.TarInfo(f"{number:08d}.cls")
                        member.size = len(label)
                        tar.addfile(member, io.BytesIO(label))

    return generate(work.converted / f"tars-{work.batch}", write)


@contextmanager
def litdata(work: Work, way: str) -> Iterator[Epoch]:
    """LitData's ``StreamingRawDataset`` over the folder of files, in a ``DataLoader`` with two persistent workers.

    It reads batches with its own event loop; files are decoded in ``collate_fn``, as its documentation recommends.
    """
    import numpy as np
    import torch
    from litdata import StreamingRawDataset
    from torch.utils.data import DataLoader

    decode, numbers = work.decode, work.targets

    class Raw(StreamingRawDataset):  # type: ignore[misc]
        def setup(self, files: list[Any]) -> list[Any]:
            return sorted((file for file in files if file.path.endswith(".jpg")), key=lambda file: file.path)

    dataset: Any = Raw(work.folder)
    assert [item.path for item in dataset.items] == work.paths

    class Labelled:
        """Adds the class numbers."""

        def __len__(self) -> int:
            return len(dataset)

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return list(zip(dataset.__getitems__(indices), [numbers[index] for index in indices], strict=True))

    def collate(samples: list[tuple[bytes, int]]) -> tuple[Any, Any]:
        data, labels = zip(*samples, strict=True)
        return torch.from_numpy(np.stack([decode(each) for each in data])), torch.tensor(labels)

    labelled: Any = Labelled()
    loader: Any = DataLoader(
        labelled, work.batch, num_workers=work.workers, persistent_workers=True, collate_fn=collate
    )
    yield lambda: loader


@contextmanager
def mosaicml(work: Work, way: str) -> Iterator[Epoch]:
    """MosaicML's ``StreamingDataset`` over the same files in MDS shards on the local disk, in two persistent workers.

    The JPEG bytes are stored as "bytes" and decoded by the shared decoder in ``__getitem__``.
    """
    from torch.utils.data import DataLoader

    from benchmarks.peers.mosaicml_package import streaming

    shards, decode = mds(work), work.decode
    streaming.base.util.clean_stale_shared_memory()

    class Stored(streaming.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            return decode(sample["image"]), int(sample["label"])

    dataset: Any = Stored(local=str(shards), batch_size=work.batch, shuffle=False)
    loader: Any = DataLoader(dataset, work.batch, num_workers=work.workers, persistent_workers=True)
    yield lambda: loader


def mds(work: Work) -> Path:
    def write(folder: Path) -> None:
        from benchmarks.peers.mosaicml_package import streaming

        columns = {"image": "bytes", "label": "int"}
        with streaming.MDSWriter(out=str(folder / "shards"), columns=columns) as writer:
            for path, target in zip(work.paths, work.targets, strict=True):
                writer.write({"image": Path(path).read_bytes(), "label": target})
        for file in (folder / "shards").iterdir():
            file.rename(folder / file.name)
        (folder / "shards").rmdir()

    return generate(work.converted / "mds", write)


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


_TORCH = "torch.utils.data"

ADAPTERS = {
    "aiofeed": Adapter(feeder, ("thread", "process:2"), ("torch", "aiofeed:Feeder", "aiofeed:DecodeImage")),
    "DataLoader": Adapter(data_loader, ("persistent", "new workers"), (_TORCH,), ("torch",)),
    "torchdata.nodes": Adapter(nodes, ("per item", "by batches"), (_TORCH, "torchdata.nodes"), ("torchdata",)),
    "SPDL": Adapter(spdl, ("by batches", "per item", "ffmpeg"), ("torch", "spdl.pipeline"), ("spdl",)),
    "Grain": Adapter(grain, ("whole batches", "per item"), ("grain", "numpy"), ("grain",)),
    "WebDataset": Adapter(webdataset, ("tars",), (_TORCH, "webdataset", "numpy"), ("webdataset",), tars),
    "LitData": Adapter(litdata, ("raw",), (_TORCH, "litdata", "numpy"), ("litdata",)),
    "MosaicML": Adapter(
        mosaicml,
        ("MDS",),
        (_TORCH, "benchmarks.peers.mosaicml_package"),
        ("streaming",),
        mds,
    ),
    "tf.data": Adapter(
        tf_data,
        ("AUTOTUNE", "pool of 8", "antialiased", "at 1/4", "at 1/8"),
        ("tensorflow", "numpy"),
        ("tensorflow",),
    ),
    "DALI": Adapter(
        dali,
        ("CPU",),
        ("nvidia.dali", "nvidia.dali.fn", "nvidia.dali.plugin.base_iterator", "numpy"),
        ("nvidia.dali",),
    ),
    "FFCV": Adapter(ffcv, (".beton",), ("torch", "numpy", "ffcv.loader"), ("ffcv",), beton),
}
