"""Opens files of tokens: raw, with the header of llm.c or NeMo, Megatron's ``.bin`` and ``.idx``, and ``.npy``."""

from __future__ import annotations

import codecs
import mmap
import os
import re
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")

# A header is 256 int32: magic number, version, number of tokens, bytes per token (NeMo only), zeros.
HEADER_BYTES = 256 * 4
# llm.c, dev/data/data_common.py, which modded-nanogpt follows: by magic number the version and the dtype.
LLM_C = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
# NeMo Automodel, components/datasets/llm/nanogpt_dataset.py.
NEMO, NEMO_DTYPES = 278895051, {2: "uint16", 4: "uint32"}

# Megatron-LM, megatron/core/datasets/indexed_dataset.py: magic bytes, version, code of the dtype, number of sequences
# and of documents; then for each sequence its length (int32), for each its place in the .bin (int64), and more.
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}

# The bytes at the beginning of a raw file that are checked.
CHECKED_BYTES = 1 << 16
NPY = b"\x93NUMPY"
OTHER_FORMATS = {
    b"\x1f\x8b\x08": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"PK\x03\x04": "a zip file, such as .npz or that of torch.save",
    b"\x80\x04\x95": "a pickle",
    b"\x80\x05\x95": "a pickle",
    b"PAR1": "a Parquet file",
    b"ARROW1\0\0": "an Arrow file",
    b"\x89HDF": "an HDF5 file",
    MEGATRON_MAGIC: "the index of a Megatron .bin, which is the file to pass",
}
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")
TEXT_BYTES = 64
# Integers that are wider than their dtype are found by this: they are tokens of a vocabulary of at most 2**18, so that
# each one's second uint16 is 0 to 3, and all following ones are 0. In a file of narrower tokens, 32 tokens of 4 or more
# are all at such first places with a probability of 2**-32 at most.
WIDE_VOCAB, LARGE_TOKENS = 1 << 18, 32


def open_tokens(path: Path, dtype: str) -> NDArray[Any]:
    """Map the tokens of a file, reading its beginning only; ``dtype`` is that of a file that does not name its own.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is truncated, damaged or of another format or dtype.
    """
    if not path.is_file():
        hint = f"; did you mean {path}.bin?" if Path(f"{path}.bin").is_file() else ""
        raise FileNotFoundError(f"{path} is no file of tokens{hint}")
    with path.open("rb") as file:
        head = file.read(CHECKED_BYTES)
    if path.suffix == ".npy" or head.startswith(NPY):
        return _open_npy(path)
    size, offset = path.stat().st_size, 0
    index = path.with_suffix(".idx")
    if path.suffix == ".bin" and index.is_file():
        dtype = _megatron_dtype(index, path, size)
    elif size >= HEADER_BYTES and (found := _header_dtype(path, size, head)) is not None:
        dtype, offset = found, HEADER_BYTES
    else:
        _check_raw(path, head, dtype)
    itemsize = np.dtype(dtype).itemsize
    if (size - offset) % itemsize:
        raise ValueError(
            f"{path} has {size - offset} bytes, which is no whole number of {dtype} tokens: it is truncated, or its "
            f"tokens are of another dtype"
        )
    if size == offset:
        raise ValueError(f"{path} has no tokens")
    # From Python 3.13 on, a mapping needs no open file: a dataset may have more files than a process may open.
    more: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **more), dtype, offset=offset)


def _open_npy(path: Path) -> NDArray[Any]:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no complete .npy file of numbers: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.name not in DTYPES:
        raise ValueError(
            f"{path} has {tokens.dtype} {list(tokens.shape)}: tokens are one-dimensional and {', '.join(DTYPES)}"
        )
    return np.asarray(tokens)


