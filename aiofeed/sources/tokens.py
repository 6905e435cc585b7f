"""``Tokens``: windows of tokens in memory-mapped files.

Files are raw, have the header of llm.c or NeMo, are Megatron's ``.bin`` and ``.idx``, or ``.npy``.
"""

from __future__ import annotations

import codecs
import contextlib
import copy
import mmap
import operator
import os
import re
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.core.types import Row, Traits, public
from aiofeed.core.validation import check_bool, check_positive_int, explain_arguments
from aiofeed.runtime.buffers import HostBufferPool, array
from aiofeed.runtime.machine import free_memory

if TYPE_CHECKING:
    import torch
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

# Files up to this share (1 / MEMORY_SHARE) of free memory stay in the page cache.
MEMORY_SHARE = 2
# Tokens of each of three parts of a file that are compared with ``vocab``.
CHECKED_TOKENS = 1 << 16


@public
@explain_arguments(
    {"block_size": "it is called block", "seq_len": "it is called block", "vocab_size": "it is called vocab"}
)
class Tokens:
    """Windows of ``block`` tokens in files of tokens, for language models: int64 [N, block], as embeddings take them.

    With ``targets=True`` a batch is ``x, y``, and ``y`` has the token after each token of ``x``. Pass no ``decode=``.
    Files are mapped, so that they may be larger than memory. A batch is one gather. It is made ahead in a thread; for a
    feeder without ``device=``, if the files take less than half of the free memory, in your thread, which costs less.
    With ``cache="device"`` the tokens are copied to the device once, and batches are gathered there.

    Args:
        paths: A file, or several: windows do not cross files. Raw tokens, as nanoGPT writes them; with the header of
            llm.c, modded-nanogpt or NeMo; ``.npy``; or Megatron's ``.bin`` beside its ``.idx``, of which the tokens of
            all documents are one stream.
        block: Tokens of a window.
        dtype: The dtype of raw tokens. Other files name their own.
        stride: Tokens from the start of a window to the next. Default: ``block``, windows side by side. Tokens that do
            not fill a last window are left out.
        targets: Make samples ``(x, y)``. A window then needs ``block + 1`` tokens.
        vocab: The size of the vocabulary. The tokens at the beginning, in the middle and at the end of each file must
            be less.

    Raises:
        FileNotFoundError: A file does not exist.
        TypeError, ValueError: An argument has the wrong type or is out of range, or a file is a URL, text, truncated,
            damaged, shorter than a window or of another dtype.
    """

    traits: Traits = Traits(decode="none", rows=True)
    answers_at_once = True

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        block: int,
        dtype: str = "uint16",
        stride: int | None = None,
        targets: bool = False,
        vocab: int | None = None,
    ) -> None:
        self.block: int = check_positive_int("Tokens(block=...)", block)
        self.targets: bool = check_bool("Tokens(targets=...)", targets)
        step = self.block if stride is None else check_positive_int("Tokens(stride=...)", stride)
        name = _dtype_name(dtype)
        self._open([(path, name, step) for path in _checked_paths(paths)])
        if vocab is not None:
            self._check_vocab(check_positive_int("Tokens(vocab=...)", vocab))

    def _open(self, files: list[tuple[Path, str, int]]) -> None:
        """Map files, each with the dtype of raw tokens and the stride."""
        needed = self.block + self.targets
        self._files = files
        self._windows = []
        self.arrays: list[NDArray[Any]] = []
        """The mapped tokens of each file."""
        for path, dtype, stride in files:
            tokens = open_tokens(path, dtype)
            if len(tokens) < needed:
                of_targets = " (block + 1, because targets=True)" if self.targets else ""
                raise ValueError(f"{path} has {len(tokens)} tokens, and a window needs {needed}{of_targets}")
            # A view, in which windows may overlap.
            self._windows.append(np.lib.stride_tricks.sliding_window_view(tokens, needed)[::stride])
            self.arrays.append(tokens)
        self._starts = np.cumsum([0, *map(len, self._windows)])
        self.in_memory: bool = sum(tokens.nbytes for tokens in self.arrays) * MEMORY_SHARE <= free_memory()
        """Whether the operating system can keep the files in memory."""
        self.form_batch: Callable[[list[Any]], Any] | None = None if self.targets else operator.itemgetter(0)
        """Makes a batch of what ``gathered`` returns, as tensors; ``None``: it is the batch."""

    def _check_vocab(self, vocab: int) -> None:
        for (path, _, _), tokens in zip(self._files, self.arrays, strict=True):
            for start in (0, len(tokens) // 2, max(len(tokens) - CHECKED_TOKENS, 0)):
                part = tokens[start : start + CHECKED_TOKENS]
                wrong = np.flatnonzero((part < 0) | (part >= vocab))
                if len(wrong):
                    raise ValueError(
                        f"{path}: token {start + wrong[0]} is {part[wrong[0]]}, and vocab={vocab}: the file is of "
                        f"another tokenizer, or of another dtype than {tokens.dtype}"
                    )

    def joined(self, others: Sequence[Tokens]) -> Tokens:
        """Return these windows, followed by those of others.

        Raises:
            ValueError: ``block`` or ``targets`` differ.
        """
        for other in others:
            if (other.block, other.targets) != (self.block, self.targets):
                raise ValueError(
                    f"{self!r} and {other!r} differ in block or targets, so they do not fit into one batch"
                )
        both = copy.copy(self)
        both._open([*self._files, *(file for other in others for file in other._files)])
        return both

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the arguments; files are mapped again."""
        return {"block": self.block, "targets": self.targets, "files": self._files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.block, self.targets = state["block"], state["targets"]
        self._open(state["files"])

    def __len__(self) -> int:
        """The number of windows."""
        return int(self._starts[-1])

    def __repr__(self) -> str:
        path, _, stride = self._files[0]
        more = f" and {len(self._files) - 1} more" if len(self._files) > 1 else ""
        return f"Tokens({str(path)!r}{more}, block={self.block}, stride={stride}, targets={self.targets})"

    def __getitem__(self, index: int) -> Any:
        """One window as an int64 tensor, or ``(x, y)``, as from a ``Dataset``."""
        return self.decoder(range(len(self))[index])

    @property
    def shard_starts(self) -> NDArray[np.int64]:
        """The first window of each file, and the number of windows, for ``shuffle="window"``."""
        return self._starts

    def key(self, index: int, /) -> str:
        """The file and the tokens of a window, as in ``train.bin[2048:3072]``."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        path, _, stride = self._files[number]
        first = (index - int(self._starts[number])) * stride
        return f"{path}[{first}:{first + self.block}]"

    async def read(self, index: int, /) -> int:
        """Return the index: the decoder gathers tokens."""
        return index

    async def read_many(self, indices: Sequence[int], /) -> list[int]:
        """Return the indices: the decoder gathers tokens."""
        return list(indices)

    def read_now(self, indices: Sequence[int], /) -> list[int]:
        """Return the indices: the decoder gathers tokens."""
        return list(indices)

    @property
    def decoder(self) -> TokenDecoder:
        """The decoder that a feeder uses."""
        return TokenDecoder(self)

    @property
    def sample_bytes(self) -> int:
        """Bytes of a window, with targets."""
        return (1 + self.targets) * self.block * 8

    def gathered(self, indices: NDArray[np.int64], memory: HostBufferPool) -> list[NDArray[Any]]:
        """Return windows as ``[x]`` or ``[x, y]``."""
        parts = list(array(memory, (1 + self.targets, len(indices), self.block), np.dtype(np.int64)))
        self.gather(indices, *parts)
        return parts

    def gather(self, indices: Sequence[int] | NDArray[np.int64], *parts: NDArray[Any]) -> None:
        """Write windows into ``x``, and with targets ``y``, each [N, block]."""
        rows = np.asarray(indices, np.int64)
        if len(self._windows) == 1:
            self._write(self._windows[0][rows], parts, slice(None))
            return
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(numbers):
            chosen = np.flatnonzero(numbers == number)
            self._write(self._windows[number][rows[chosen] - self._starts[number]], parts, chosen)

    def first_tokens(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position of each window's first token among the tokens of all files, one file after the other."""
        numbers = np.searchsorted(self._starts, indices, side="right") - 1
        files = np.cumsum([0, *map(len, self.arrays)])
        strides = np.array([stride for _, _, stride in self._files])
        first: NDArray[np.int64] = files[numbers] + (indices - self._starts[numbers]) * strides[numbers]
        return first

    def _write(self, tokens: NDArray[Any], parts: Sequence[NDArray[Any]], rows: Any) -> None:
        for at, part in enumerate(parts):
            part[rows] = tokens[:, at : at + self.block]


class TokenDecoder:
    """Gathers the windows of a chunk into the rows of its batch."""

    takes_seed = False

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self.row: Row = Row((2, tokens.block), "int64", parts=True) if tokens.targets else Row((tokens.block,), "int64")

    def __repr__(self) -> str:
        return "TokenDecoder()"

    def __call__(self, index: int, /) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The tensor of a window, or ``(x, y)``."""
        import torch

        out = np.empty(self.row.shape, np.int64)
        self.decode_into(index, out)
        return tuple(torch.from_numpy(out)) if self.row.parts else torch.from_numpy(out)

    def decode_into(self, index: int, out: NDArray[Any], seed: int | None = None) -> None:
        """Write a window into its row."""
        self.decode_many_into([index], out[None], None)

    def decode_many_into(self, indices: Sequence[int], out: NDArray[Any], seeds: None) -> list[None]:
        """Write windows into rows."""
        self._tokens.gather(indices, *(out.swapaxes(0, 1) if self.row.parts else (out,)))
        return [None] * len(indices)


def _dtype_name(dtype: Any) -> str:
    name = ""
    if dtype is not None:
        with contextlib.suppress(TypeError):
            name = str(np.dtype(dtype).name)
    if name not in DTYPES:
        raise ValueError(f"Tokens(dtype=...) must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return name


def _checked_paths(given: Any) -> list[Path]:
    if not isinstance(given, str | os.PathLike | Iterable):
        raise TypeError(f"Tokens(paths) must be the path of a file, or several, got {given!r}")
    paths = [given] if isinstance(given, str | os.PathLike) else list(given)
    if not paths:
        raise ValueError("Tokens needs at least one file; an empty list may come from a glob without a match")
    for path in paths:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"Tokens(paths) must be paths of files, got {path!r}")
        if "://" in os.fspath(path):
            raise ValueError(
                f"Tokens maps local files, and {os.fspath(path)!r} is a URL: download it, or feed shards at URLs, for "
                f"example MDSShards or ParquetRows with a column of tokens"
            )
    return list(map(Path, paths))


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
