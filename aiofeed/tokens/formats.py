"""Formats of files of tokens: raw, with the header of llm.c or NeMo, ``.npy``, and Megatron's ``.bin`` and ``.idx``."""

from __future__ import annotations

import io
import logging
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.shards.arrow import is_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

log: logging.Logger = logging.getLogger("aiofeed.sources")


class DefaultDtype(str):
    """The dtype of raw tokens if none is given: not of a ``.npy`` file without its header."""

    __slots__ = ()


DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")

# A header is 256 int32: magic number, version, number of tokens, bytes per token (NeMo only), zeros.
HEADER_BYTES = 256 * 4
# llm.c, dev/data/data_common.py, which modded-nanogpt follows: by magic number the version and the dtype.
LLM_C = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
# NeMo Automodel, components/datasets/llm/nanogpt_dataset.py.
NEMO, NEMO_DTYPES = 278895051, {2: "uint16", 4: "uint32"}

# Megatron-LM, megatron/core/datasets/indexed_dataset.py: magic bytes, version, code of the dtype, number of sequences
# and of document boundaries; then the length of each sequence (int32), the place of each in the .bin (int64), the first
# sequence of each document and the number of sequences (int64), and perhaps more.
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}

# Sequences of an index that are checked: those of 8 million documents lie in 160 MB, of which few pages are read.
CHECKED_SEQUENCES = 64

# The bytes at the beginning of a file that are checked.
CHECKED_BYTES = 1 << 16
NPY = b"\x93NUMPY"
OTHER_FORMATS = {
    b"\x1f\x8b\x08": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"PK\x03\x04": "a zip file, such as .npz or that of torch.save",
    b"\x80\x04\x95": "a pickle",
    b"\x80\x05\x95": "a pickle",
    b"version https://git-lfs": "a pointer of Git LFS, which `git lfs pull` replaces by its contents",
    b"PAR1": "a Parquet file, of which column= names the lists of tokens",
    b"ARROW1\0\0": "an Arrow file, of which column= names the lists of tokens",
    b"\x89HDF": "an HDF5 file",
    MEGATRON_MAGIC: "the index of a Megatron .bin, which is the file to pass",
}
TEXT_BYTES = 64
# A test for tokens that are wider than their dtype: with a vocabulary of at most 2**18, the second uint16 of each token
# is 0 to 3, and those after it are 0. It cannot be chance: in a file of narrower tokens, 32 tokens of 4 or more are all
# at such first places with a probability of 2**-32 at most.
WIDE_VOCAB, LARGE_TOKENS = 1 << 18, 32


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Where the tokens of a file are.

    Args:
        dtype: The dtype of the tokens, as numpy's string with the byte order.
        offset: The first byte of the tokens.
        count: The number of tokens.
        find_documents: Returns ``documents``, if the format has them.
    """

    dtype: str
    offset: int
    count: int
    find_documents: Callable[[], NDArray[np.int64]] | None = None

    @cached_property
    def documents(self) -> NDArray[np.int64] | None:
        """The first token of each document, and the number of tokens; ``None`` if the format has no documents."""
        return self.find_documents and self.find_documents()

    def checked(self, name: str, needed: int, *, targets: bool) -> TokenLayout:
        """Return this layout; raise ``ValueError`` if a file has less tokens than a window."""
        if self.count < needed:
            of_targets = " (block + 1, because targets=True)" if targets else ""
            raise ValueError(f"{name} has {self.count} tokens, and a window needs {needed}{of_targets}")
        return self


def check_vocab(name: str, start: int, tokens: NDArray[Any], vocab: int) -> None:
    """Raise ``ValueError`` if one of a file's tokens, from ``start`` on, is not in the vocabulary."""
    wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab))
    if len(wrong):
        raise ValueError(
            f"{name}: token {start + wrong[0]} is {tokens[wrong[0]]}, and vocab={vocab}: the file is of "
            f"another tokenizer, or of another dtype than {tokens.dtype}"
        )