def _check_raw(path: Path, head: bytes, dtype: str) -> None:
    """Raise ``ValueError`` if a file begins like text, another format or integers that are wider than ``dtype``."""
    itemsize = np.dtype(dtype).itemsize
    kind = next((kind for magic, kind in OTHER_FORMATS.items() if head.startswith(magic)), None)
    if kind is None and itemsize > 1 and _is_text(head):
        kind = "text"
    if kind is not None:
        raise ValueError(f"{path} is {kind}, and not a file of {dtype} tokens")
    for wide in ("int64", "int32"):
        width = np.dtype(wide).itemsize
        if width <= itemsize:
            return
        tokens = np.frombuffer(head, f"<u{width}", len(head) // width)
        large = np.count_nonzero(tokens % (1 << 8 * itemsize) > 3)
        if large >= LARGE_TOKENS and (tokens < WIDE_VOCAB).all():
            raise ValueError(
                f"{path} seems to have {wide} tokens: of each {width // itemsize} {dtype} only the first is ever more "
                f"than 3. Pass dtype={wide!r}. If they are {dtype}, write them as .npy, which names its dtype"
            )


def _is_text(head: bytes) -> bool:
    """Whether bytes are UTF-8 without control characters. The last character may be cut."""
    if len(head) < TEXT_BYTES or _CONTROL.search(head):
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def _header_dtype(path: Path, size: int, head: bytes) -> str | None:
    """The dtype that a header names; ``None`` for a file without a header."""
    magic, version, count, itemsize = struct.unpack_from("<4i", head)
    expected, dtype = LLM_C.get(magic, (1, NEMO_DTYPES.get(itemsize)))
    if magic in LLM_C or magic == NEMO:
        if version != expected:
            raise ValueError(f"{path} has a header of version {version}; aiofeed reads version {expected}")
        if dtype is None:
            raise ValueError(f"the header of {path} says {itemsize} bytes per token, but must say 2 or 4")
        found = (size - HEADER_BYTES) / np.dtype(dtype).itemsize
        if count != found:
            raise ValueError(f"the header of {path} says {count} {dtype} tokens, but the file has {found:.12g}")
        return dtype
    if version == 1 and size - HEADER_BYTES in (2 * count, 4 * count):
        known = ", ".join(map(str, (*LLM_C, NEMO)))
        raise ValueError(
            f"{path} begins with a header with the magic number {magic}, and aiofeed knows {known}: write the tokens "
            f"without the header (or with one of these), and pass dtype="
        )
    return None


def _megatron_dtype(index: Path, path: Path, size: int) -> str:
    """The dtype of a ``.bin`` by its index, which must fit it."""
    index_size = os.path.getsize(index)
    with index.open("rb") as file:
        head = file.read(MEGATRON_HEADER.size)
        if not head.startswith(MEGATRON_MAGIC):
            raise ValueError(
                f"{index}, beside {path}, is no index of Megatron: it begins with {head[:9]!r} and not with "
                f"{MEGATRON_MAGIC!r}. If the .bin holds only tokens, move the .idx elsewhere"
            )
        if len(head) < MEGATRON_HEADER.size:
            raise ValueError(f"{index} is truncated: it has {index_size} bytes")
        _, version, code, sequences, documents = MEGATRON_HEADER.unpack(head)
        if version != 1 or code not in MEGATRON_DTYPES:
            known = ", ".join(f"{number} ({name})" for number, name in MEGATRON_DTYPES.items())
            raise ValueError(f"{index} has version {version} and dtype code {code}; known are version 1 and {known}")
        least = MEGATRON_HEADER.size + 12 * sequences + 8 * documents
        if index_size < least:
            raise ValueError(f"{index} is truncated: {sequences} sequences need {least} bytes, it has {index_size}")
        end, dtype = 0, MEGATRON_DTYPES[code]
        if sequences:
            file.seek(MEGATRON_HEADER.size + 4 * (sequences - 1))
            length = int.from_bytes(file.read(4), "little")
            file.seek(MEGATRON_HEADER.size + 12 * sequences - 8)
            end = int.from_bytes(file.read(8), "little") + length * np.dtype(dtype).itemsize
    if end != size:
        raise ValueError(f"{index} describes {end} bytes of tokens, but {path} has {size}: they do not belong together")
    return dtype
