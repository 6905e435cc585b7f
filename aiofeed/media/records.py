"""``DecodeNumpy``, ``DecodeTensor`` and ``DecodeJSON``: decoders of arrays, tensors and JSON."""

from __future__ import annotations

import functools
import importlib
import io
import math
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from aiofeed.common.expanded import check_expanded
from aiofeed.kernel.core.types import public
from aiofeed.kernel.core.validation import check_bytes, explain_arguments

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

_NPY, _ZIP = b"\x93NUMPY", b"PK"
# By the major version of a .npy file: the length of the fields before its header, and the reader of the header.
_HEADERS = {
    1: (10, np.lib.format.read_array_header_1_0),
    2: (12, np.lib.format.read_array_header_2_0),
    3: (12, np.lib.format.read_array_header_2_0),  # but for names of fields, which are UTF-8
}
# Of numpy's files. Python decompresses the others without a limit.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@public
@explain_arguments({"allow_pickle": "pickles are never loaded, because they can run any code"})
@dataclass(frozen=True)
class DecodeNumpy:
    """Decode the bytes of a ``.npy`` or ``.npz`` file to an array with its own shape and dtype.

    Example:
        ```python
        from pathlib import Path

        import aiofeed

        arrays = aiofeed.Files(sorted(Path("arrays").glob("*.npy")))
        for batch in aiofeed.Feeder(arrays, decode=aiofeed.DecodeNumpy(), batch_size=2):
            print(batch.shape)
        ```

    Args:
        member: The array of a ``.npz`` file. ``None``: a ``.npz`` file gives a dict of all its arrays. Members that are
            no arrays are bytes.

    Raises:
        TypeError: The data is not bytes.
        ValueError: The data is no such file, truncated or damaged, has Python objects, or lacks ``member``.
    """

    member: str | None = None

    def __post_init__(self) -> None:
        _check_name("DecodeNumpy(member=...)", self.member)

    def __call__(self, data: bytes, /) -> NDArray[Any] | dict[str, Any]:
        """Decode one file."""
        data = check_bytes(self, data)
        try:
            if data.startswith(_NPY):
                return _decode_npy(data)
            if data.startswith(_ZIP):
                with zipfile.ZipFile(io.BytesIO(data)) as file:
                    found = {each.filename.removesuffix(".npy"): each for each in file.infolist()}
                    if self.member is not None:
                        found = {self.member: found[_member(self.member, found, ".npz file")]}
                    check_expanded("the .npz file", sum(each.file_size for each in found.values()), len(data))
                    arrays = {name: _decode_member(file, each) for name, each in found.items()}
                    return arrays if self.member is None else arrays[self.member]
        except (EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error, struct.error) as error:
            raise ValueError(f"the file is truncated or damaged: {error}") from error
        raise ValueError(f"this is not a .npy or .npz file: it begins with {data[:8]!r}")


def _decode_member(file: zipfile.ZipFile, member: zipfile.ZipInfo) -> Any:
    if member.compress_type not in _METHODS:
        raise ValueError(f"{member.filename!r} of the .npz file is not compressed by numpy: save it with numpy")
    with file.open(member) as opened:
        # At most what the directory says, whatever the data inflate to.
        data = opened.read(member.file_size)
    return _decode_npy(data) if data.startswith(_NPY) else data


def _decode_npy(data: bytes) -> NDArray[Any]:
    start, read_header = _HEADERS.get(data[6] if len(data) > 6 else 0, (0, None))
    if read_header is None:
        raise ValueError(f"this is no .npy file of version 1 to 3, or it is truncated: it begins with {data[:8]!r}")
    start += int.from_bytes(data[8:start], "little")
    shape, fortran_order, dtype = _npy_header(data[:start])
    if dtype.hasobject:
        raise ValueError("the .npy file has Python objects, which are pickles: save numbers")
    count = math.prod(shape)
    if len(data) - start < count * dtype.itemsize:
        raise ValueError(
            f"the .npy file is truncated: {dtype} {list(shape)} needs {count * dtype.itemsize} bytes, and it has "
            f"{len(data) - start}"
        )
    if data[6] == 3 and dtype.names:
        return np.load(io.BytesIO(data), allow_pickle=False)  # type: ignore[no-any-return]
    try:
        array = np.frombuffer(data, dtype, count, start).reshape(shape, order="F" if fortran_order else "C")
    except OverflowError as error:
        raise ValueError(f"the header of the .npy file is damaged: its shape is {list(shape)}") from error
    return array.copy(order="K")


