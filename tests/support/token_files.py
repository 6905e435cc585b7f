"""Writers of files of tokens, after their published layouts."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def write_raw(path: Path, tokens: Any, dtype: str = "uint16") -> Path:
    """Tokens and nothing else, as nanoGPT's ``prepare.py`` writes them."""
    np.asarray(tokens, dtype).tofile(path)
    return path


def write_header(
    path: Path, tokens: Any, dtype: str = "uint16", *, magic: int = 20240520, version: int = 1, bytes_per_token: int = 0
) -> Path:
    """A header of 256 int32, then the tokens.

    Layout: ``write_datafile`` of llm.c, dev/data/data_common.py (magic 20240520: uint16, 20240801: uint32), which
    modded-nanogpt follows. NeMo Automodel, components/datasets/llm/nanogpt_dataset.py (magic 278895051), has the bytes
    per token in the fourth number.
    """
    header = np.zeros(256, "<i4")
    header[:4] = magic, version, len(tokens), bytes_per_token
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())
    return path


def write_megatron(path: Path, documents: Sequence[Any], dtype: str = "uint16") -> Path:
    """A ``.bin`` with the tokens of all documents, and its ``.idx``.

    Layout: ``_IndexWriter`` of Megatron-LM, megatron/core/datasets/indexed_dataset.py.
    """
    code = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}[dtype]
    arrays = [np.asarray(document, dtype) for document in documents]
    path.write_bytes(b"".join(array.tobytes() for array in arrays))
    lengths = np.array([len(array) for array in arrays], "<i4")
    pointers = np.concatenate([[0], np.cumsum([array.nbytes for array in arrays])[:-1]]).astype("<i8")
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(arrays), len(arrays) + 1)
    index += lengths.tobytes() + pointers.tobytes() + np.arange(len(arrays) + 1, dtype="<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index)
    return path
