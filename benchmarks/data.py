"""Inputs, generated once and reused: JPEG files of photographs in one size, tiny files, and large files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image

WIDTH, HEIGHT = 500, 400
QUALITY = 90
TINY_BYTES = 2048
FAT_BYTES = 8_000_000


def default_folder() -> Path:
    """The folder of inputs, per user, below the system's folder of temporary files."""
    return Path(tempfile.gettempdir()) / f"aiofeed-benchmarks-{os.getuid()}"


def jpeg_folder(data: Path, count: int, width: int = WIDTH, height: int = HEIGHT) -> Path:
    """``count`` JPEGs of one size, quality 90, random crops of photographs; one sub-folder per photograph."""
    name = f"jpeg-{width}x{height}-q{QUALITY}-{count}"
    return generate(data / name, lambda folder: _write_jpegs(folder, count, width, height))


def noise_folder(data: Path, count: int) -> Path:
    """``count`` JPEGs of 500 x 400, quality 90, of coarse and fine noise, for machines without photographs."""
    return generate(data / f"noise-{WIDTH}x{HEIGHT}-q{QUALITY}-{count}", lambda folder: _write_noise(folder, count))


def tiny_folder(data: Path, count: int) -> Path:
    """``count`` files of 2 KB of random bytes, 1,000 per sub-folder."""
    return generate(data / f"tiny-{TINY_BYTES}-{count}", lambda folder: _write_random(folder, count, TINY_BYTES))


def fat_folder(data: Path, count: int) -> Path:
    """``count`` files of 8 MB of random bytes."""
    return generate(data / f"fat-{FAT_BYTES}-{count}", lambda folder: _write_random(folder, count, FAT_BYTES))


def files_below(folder: Path | str) -> list[str]:
    """The files in the sub-folders of ``folder``, sorted."""
    return sorted(str(path) for path in Path(folder).glob("*/*"))


def generate(folder: Path, write: Callable[[Path], None]) -> Path:
    """``folder``, filled by ``write`` if it does not exist; renamed into place when it is complete."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=folder.name))
        try:
            write(unfinished)
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has generated it
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _write_jpegs(folder: Path, count: int, width: int, height: int) -> None:
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    pictures = photographs()
    names = list(pictures)
    for name in names:
        (folder / name).mkdir()

    def write(name: str, number: int, box: tuple[float, float, float, float]) -> None:
        part = pictures[name].resize((width, height), Image.Resampling.LANCZOS, box=box)
        part.save(folder / name / f"{number:05d}.jpg", quality=QUALITY)

    jobs = []
    for number in range(count):
        name = names[number % len(names)]
        picture = pictures[name]
        # Three fifths to all of the largest crop of this shape: neither blurred nor all alike.
        across = min(picture.width, picture.height * width / height) * random.uniform(0.6, 1.0)
        down = across * height / width
        left, top = random.uniform(0, picture.width - across), random.uniform(0, picture.height - down)
        jobs.append((name, number, (left, top, left + across, top + down)))
    _in_threads(write, jobs)


def _in_threads(work: Callable[..., None], jobs: Sequence[tuple[Any, ...]]) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: work(*job), jobs))


def _write_noise(folder: Path, count: int) -> None:
    import numpy as np
    from PIL import Image

    def write(number: int) -> None:
        random = np.random.default_rng(number)
        coarse = Image.fromarray(random.integers(0, 256, (20, 25, 3), dtype=np.uint8))
        picture = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)).astype(np.int16)
        picture += random.integers(-12, 13, picture.shape, dtype=np.int16)
        path = folder / f"{number % 10}" / f"{number:05d}.jpg"
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)

    for number in range(10):
        (folder / f"{number}").mkdir()
    _in_threads(write, [(number,) for number in range(count)])


def photographs() -> dict[str, Image.Image]:
    """Colour photographs that scikit-learn and scikit-image contain."""
    from PIL import Image
    from skimage import data
    from sklearn.datasets import load_sample_image

    arrays = {
        "astronaut": data.astronaut(),
        "cat": data.chelsea(),
        "coffee": data.coffee(),
        "flower": load_sample_image("flower.jpg"),
        "rocket": data.rocket(),
        "temple": load_sample_image("china.jpg"),
    }
    return {name: Image.fromarray(array) for name, array in arrays.items()}


def _write_random(folder: Path, count: int, nbytes: int) -> None:
    for number in range(count):
        parent = folder / f"{number // 1000:03d}"
        parent.mkdir(exist_ok=True)
        (parent / f"{number:06d}.bin").write_bytes(os.urandom(nbytes))