@functools.lru_cache(64)
def _npy_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and dtype. The files of a dataset have few headers: 5 us for a file of 12 KB, np.load takes 110."""
    file = io.BytesIO(header)
    try:
        version = np.lib.format.read_magic(file)
        shape, fortran_order, dtype = _HEADERS[version[0]][1](file)
    except Exception as error:  # numpy's parser raises errors of many kinds
        raise ValueError(f"the header of the .npy file is damaged: {error}") from error
    if min(shape, default=0) < 0:
        raise ValueError(f"the header of the .npy file is damaged: its shape is {list(shape)}")
    return shape, fortran_order, dtype


@public
@explain_arguments()
@dataclass(frozen=True)
class DecodeTensor:
    """Decode the bytes of a ``.safetensors`` file to a dict of tensors. Needs ``pip install "aiofeed[safetensors]"``.

    Example:
        ```python
        from pathlib import Path

        import aiofeed

        files = aiofeed.Files(sorted(Path("arrays").glob("*.safetensors")))
        for batch in aiofeed.Feeder(files, decode=aiofeed.DecodeTensor(), batch_size=2):
            print(batch["x"].shape)  # a tensor for each name in the files
        ```

    Args:
        name: Decode to this tensor only.

    Raises:
        ImportError: safetensors is not installed.
        TypeError: The data is not bytes.
        ValueError: The data is no such file, truncated or damaged, or lacks ``name``.
    """

    name: str | None = None

    def __post_init__(self) -> None:
        _check_name("DecodeTensor(name=...)", self.name)
        _safetensors()

    def __call__(self, data: bytes, /) -> torch.Tensor | dict[str, torch.Tensor]:
        """Decode one file."""
        error_type, load = _safetensors()
        try:
            tensors: dict[str, torch.Tensor] = load(check_bytes(self, data))
        except error_type as error:
            raise ValueError(f"the .safetensors file is truncated or damaged: {error}") from error
        return tensors if self.name is None else tensors[_member(self.name, tensors, ".safetensors file")]


@functools.cache
def _safetensors() -> tuple[type[Exception], Any]:
    try:
        found = importlib.import_module("safetensors"), importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError("DecodeTensor needs safetensors: pip install 'aiofeed[safetensors]'") from error
    return found[0].SafetensorError, found[1].load


@public
@explain_arguments()
@dataclass(frozen=True)
class DecodeJSON:
    """Decode JSON with msgspec, and check its type.

    Example:
        ```python
        from pathlib import Path

        import aiofeed

        files = aiofeed.Files(sorted(Path("arrays").glob("*.json")))
        for batch in aiofeed.Feeder(files, decode=aiofeed.DecodeJSON(dict[str, float]), batch_size=2):
            print(batch["x"])
        ```

    Args:
        type: What the JSON must be: ``dict[str, int]``, a ``TypedDict``, a ``NamedTuple``, a ``msgspec.Struct``, ...
            Default: anything.

    Raises:
        TypeError: msgspec does not know the type, or the data is not bytes.
        ValueError: The data is no JSON, or of another type; the message names the place.
    """

    type: Any = None
    _decoder: msgspec.json.Decoder[Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        decoder = msgspec.json.Decoder(Any if self.type is None else self.type)
        object.__setattr__(self, "_decoder", decoder)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the type; the decoder of msgspec is made again."""
        return type(self), (self.type,)

    def __call__(self, data: bytes, /) -> Any:
        """Decode one document."""
        try:
            return self._decoder.decode(check_bytes(self, data))
        except msgspec.ValidationError as error:
            raise ValueError(f"the JSON is not of the type {self.type!r}: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"this is not JSON: {error}") from error


def _check_name(argument: str, name: object) -> None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{argument} must be a name, got {name!r}")


def _member(name: str, names: Any, kind: str) -> str:
    if name not in names:
        raise ValueError(f"the {kind} has no {name!r}; it has {sorted(names)}")
    return name
