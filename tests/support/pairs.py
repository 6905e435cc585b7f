"""Pictures with masks and boxes, and torchvision's v2 transforms."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.pictures import encode, jpeg


def ramps(width: int, height: int) -> Image.Image:
    """A picture whose red grows with x and whose green grows with y, from 0 to 255."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, 0 * x], -1).round().astype(np.uint8))


def number_png(numbers: Any) -> bytes:
    """A PNG of numbers, 8 or 16 bits."""
    return encode(Image.fromarray(np.asarray(numbers)), "PNG")


def palette_png(numbers: Any) -> bytes:
    """A PNG of 8-bit numbers with a palette of random colours."""
    picture = Image.fromarray(np.asarray(numbers, np.uint8)).convert("P")
    picture.putdata(np.asarray(numbers, np.uint8).reshape(-1).tolist())
    picture.putpalette(np.random.default_rng(0).integers(0, 256, 768).tolist())
    return encode(picture, "PNG")


def write_pairs(root: Path, count: int) -> dict[str, list[list[int]]]:
    """Write ``images`` and ``masks`` of ``count`` pairs below ``root``; return the box of each image.

    Each shows a bright rectangle, which is the class 1 + number % 5 of its mask.
    """
    random, boxes = np.random.default_rng(0), {}
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        width, height = 96 + number, 80
        left, upper = random.integers(0, 40, 2).tolist()
        mask = np.zeros((height, width), np.uint8)
        mask[upper : upper + 32, left : left + 40] = 1 + number % 5
        picture = Image.fromarray(np.stack([mask * 50] * 3, -1))
        (root / "images" / f"{number:03}.jpg").write_bytes(jpeg(picture, quality=95))
        (root / "masks" / f"{number:03}.png").write_bytes(palette_png(mask))
        boxes[f"{number:03}.jpg"] = [[left, upper, left + 40, upper + 32]]
    return boxes


def torchvision_v2() -> Any:
    """``torchvision.transforms.v2``; skips the test if it is not installed.

    Its transforms are made of functions of torch. The operators of a build for another torch or for CUDA cannot be
    loaded; they are declared, so that torchvision can be imported. To run these tests where no build fits:
    ``pip install --no-deps --target FOLDER torchvision`` and ``PYTHONPATH=FOLDER``.
    """
    for _ in range(4):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return importlib.import_module("torchvision.transforms.v2")
        except ModuleNotFoundError:
            pytest.skip("torchvision is not installed")
        except RuntimeError as error:
            _, _, missing = str(error).partition("torchvision::")
            if not missing:
                raise
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]
            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define(f"{missing.split()[0]}(Tensor a, Tensor b, float c) -> Tensor")
            _libraries.append(library)
    pytest.skip("torchvision cannot be imported")


_libraries: list[Any] = []