def layout_of(
    name: str, suffix: str, size: int, head: bytes, dtype: str, index: Any = None, index_name: str = ""
) -> TokenLayout:
    """Return where the tokens of a file are.

    Args:
        name: The name of the file in messages.
        suffix: That of the file.
        size: Its size in bytes.
        head: Its first ``CHECKED_BYTES``.
        dtype: The dtype of tokens if the file does not name its own.
        index: The bytes of the ``.idx`` beside a ``.bin``.
        index_name: The name of that file.

    Raises:
        ValueError: The file is truncated, damaged or of another format or dtype.
    """
    if head.startswith(NPY) or (suffix == ".npy" and isinstance(dtype, DefaultDtype)):
        return _npy_layout(name, size, head)
    if index is not None:
        return _megatron_layout(name, size, index, index_name)
    offset = 0
    if size >= HEADER_BYTES and (found := _header_dtype(name, size, head)) is not None:
        dtype, offset = found, HEADER_BYTES
    else:
        _check_raw(name, head, dtype)
    itemsize = np.dtype(dtype).itemsize
    if (size - offset) % itemsize:
        raise ValueError(
            f"{name} has {size - offset} bytes, which is no whole number of {dtype} tokens: it is truncated, or its "
            f"tokens are of another dtype"
        )
    if size == offset:
        raise ValueError(f"{name} has no tokens")
    return TokenLayout(dtype, offset, (size - offset) // itemsize)


def _npy_layout(name: str, size: int, head: bytes) -> TokenLayout:
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        if dtype.hasobject:
            raise ValueError("it has Python objects")
        nbytes = dtype.itemsize * math.prod(shape)
        if file.tell() + nbytes > size:
            raise ValueError(f"it has {size} bytes of {file.tell() + nbytes}")
    except Exception as error:  # numpy parses the header as Python code, and raises errors of that
        way = "" if head.startswith(NPY) else "; if it has raw tokens, as those of OLMo and dolma, pass dtype="
        raise ValueError(f"{name} is no complete .npy file of numbers: {error}{way}") from error
    if len(shape) != 1 or dtype.name not in DTYPES:
        raise ValueError(f"{name} has {dtype} {list(shape)}: tokens are one-dimensional and {', '.join(DTYPES)}")
    return TokenLayout(dtype.str, file.tell(), shape[0])


def _check_raw(name: str, head: bytes, dtype: str) -> None:
    """Raise ``ValueError`` if a file begins like text, another format or integers that are wider than ``dtype``."""
    itemsize, is_big = np.dtype(dtype).itemsize, dtype.startswith(">")
    kind = next((kind for magic, kind in OTHER_FORMATS.items() if head.startswith(magic)), None)
    if kind is not None:
        raise ValueError(f"{name} is {kind}, and not a file of {dtype} tokens")
    if itemsize > 1 and is_text(head, TEXT_BYTES):
        raise ValueError(
            f"{name} is text, and not a file of {dtype} tokens: tokenise it first, and write the tokens, for example "
            f"with numpy.asarray(tokens, {dtype!r}).tofile(path)"
        )
    for wide in (">i8", ">i4") if is_big else ("int64", "int32"):
        width = np.dtype(wide).itemsize
        if width <= itemsize:
            return
        tokens = np.frombuffer(head, f"{'>' if is_big else '<'}u{width}", len(head) // width)
        large = np.count_nonzero(tokens % (1 << 8 * itemsize) > 3)
        if large >= LARGE_TOKENS and (tokens < WIDE_VOCAB).all():
            raise ValueError(
                f"{name} seems to have {wide} tokens: of each {width // itemsize} {dtype} only the "
                f"{'last' if is_big else 'first'} is ever more than 3. Pass dtype={wide!r}. If they are "
                f"{dtype}, write them as .npy, which names its dtype"
            )


def _header_dtype(name: str, size: int, head: bytes) -> str | None:
    """Return the dtype that a header names; ``None`` for a file without a header."""
    magic, version, count, itemsize = struct.unpack_from("<4i", head)
    expected, dtype = LLM_C.get(magic, (1, NEMO_DTYPES.get(itemsize)))
    if int.from_bytes(head[:4], "big") in (*LLM_C, NEMO):
        raise ValueError(f"{name} has a big-endian header, and aiofeed reads little-endian ones: convert the file")
    if magic in LLM_C or magic == NEMO:
        if version != expected:
            raise ValueError(f"{name} has a header of version {version}; aiofeed reads version {expected}")
        if dtype is None:
            raise ValueError(f"the header of {name} says {itemsize} bytes per token, but must say 2 or 4")
        found = (size - HEADER_BYTES) / np.dtype(dtype).itemsize
        if count != found:
            raise ValueError(f"the header of {name} says {count} {dtype} tokens, but the file has {found:.12g}")
        return dtype
    if version == 1 and size - HEADER_BYTES in (2 * count, 4 * count):
        known = ", ".join(map(str, (*LLM_C, NEMO)))
        raise ValueError(
            f"{name} begins with a header with the magic number {magic}, and aiofeed knows {known}: write the tokens "
            f"without the header (or with one of these), and pass dtype="
        )
    return None


def _megatron_layout(name: str, size: int, index: Any, index_name: str) -> TokenLayout:
    """Return the layout of a ``.bin`` by its index, which must fit it."""
    head = bytes(index[: MEGATRON_HEADER.size])
    if not head.startswith(MEGATRON_MAGIC):
        raise ValueError(
            f"{index_name}, beside {name}, is no index of Megatron: it begins with {head[:9]!r} and not with "
            f"{MEGATRON_MAGIC!r}. If the .bin holds only tokens, move the .idx elsewhere"
        )
    if len(head) < MEGATRON_HEADER.size:
        raise ValueError(f"{index_name} is truncated: it has {len(index)} bytes")
    _, version, code, sequences, boundaries = MEGATRON_HEADER.unpack(head)
    if version != 1 or code not in MEGATRON_DTYPES:
        known = ", ".join(f"{number} ({name})" for number, name in MEGATRON_DTYPES.items())
        raise ValueError(f"{index_name} has version {version} and dtype code {code}; known are version 1 and {known}")
    least = MEGATRON_HEADER.size + 12 * sequences + 8 * boundaries
    if len(index) < least:
        raise ValueError(f"{index_name} is truncated: {sequences} sequences need {least} bytes, it has {len(index)}")
    dtype, at = MEGATRON_DTYPES[code], MEGATRON_HEADER.size
    lengths = np.frombuffer(index, "<i4", sequences, at)
    pointers = np.frombuffer(index, "<i8", sequences, at + 4 * sequences)
    itemsize, last = np.dtype(dtype).itemsize, sequences - 1
    found = int(pointers[last]) + int(lengths[last]) * itemsize if sequences else 0
    if found != size:
        raise ValueError(
            f"{index_name} describes {found} bytes of tokens, but {name} has {size}: they do not belong together"
        )
    if not size:
        raise ValueError(f"{name} has no tokens")
    some = np.linspace(0, last, min(sequences, CHECKED_SEQUENCES)).astype(np.int64)
    ends = np.where(some < last, pointers[np.minimum(some + 1, last)], size)
    sizes = lengths[some].astype(np.int64) * itemsize
    if pointers[0] or (sizes < 0).any() or (pointers[some] + sizes != ends).any():
        raise ValueError(f"{index_name} is damaged: its sequences do not lie one after the other in the .bin")
    find = partial(_megatron_documents, index_name, index, sequences, boundaries, size, itemsize)
    return TokenLayout(dtype, 0, size // itemsize, find)


def _megatron_documents(
    name: str, index: Any, sequences: int, boundaries: int, size: int, itemsize: int
) -> NDArray[np.int64]:
    """Return the first token of each document, and the number of tokens.

    Raises:
        ValueError: The index is damaged.
    """
    at = MEGATRON_HEADER.size + 4 * sequences
    starts = np.append(np.frombuffer(index, "<i8", sequences, at), size)
    firsts = np.frombuffer(index, "<i8", boundaries, at + 8 * sequences)
    if boundaries and (firsts.min() < 0 or firsts.max() > sequences):
        raise ValueError(f"{name} is damaged: it has {sequences} sequences, and documents begin behind them")
    begins, closes = boundaries > 0 and firsts[0] == 0, boundaries > 0 and firsts[-1] == sequences
    if not begins or not closes:
        log.warning("%s: its documents do not cover all %d sequences; the others are documents, too", name, sequences)
    found: NDArray[np.int64] = (
        starts[np.r_[[0] * (not begins), firsts, [sequences] * (not closes)].astype(np.int64)] // itemsize
    )
    if (np.diff(found) < 0).any():
        raise ValueError(f"{name} is damaged: its documents are not in the order of its sequences")
    return found
