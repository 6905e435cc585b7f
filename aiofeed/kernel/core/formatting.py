"""Formats numbers and exceptions for messages."""

from __future__ import annotations

import reprlib


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
    if ":/" not in text:
        return text
    from aiofeed import _load_addon

    return _load_addon("redacted", "a URL")(text)  # type: ignore[no-any-return]


def format_error(error: BaseException) -> str:
    """An exception as ``"ValueError: its text"``; its type alone if it has no text, or its ``__str__`` raises."""
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - a user's __str__ may raise anything; SystemExit would end a worker process
        text = ""
    # An error of the system has the name of a file, for which a decoder may pass its contents.
    text = text if len(text) <= 3000 else f"{text[:2000]} ... {text[-500:]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
