"""``Tokens``: windows of tokens in memory-mapped files. Those of files at URLs are in ``at_urls.py``."""

from __future__ import annotations

import contextlib
import copy
import functools
import glob
import mmap
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from aiofeed import _load_addon
from aiofeed.common.mapped import MappedFiles
from aiofeed.common.unreadable import naming_file
from aiofeed.kernel.core.errors import CacheError
from aiofeed.kernel.core.faces import Exclusion
from aiofeed.kernel.core.formatting import format_bytes, redacted
from aiofeed.kernel.core.types import BatchPlan, Row, Traits, public
from aiofeed.kernel.core.validation import check_bool, check_positive_int, explain_arguments
from aiofeed.kernel.runtime.buffers import BufferLease, HostBufferPool, array
from aiofeed.kernel.runtime.machine import free_memory
from aiofeed.kernel.sampling.schedule import fingerprint
from aiofeed.kernel.sources.file_io import Content, check_path
from aiofeed.kernel.sources.subset import IndexedSource, Indices
from aiofeed.objects.urls import is_remote, split_url
from aiofeed.tokens.formats import CHECKED_BYTES, DTYPES, DefaultDtype, TokenLayout, check_vocab, layout_of
from aiofeed.tokens.positions import GatheredDocuments, collate_windows, epoch_offset, with_documents, write_positions

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# Files up to this share (1 / MEMORY_SHARE) of free memory stay in the page cache, which all ranks share.
MEMORY_SHARE = 2
# Tokens of each of three parts of a file that are compared with ``vocab``.
CHECKED_TOKENS = 1 << 16


