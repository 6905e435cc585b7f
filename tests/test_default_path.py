"""The number of modules that a sample passes in the default case: JPEG files, `DecodeImage`, host tensors, threads."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import aiofeed
from aiofeed import DecodeImage, Feeder, ImageFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

PACKAGE = Path(aiofeed.__file__).parent
BATCHES = 30
BATCH_SIZE = 6
MOST_FILES = 35
"""Lower it with every simplification; the aim is 14."""


class CallCounter:
    """A profile function that counts the calls of aiofeed's functions, by file and name."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{PACKAGE}/") and not resumes_from_await(frame):
            self.calls[Path(code.co_filename).relative_to(PACKAGE).as_posix(), code.co_qualname] += 1

    def per_batch(self, batches: int) -> dict[str, dict[str, int]]:
        """Calls by file and function, of functions that run about once per batch or more often."""
        files: dict[str, dict[str, int]] = {}
        for (file, function), calls in sorted(self.calls.items()):
            # Half: some are used only after the first measurements, and some only before.
            if calls >= batches // 2:
                files.setdefault(file, {})[function] = calls
        return files


def resumes_from_await(frame: FrameType) -> bool:
    """Whether a "call" event only passes through an outer frame, on the way to an inner generator or coroutine.

    RESUME's argument has 0 in its low bits at a function's start, 1 after `yield`, 2 after `yield from`, 3 after
    `await`.
    """
    return frame.f_code.co_code[frame.f_lasti + 1] & 3 > 1


def test_a_sample_passes_few_files(tmp_path: Path, make_image_folder: Callable[..., Path]) -> None:
    """In the default case at most `MOST_FILES` modules of aiofeed run per sample, chunk or batch."""
    images = ImageFolder(make_image_folder(tmp_path / "images", BATCHES * BATCH_SIZE // 3))
    feeder = Feeder(images, decode=DecodeImage(32), batch_size=BATCH_SIZE, shuffle=True)
    counter, previous = CallCounter(), (sys.getprofile(), threading.getprofile())
    threading.setprofile(counter)
    sys.setprofile(counter)
    try:
        batches = [images for images, _ in feeder]
    finally:
        sys.setprofile(previous[0])
        threading.setprofile(previous[1])  # type: ignore[arg-type]
    feeder.close()
    assert [images.shape for images in batches] == [torch.Size((BATCH_SIZE, 3, 32, 32))] * BATCHES
    files = counter.per_batch(BATCHES)
    for file, functions in files.items():
        print(file, functions)  # pytest shows it if the test fails
    # One file for each kind of thread, so that a counter that misses a thread is noticed.
    assert {"decoders/image.py", "engine/engine.py", "feeder/iterator.py"} <= set(files)
    assert len(files) <= MOST_FILES, f"{len(files)} files: {', '.join(files)}"
