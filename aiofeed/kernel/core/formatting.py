"""Formats numbers and exceptions for messages."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable

_HIDDEN = "***"
# The user name and password of a URL, and the values of its query, also within a longer text.
_USER_INFO = re.compile(r"(?<=:/)(/?)[^/?#\s]+@")
_QUERY_VALUE = re.compile(r"(?<=[?&])([\w.~%-]+)=[^&#\s\"'<>,)]+")


def format_bytes(nbytes: float) -> str:
    """A number of bytes in the largest binary unit of which there is at least one: ``"1.5 MiB"``, ``"12 bytes"``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} bytes"


def kind_of(value: object) -> str:
    """Return the type of a value with its article: ``"an int"``."""
    name = type(value).__name__
    return f"{'an' if name.startswith((*'aeiouAEIOU', 'ndarray')) else 'a'} {name}"


def brief(value: object) -> str:
    """Return a short ``repr`` of an argument for a message. A part of a URL may be its secret, so it shows none."""
    return f"{kind_of(value)} with a URL" if "://" in repr(value) else reprlib.repr(value)


def shown(text: str) -> str:
    """Return a text for a message, without the passwords and signatures of the URLs in it."""
    return redacted(text) if ":/" in text else text


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text without the secrets, and without user names, passwords and query values of the URLs in it."""
    for secret in secrets:
        text = text.replace(secret, _HIDDEN)
    return _QUERY_VALUE.sub(rf"\1={_HIDDEN}", _USER_INFO.sub(rf"\1{_HIDDEN}@", text))


def format_error(error: BaseException) -> str:
    """An exception as ``"ValueError: its text"``; its type alone if it has no text, or its ``__str__`` raises."""
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - a user's __str__ may raise anything; SystemExit would end a worker process
        text = ""
    # An error of the system has the name of a file, for which a decoder may pass its contents.
    text = text if len(text) <= 3000 else f"{text[:2000]} ... {text[-500:]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
