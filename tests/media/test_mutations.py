"""Mutations of valid inputs of every decoder: a sample, or ``ValueError`` or ``OSError``, and no memory beyond limits.

Backends of ``DecodeImage`` are compared with Pillow in ``test_image_fuzz.py``.
"""

from __future__ import annotations

import faulthandler
import io
import json
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any, TypedDict

import numpy as np
import pytest
import torch

from aiofeed import DecodeAudio, DecodeImage, DecodeJSON, DecodeNumpy, DecodePair, DecodeTensor
from aiofeed.common.expanded import EXPANDED_BYTES
from tests.kernel.decoders.test_image_fuzz import INPUT_LIMIT_S, MAX_PIXELS, corpus, damaged
from tests.media.test_audio import PIPES, RATE, WAVE, aiff, au, caf, wav
from tests.media.test_records import ARRAYS, npy, npz
from tests.support.pairs import ramps
from tests.support.pictures import encode

MEMORY_LIMIT = EXPANDED_BYTES + (64 << 20)
FAST, SLOW = 40, 1000


class Sample(TypedDict):
    text: str
    scores: list[float]
    more: dict[str, int | None]


def numpy_files() -> list[bytes]:
    fields = io.BytesIO()
    np.lib.format.write_array(fields, np.array([(1, 2.5)], [("é", np.int64), ("b", np.float32)]), (3, 0))
    arrays = [npy(ARRAYS[name], version) for name in ("float32", "fortran", "text") for version in ((1, 0), (2, 0))]
    return [*arrays, fields.getvalue(), npz(x=ARRAYS["float32"], y=ARRAYS["bool"]), npz(True, x=np.zeros(5000))]


def tensor_files() -> list[bytes]:
    save = pytest.importorskip("safetensors.torch").save
    return [
        save({"x": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "y": torch.tensor([True])}, {"made": "here"}),
        save({"x": torch.zeros(3, 0, 2), "float8": torch.ones(4).to(torch.float8_e4m3fn)}),
    ]


def json_files() -> list[bytes]:
    sample = {"text": "é\n\\u00e9 \U0001f600", "scores": [1, -2.5e-3, 1e308], "more": {"a": 1 << 60, "b": None}}
    return [json.dumps(sample).encode(), json.dumps([sample, [[[True]]], "x" * 100], ensure_ascii=False).encode()]


def audio_files() -> list[bytes]:
    pytest.importorskip("av")
    part = WAVE[:500]
    floats = (part / 32768).astype(np.float32)
    raw = [
        wav(part, part.nbytes),
        wav(floats, floats.nbytes, form=3),
        au(part, 1000),
        caf(part, 1004),
        aiff(part, 1000),
    ]
    return [*raw, *(PIPES[name][:1200] for name in ("0xffffffff", "0", "AU", "CAF"))]


def tiffs_and_others() -> list[bytes]:
    return [data for kind, data in corpus() if kind in ("TIFF", "PNG", "PPM", "BMP", "GIF")]


def json_of_both(data: bytes) -> Any:
    """Decode to anything, and to a type."""
    found = DecodeJSON()(data)
    return DecodeJSON(Sample)(data) if isinstance(found, dict) else found


def numpy_of_both(data: bytes) -> Any:
    """Decode all arrays, and one."""
    found = DecodeNumpy()(data)
    return DecodeNumpy("x")(data) if isinstance(found, dict) else found


IMAGE = encode(ramps(61, 45), "PNG")
Decoder = Callable[[bytes], Any]
DECODERS: dict[str, tuple[Decoder, Callable[[], list[bytes]]]] = {
    "numpy": (numpy_of_both, numpy_files),
    "safetensors": (lambda data: DecodeTensor()(data), tensor_files),
    "JSON": (json_of_both, json_files),
    "audio": (lambda data: DecodeAudio(RATE, 0.01, crop="first")(data), audio_files),
    "image, kept": (DecodeImage(None, mode="keep", max_pixels=MAX_PIXELS), tiffs_and_others),
    "mask": (lambda data: DecodePair(DecodeImage(9, max_pixels=MAX_PIXELS))((IMAGE, data)), tiffs_and_others),
}


@pytest.mark.parametrize("count", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.filterwarnings("ignore")  # numpy's parser of headers warns of literals
def test_mutated_inputs(name: str, count: int) -> None:
    """A damaged input is decoded, or refused by an error that becomes a ``DecodeError``; it takes no more memory."""
    decode, files = DECODERS[name]
    inputs = [(name, data) for data in files()]
    for _, data in inputs:  # valid ones: those of masks may have colours, and those of images more bits than are read
        try:
            decode(data)
        except ValueError:
            assert name in ("image, kept", "mask"), data[:80]
    refused = 0
    tracemalloc.start()
    try:
        for number in range(count):
            _, data = damaged(inputs, seed=len(name), number=number)
            tracemalloc.reset_peak()
            faulthandler.dump_traceback_later(INPUT_LIMIT_S, exit=True, file=sys.__stderr__)
            try:
                decode(data)
            except (ValueError, OSError):
                refused += 1
            except Exception as error:
                raise AssertionError(f"{name}, input {number}: {error!r} of {data!r}") from error
            assert tracemalloc.get_traced_memory()[1] < MEMORY_LIMIT + 200 * len(data), (number, data)
    finally:
        faulthandler.cancel_dump_traceback_later()
        tracemalloc.stop()
    assert count // 10 < refused < count, refused
