"""FFCV: the same pictures as JPEG in its .beton file, read by its own ``Loader`` and decoded by its own libjpeg-turbo
decoder.

Uses ``RandomResizedCropRGBImageDecoder`` on the whole picture, which resizes without cropping, with OpenCV's
``INTER_AREA``; all files must have the same shape for that. Its compilation by Numba counts for the first batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.data import QUALITY, generate
from benchmarks.peers.work import Batches, Epoch, Work, channels_first

NAME = "FFCV"
NEEDS = ("ffcv",)
IMPORTS = ("torch", "numpy", "ffcv.loader")
WAYS = (".beton",)


def prepare(work: Work) -> Path:
    return generate(work.converted / "beton", lambda folder: write(folder, work))


@contextmanager
def loader(work: Work, way: str) -> Iterator[Epoch]:
    import torch
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import Squeeze, ToTensor
    from PIL import Image

    file = prepare(work) / "images.beton"
    with Image.open(work.paths[0]) as picture:
        shape = picture.width / picture.height
    pipelines = {
        "image": [RandomResizedCropRGBImageDecoder((work.side, work.side), (1.0, 1.0), (shape, shape)), ToTensor()],
        "label": [IntDecoder(), ToTensor(), Squeeze()],
    }
    batches: Any = Loader(
        str(file),
        batch_size=work.batch,
        num_workers=work.workers,
        os_cache=True,
        order=OrderOption.SEQUENTIAL,
        drop_last=False,
        pipelines=pipelines,
    )

    def epoch() -> Batches:
        for images, labels in batches:
            yield channels_first(images), labels.to(torch.int64).reshape(-1)

    yield epoch


class Pictures:
    """A dataset for FFCV's writer, which takes pictures and encodes them again, with the quality of the files."""

    def __init__(self, work: Work) -> None:
        self._paths, self._targets = work.paths, work.targets

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        return Image.open(self._paths[index]), self._targets[index]


def write(folder: Path, work: Work) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=QUALITY), "label": IntField()}
    DatasetWriter(str(folder / "images.beton"), fields, num_workers=1).from_indexed_dataset(Pictures(work))
