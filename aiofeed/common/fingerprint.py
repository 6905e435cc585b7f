"""Fingerprints of decoders and datasets that are the same in every process and run."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

# Characters of a repr that an error message shows.
_SHOWN = 200


def identity(decoder: Callable[..., Any]) -> str:
    """Return the fingerprint of a decoder: its own ``fingerprint()``, else its name, code and settings.

    Raises:
        TypeError: The settings are unknown; the message says what to add.
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
    """Return the fingerprint of a ``Dataset``: type, code of ``__getitem__`` and, if it defines one, ``repr``.

    For a torch ``Subset``: its indices and the whole's fingerprint. Length and items are compared elsewhere.
    """
    kind = type(dataset)
    data = sys.modules.get("torch.utils.data")
    if data is not None and isinstance(dataset, data.Subset):
        return f"{kind.__qualname__} {_digest(repr(list(dataset.indices)))} of {dataset_identity(dataset.dataset)}"
    methods = [getattr(kind, name, None) for name in ("__getitem__", "__getitems__")]
    found = [kind.__qualname__, *[_code(method) for method in methods if isinstance(method, types.FunctionType)]]
    if isinstance(kind.__repr__, types.FunctionType):
        # Addresses differ from process to process.
        shown = " ".join(re.sub(r" at 0x[0-9a-fA-F]+", "", repr(dataset)).split())
        found.append(shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}... {_digest(shown)}")
    return " ".join(found)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _settings(value: Any, decoder: Any) -> str:
    text = repr(value)
    if " at 0x" in text:
        raise TypeError(
            f"a DiskCache must recognize the decoder that filled it, and the settings of {decoder!r} are unknown: give "
            f"it a method fingerprint() that returns a str, which differs for other settings (or a __repr__ that shows "
            f'them), or use cache="host"'
        )
    return text


def _code(function: types.FunctionType) -> str:
    """Return a digest of a function's code, with the functions inside it and without line numbers."""
    digest = hashlib.sha256()
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        digest.update(code.co_code + repr(code.co_names).encode())
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                waiting.append(constant)
            elif isinstance(constant, frozenset):  # whose order differs from process to process
                digest.update(repr(sorted(map(repr, constant))).encode())
            else:
                digest.update(repr(constant).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:12]