@public
@explain_arguments(
    {"block_size": "it is called block", "seq_len": "it is called block", "vocab_size": "it is called vocab"}
)
class Tokens(IndexedSource):
    """Windows of ``block`` tokens in files of tokens, for language models: int64 [N, block], as embeddings take them.

    Example:
        ```python
        import aiofeed

        tokens = aiofeed.Tokens("tokens.bin", block=128, targets=True)
        feeder = aiofeed.Feeder(tokens, batch_size=8, shuffle=True, device="auto")
        for x, y in feeder:
            print(x.shape, y.shape)
        ```

    With ``targets=True`` a batch is ``x, y``, and ``y`` has the token after each token of ``x``. Pass no ``decode=``.
    Files are mapped, so that they may be larger than memory. A batch is one gather. It is made ahead in a thread; for a
    feeder without ``device=``, if the files take less than half of the free memory, in your thread, which costs less.
    With ``cache="device"`` the tokens are copied to the device once, and batches are gathered there.

    Files at URLs are read in ranges of 4 MiB, which are the shards of ``shuffle="window"``.

    Args:
        paths: A file, or several: windows do not cross files. Raw tokens, as nanoGPT writes them; with the header of
            llm.c, modded-nanogpt or NeMo; ``.npy``; or Megatron's ``.bin`` beside its ``.idx``, of which the tokens of
            all documents are one stream. Or URLs, globs and braces of them included.
        block: Tokens of a window.
        dtype: The dtype of raw tokens; ``">u2"`` for big-endian uint16. Other files name their own.
        stride: Tokens from the start of a window to the next. Default: ``block``, windows side by side. Tokens that do
            not fill a last window are left out.
        targets: Make samples ``(x, y)``. A window then needs ``block + 1`` tokens.
        vocab: The size of the vocabulary. The tokens at the beginning, in the middle and at the end of each file must
            be less.
        documents: "positions" makes a batch a dict of "tokens", with ``targets`` "labels", and what ``Pack`` adds:
            "position_ids" from 0 at the start of each document and window, "document_ids", "cu_seqlens" and
            "max_seqlen". Documents are found as ``Documents`` finds them. For files on disk.
        separator: With ``documents``, the token between them; see ``Documents``.
        labels: With ``documents`` and ``targets``, the label of tokens whose next one is of another document, such as
            -100, which ``cross_entropy`` ignores. Default: the next token.
        offset: "epoch" moves the borders of windows in each epoch by a number of tokens below ``stride`` that follows
            from seed and epoch. Each file has up to one window less. For files on disk.
        column: The column of lists of tokens in Parquet files, or in Arrow files on disk. The tokens of all rows are
            one stream. Row groups are read whole; they are the shards of ``shuffle="window"``.
        store: An obstore store that reads the URLs. Default: made of the URLs.
        options: Arguments of ``obstore.store.from_url``, such as ``{"endpoint": ..., "region": ...}``.

    Raises:
        FileNotFoundError: A file does not exist.
        ImportError: obstore, which reads URLs, is not installed.
        OSError: A URL cannot be read.
        TypeError, ValueError: An argument has the wrong type or is out of range, or a file is text, truncated, damaged,
            shorter than a window or of another dtype.
    """

    traits: Traits = Traits(decode="none", rows=True)
    # fmt: off
    excluded: ClassVar[Sequence[Exclusion]] = (
        (("batch_sampler=", "a plan", "collate_fn=", 'engine="process"', "static_batches=True", "a list of devices"),
         ("Tokens on the device",), ValueError,
         "batches are gathered on one device, in its own memory and in one size: leave out {option}"),
        (("Tokens on the device",), ("Tokens at URLs",), ValueError,
         "they are copied from files: download them, or pass cache=EncodedCache(path, max_bytes), which keeps windows "
         "on the local disk"),
        (("cache=",), ("Tokens with documents= or offset=",), ValueError,
         "windows are gathered with what depends on documents or epoch: leave it out"),
        (("static_batches=True", "a list of devices"), ("Tokens with documents=",), ValueError,
         "cu_seqlens is one for all rows of a batch, and its size varies: leave out {option}"),
        (("Pack",), ("Tokens with documents=",), ValueError, "its windows are full: pass Documents, which it packs"),
    )
    # fmt: on
    answers_at_once: bool = True
    collate: Any = None
    read_planned: Any = None
    looks_ahead = False
    gathers_on_device = True
    _column: str | None = None

    def __new__(cls, paths: Any = None, *_: Any, column: Any = None, store: Any = None, **__: Any) -> Self:
        """Make ``RemoteTokens`` for URLs and columns."""
        listed = paths if isinstance(paths, list | tuple) else [paths]
        if cls is Tokens and (store is not None or column is not None or any(map(is_remote, listed))):
            return super().__new__(_load_addon("RemoteTokens", "Tokens at URLs"))  # type: ignore[no-any-return]
        return super().__new__(cls)

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        block: int,
        dtype: str = DefaultDtype("uint16"),
        stride: int | None = None,
        targets: bool = False,
        vocab: int | None = None,
        *,
        documents: Literal["positions"] | None = None,
        separator: int | None = None,
        labels: int | None = None,
        offset: Literal["epoch"] | None = None,
        column: str | None = None,
        store: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.block: int = check_positive_int("Tokens(block=...)", block)
        self.targets: bool = check_bool("Tokens(targets=...)", targets)
        step = self.block if stride is None else check_positive_int("Tokens(stride=...)", stride)
        name = dtype if isinstance(dtype, DefaultDtype) else _dtype_name(dtype)
        checked = None if vocab is None else check_positive_int("Tokens(vocab=...)", vocab)
        if documents not in (None, "positions") or offset not in (None, "epoch"):
            raise ValueError(f'Tokens takes documents="positions" and offset="epoch", got {documents!r} and {offset!r}')
        if (labels is not None and not (documents and targets)) or (separator is not None and not documents):
            raise ValueError('Tokens(labels=, separator=) need documents="positions", labels= targets=True, too')
        if self.looks_ahead and (documents or offset):
            raise ValueError("Tokens(documents=, offset=) are for files on disk without column=: download them")
        self._extras = documents, separator, labels, offset
        self._storage: tuple[Any, Any] = store, options
        if column is not None:
            self._column = column
        self._open([(path, name, step) for path in _checked_paths(paths)], checked)

    def _open(self, files: list[tuple[Any, str, int]], vocab: int | None = None) -> None:
        """Map files, each with the dtype of raw tokens and the stride."""
        needed, (documents, separator, *_, offset) = self.block + self.targets, self._extras
        self._files = files = [(_local_path(path), dtype, stride) for path, dtype, stride in files]
        self._windows = []
        self._layouts: list[TokenLayout] = []
        self.arrays: list[NDArray[Any]] = []
        """The mapped tokens of each file."""
        mapped = []
        for path, dtype, stride in files:
            with naming_file(str(path)):
                tokens, layout = open_tokens(path, dtype)
            spare = stride - 1 if offset else 0
            layout.checked(str(path), needed + spare, targets=self.targets)
            # A view, in which windows overlap.
            self._windows.append(np.lib.stride_tricks.sliding_window_view(tokens, needed))
            mapped.append(([(str(path), layout.offset + tokens.nbytes)], (layout.count - needed - spare) // stride + 1))
            self.arrays.append(tokens)
            self._layouts.append(layout)
            if vocab is not None:
                for start in checked_places(len(tokens)):
                    check_vocab(str(path), start, tokens[start : start + CHECKED_TOKENS], vocab)
        self._starts: NDArray[np.int64] = np.cumsum([0, *(windows for _, windows in mapped)])
        self._firsts: NDArray[np.int64] = np.cumsum([0, *map(len, self.arrays)])
        self._strides: NDArray[np.int64] = np.array([stride for *_, stride in files])
        self.mapped: MappedFiles = MappedFiles(mapped)
        """The files of windows."""
        self.__dict__.pop("in_memory", None)
        self.form_batch: Callable[[list[Any]], Any] | None = None if self.targets else operator.itemgetter(0)
        """Makes a batch of what ``gathered`` returns, as tensors; ``None``: it is the batch."""
        if documents:
            from aiofeed.tokens.bounds import document_bounds  # loads tables

            self._bounds: NDArray[np.int64] = document_bounds(self, separator)
            self.form_batch, self.collate = with_documents, collate_windows
        if offset:
            self.in_memory, self.answers_at_once = False, False
            self.read_planned, self.read_now = self._read_planned, None  # type: ignore[method-assign, assignment]

    def joined(self, others: Sequence[Tokens]) -> Tokens:
        """Return these windows, followed by those of others.

        Raises:
            ValueError: ``block`` or ``targets`` differ.
        """
        for other in others:
            if (other.block, other.targets, other._extras) != (self.block, self.targets, self._extras):
                raise ValueError(
                    f"{self!r} and {other!r} differ in block or targets, so they do not fit into one batch"
                )
        both = copy.copy(next((each for each in (self, *others) if each.looks_ahead), self))
        both._column = None
        both._open([*self._files, *(file for other in others for file in other._files)])
        return both

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the arguments; files are mapped again."""
        return {name: self.__dict__[name] for name in ("block", "targets", "_files", "_storage", "_extras")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open(self._files)

    @property
    def documents(self) -> list[NDArray[np.int64] | None]:
        """The first token of each document of each file, and the number of tokens; ``None`` without documents."""
        return [layout.documents for layout in self._layouts]

    def __len__(self) -> int:
        """Return the number of windows."""
        return int(self._starts[-1])

    def __repr__(self) -> str:
        path, _, stride = self._files[0]
        more = f" and {len(self._files) - 1} more" if len(self._files) > 1 else ""
        return f"Tokens({str(path)!r}{more}, block={self.block}, stride={stride}, targets={self.targets})"

    def __getitem__(self, indices: int | Indices) -> Any:
        """One window as an int64 tensor, or ``(x, y)``, as from a ``Dataset``; or a part, as of other sources."""
        if isinstance(indices, int | np.integer):
            return self._read_at_once(range(len(self))[indices])
        return super().__getitem__(indices)

    def _read_at_once(self, index: int) -> Any:
        places = self.first_tokens(np.array([index]))
        if self._extras[0]:
            return with_documents(self.gather_new(places))
        return TokenDecoder(self)(places[0])

    @functools.cached_property
    def in_memory(self) -> bool:
        """Whether the operating system can keep the files in memory; asked once, by the feeder of all of them."""
        return sum(tokens.nbytes for tokens in self.arrays) * MEMORY_SHARE <= free_memory()

    @property
    def shard_starts(self) -> Sequence[int] | NDArray[np.int64]:
        """The first window of each file, and the number of windows, for ``shuffle="window"``."""
        return self._starts

    def facts(self, arguments: Any) -> Mapping[str, str]:
        """Return whether the tokens are kept on the device, and whether they are at URLs."""
        found = {"Tokens on the device": "cache='device'"} if arguments.cache == "device" else {}
        documents, *_, offset = self._extras
        found |= {"Tokens with documents=": repr(self)} if documents else {}
        found |= {"Tokens with documents= or offset=": repr(self)} if documents or offset else {}
        return found | ({"Tokens at URLs": repr(self)} if self.looks_ahead else {})

    def check_room(self, backend: Any, /) -> None:
        """Raise ``CacheError`` if the tokens are to be kept in host memory and do not fit there."""
        if backend is None and not self.in_memory:
            raise CacheError(
                f'cache="device" with device=None keeps {self!r} in host memory, and its '
                f"{format_bytes(sum(tokens.nbytes for tokens in self.arrays))} are more than half of the free "
                f"{format_bytes(free_memory())}: leave out cache=, and threads gather batches ahead"
            )

    def fingerprint(self) -> str:
        """Return the number of windows and some of their keys, as for files without a fingerprint of their own."""
        name = "Tokens" if self._column is None else f"Tokens {self._column}"
        return fingerprint(name, len(self), self.key)

    def content_parts(self) -> list[Content]:
        """Return the dtypes of the tokens, and the files."""
        dtypes = ",".join([tokens.dtype.str for tokens in self.arrays])
        return [Content(dtypes.encode()), *(Content(str(path)) for path, *_ in self._files)]

    def key(self, index: int, /) -> str:
        """Return the file and the tokens of a window, as in ``train.bin[2048:3072]``."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        path, _, stride = self._files[number]
        first = (index - int(self._starts[number])) * stride
        return f"{path}[{first}:{first + self.block}]{' moved' * (self._extras[3] is not None)}"

    async def read(self, index: int, /) -> Any:
        """Return the place of a window: the decoder gathers tokens."""
        [place] = await self.read_many([index])
        return place

    async def read_many(self, indices: Sequence[int], /) -> Any:
        """Return the places of windows: the decoder gathers tokens."""
        return self._found(indices)

    def read_now(self, indices: Sequence[int], /) -> Any:
        """``read_many`` in the calling thread. Raises ``OSError`` if a file became shorter."""
        return self._found(indices)

    async def _read_planned(self, indices: Sequence[int], plan: BatchPlan, places: Sequence[int]) -> Any:
        return self._found(indices, plan.epoch_seed)

    def _found(self, indices: Sequence[int], epoch_seed: int | None = None) -> Any:
        self.mapped.check(indices)
        places = self.first_tokens(np.asarray(indices, np.int64), epoch_seed)
        return GatheredDocuments(self, places) if self._extras[0] else places.tolist()

    def lengths(self, unit: str, /) -> NDArray[np.int64] | None:
        """Return ``block`` for each window."""
        return None if unit else np.full(len(self), self.block)

    @property
    def decoder(self) -> TokenDecoder | None:
        """The decoder that a feeder uses."""
        return None if self._extras[0] else TokenDecoder(self)

    @property
    def sample_bytes(self) -> int:
        """Bytes of a window, with targets."""
        return (1 + self.targets + (self._extras[0] is not None)) * self.block * 8

    def gathered(self, indices: NDArray[np.int64], memory: HostBufferPool) -> list[NDArray[Any]]:
        """Return windows as ``[x]`` or ``[x, y]``, with ``documents`` and their positions."""
        self.mapped.check(indices)
        return self.gather_new(self.first_tokens(indices), memory)

    def gather_new(self, places: NDArray[np.int64], memory: BufferLease | None = None) -> list[NDArray[Any]]:
        """Return windows in new memory."""
        count = self.sample_bytes // (8 * self.block)
        parts = list(array(memory or HostBufferPool(0), (count, len(places), self.block), np.dtype(np.int64)))
        self.gather(places, *parts)
        return parts

    def gather(self, places: Any, *parts: NDArray[Any]) -> None:
        """Write windows, of which there is what ``read`` returned, into ``x``, and with targets ``y``: [N, block]."""
        rows, (documents, _, ignored, _) = np.asarray(places, np.int64), self._extras
        if len(self._windows) == 1:
            self._write(self._windows[0][rows], parts, slice(None))
        else:
            numbers = np.searchsorted(self._firsts, rows, side="right") - 1
            for number in np.unique(numbers):
                chosen = np.flatnonzero(numbers == number)
                self._write(self._windows[number][rows[chosen] - self._firsts[number]], parts, chosen)
        if documents:
            write_positions(self._bounds, rows, parts, ignored)

    def first_tokens(self, indices: NDArray[np.int64], epoch_seed: int | None = None) -> NDArray[np.int64]:
        """Return the position of each window's first token among the tokens of all files, one file after the other."""
        numbers = np.searchsorted(self._starts, indices, side="right") - 1
        moves = self._firsts[:-1]
        if epoch_seed is not None:
            moves = moves + np.array([epoch_offset(epoch_seed, stride) for stride in self._strides.tolist()])
        return moves[numbers] + (indices - self._starts[numbers]) * self._strides[numbers]

    def _write(self, tokens: NDArray[Any], parts: Sequence[NDArray[Any]], rows: Any) -> None:
        for at, part in enumerate(parts[: 1 + self.targets]):
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
        """Return the tensor of a window, or ``(x, y)``."""
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
    """Return the name of a dtype; of one in the other byte order, numpy's string, which has the order."""
    given = None
    if dtype is not None:
        with contextlib.suppress(TypeError):
            given = np.dtype(dtype)
    if given is None or given.name not in DTYPES:
        raise ValueError(f"Tokens(dtype=...) must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return str(given.name if given.isnative else given.str)


def _checked_paths(given: Any) -> list[Any]:
    if not isinstance(given, str | os.PathLike | Iterable):
        raise TypeError(f"Tokens(paths) must be the path of a file, or several, got {given!r}")
    paths: list[Any] = []
    for path in [given] if isinstance(given, str | os.PathLike) else given:
        if not isinstance(path, str | os.PathLike):
            what = path if isinstance(path, int) else type(path).__name__  # not a row of a dataset
            raise TypeError(
                f"Tokens reads files, got {what} in a {type(given).__name__}. For a dataset of "
                f"documents: Feeder(Table(dataset), batch_size=Pack(...)); for tokens in memory, numpy.save(path, ...)"
            )
        found = sorted(glob.glob(path)) if isinstance(path, str) and not is_remote(path) else []
        paths += [path] if not found or os.path.exists(path) else found
    if not paths:
        raise ValueError("Tokens needs at least one file; an empty list may come from a glob without a match")
    return paths


def _local_path(path: Any) -> Path:
    if is_remote(path):
        raise ValueError(f"{redacted(path)!r} is a URL in an iterator: pass a list to Tokens")
    return Path(check_path(split_url(os.fspath(path))[1]))


def checked_places(count: int) -> list[int]:
    """Return where the tokens of a file begin that are compared with ``vocab``: three parts of ``CHECKED_TOKENS``."""
    return [0, count // 2, max(count - CHECKED_TOKENS, 0)]


def open_tokens(path: Path, dtype: str) -> tuple[NDArray[Any], TokenLayout]:
    """Map the tokens of a file, reading its beginning only; ``dtype`` is that of a file that does not name its own.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is truncated, damaged or of another format or dtype.
    """
    if not path.is_file():
        hint = f"; did you mean {path}.bin?" if Path(f"{path}.bin").is_file() else ""
        raise FileNotFoundError(f"{path} does not exist{hint}")
    index_path = path.with_suffix(".idx")
    has_index = path.suffix == ".bin" and index_path.is_file()
    index = _mapped(index_path) if has_index else None
    with path.open("rb") as file:
        size, head = os.fstat(file.fileno()).st_size, file.read(CHECKED_BYTES)
    layout = layout_of(str(path), path.suffix, size, head, dtype, index, str(index_path))
    memory = _mapped(path)
    return np.frombuffer(memory, layout.dtype, layout.count, layout.offset if layout.count else 0), layout


def _mapped(path: Path) -> mmap.mmap | bytes:
    # From Python 3.13 on, a mapping needs no open file: a dataset may have more files than a process may open.
    more: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **more) if os.fstat(file.fileno()).st_size else b""
