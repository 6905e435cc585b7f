"""What a decoder is, in words that are the same in another process: samples of another decoder are no use."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable
from typing import Any


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
