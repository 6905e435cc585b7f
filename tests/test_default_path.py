"""The modules that a sample passes in the default case: JPEG files, `DecodeImage`, host tensors, decode threads."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from aiofeed import DecodeImage, Feeder, ImageFolder
from tests.support.paths import PACKAGE

BATCHES = 30
BATCH_SIZE = 6
SIZE = 32
MOST_FILES = 14
JPEG_MAGIC = b"\xff\xd8"


def is_sample(value: Any, depth: int = 2) -> bool:
    """Whether a value is an encoded JPEG, decoded pixels, or a list or tuple that begins with some."""
    if isinstance(value, bytes):
        return value.startswith(JPEG_MAGIC)
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.nbytes >= SIZE * SIZE * 3
    return isinstance(value, list | tuple) and depth > 0 and any(is_sample(each, depth - 1) for each in value[:3])


class SampleTracer:
    """A profile function that finds aiofeed's functions that have a sample in a local variable or return one."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = defaultdict(set)

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event == "return" and code.co_filename.startswith(PACKAGE):
            # A method's own object is left out: what is kept in it, another function has put there.
            values = [value for name, value in frame.f_locals.items() if name != "self"]
            if any(map(is_sample, [*values, result])):
                self.files[code.co_filename.removeprefix(PACKAGE)].add(code.co_qualname)


def test_a_sample_passes_few_files(tmp_path: Path, make_image_folder: Callable[..., Path]) -> None:
    """A sample's bytes pass at most `MOST_FILES` modules of aiofeed from the file to the training loop."""
    images = ImageFolder(make_image_folder(tmp_path / "images", BATCHES * BATCH_SIZE // 3))
    feeder = Feeder(images, decode=DecodeImage(SIZE), batch_size=BATCH_SIZE, shuffle=True)
    tracer, previous = SampleTracer(), (sys.getprofile(), threading.getprofile())
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        batches = [images for images, _ in feeder]
    finally:
        sys.setprofile(previous[0])
        threading.setprofile(previous[1])  # type: ignore[arg-type]
    feeder.close()
    assert [images.shape for images in batches] == [torch.Size((BATCH_SIZE, 3, SIZE, SIZE))] * BATCHES
    for file, functions in sorted(tracer.files.items()):
        print(file, functions)  # pytest shows it if the test fails
    # One file for each kind of thread, so that a tracer that misses a thread is noticed.
    assert {"kernel/sources/files.py", "kernel/decoders/image.py", "kernel/feeder/iterator.py"} <= set(tracer.files)
    assert len(tracer.files) <= MOST_FILES, f"{len(tracer.files)} files: {', '.join(sorted(tracer.files))}"
