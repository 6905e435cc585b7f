"""What a decoder or a ``Dataset`` is, in words that are the same in another process: what another made is no use."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

# As much of a repr as an error message bears.
_SHOWN = 200


def identity(decoder: Callable[..., Any]) -> str:
    """What tells a decoder from others: its own ``fingerprint()``, else its name, its code and its settings.

    Raises:
        TypeError: it cannot be told; the message says what to add.
    """
    own = getattr(decoder, "fingerprint", None)
    if callable(own):
        return str(own())
    if isinstance(decoder, functools.partial):
        settings = _settings((decoder.args, sorted(decoder.keywords.items())), decoder)
        return f"{identity(decoder.func)} with {settings}"
    if isinstance(decoder, types.MethodType) and isinstance(decoder.__func__, types.FunctionType):
        return f"{decoder.__func__.__qualname__} {_code(decoder.__func__)} of {_settings(decoder.__self__, decoder)}"
    if isinstance(decoder, types.FunctionType):
        bound = [cell.cell_contents for cell in decoder.__closure__ or ()]
        bound += [*(decoder.__defaults__ or ()), *sorted((decoder.__kwdefaults__ or {}).items())]
        settings = f" with {_settings(bound, decoder)}" if bound else ""
        return f"{decoder.__module__}.{decoder.__qualname__} {_code(decoder)}{settings}"
    if isinstance(decoder, types.BuiltinFunctionType):
        return f"{decoder.__module__}.{decoder.__qualname__}"
    kind = type(decoder)
    methods = [getattr(kind, name, None) for name in ("__call__", "decode_cached", "decode_into", "decode_cached_into")]
    code = " ".join(_code(method) for method in methods if isinstance(method, types.FunctionType))
    return f"{kind.__module__}.{kind.__qualname__} {code} {_settings(decoder, decoder)}"


def dataset_identity(dataset: Any) -> str:
    """What can be seen of a ``Dataset``: its type, the code of its ``__getitem__``, its ``repr`` where it has its own.

    Of a torch ``Subset``: its indices, and that of which it is one. Length and items are compared elsewhere.
    """
    kind = type(dataset)
    data = sys.modules.get("torch.utils.data")
    if data is not None and isinstance(dataset, data.Subset):
        return f"{kind.__qualname__} {_digest(repr(list(dataset.indices)))} of {dataset_identity(dataset.dataset)}"
    methods = [getattr(kind, name, None) for name in ("__getitem__", "__getitems__")]
    found = [kind.__qualname__, *[_code(method) for method in methods if isinstance(method, types.FunctionType)]]
    if isinstance(kind.__repr__, types.FunctionType):
        # Where it lies in memory is not what it is.
        shown = " ".join(re.sub(r" at 0x[0-9a-fA-F]+", "", repr(dataset)).split())
        found.append(shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}... {_digest(shown)}")
    return " ".join(found)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _settings(value: Any, decoder: Any) -> str:
    text = repr(value)
    if " at 0x" in text:
        raise TypeError(
            f"a DiskCache has to know whether the decoder is the one that filled it, and {decoder!r} does not tell: "
            f"give it a method fingerprint() that returns a str, other for other settings (or a __repr__ that shows "
            f'them), or use cache="host"'
        )
    return text


def _code(function: types.FunctionType) -> str:
    """A digest of a function's code, functions inside it included; line numbers do not count."""
    digest = hashlib.sha256()
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        digest.update(code.co_code + repr(code.co_names).encode())
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                waiting.append(constant)
            elif isinstance(constant, frozenset):  # its order changes from process to process
                digest.update(repr(sorted(map(repr, constant))).encode())
            else:
                digest.update(repr(constant).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:12]
