"""Errors between processes: type by name, message and traceback as text. Nothing is unpickled, nothing is imported."""

from __future__ import annotations

import builtins
import traceback
from typing import Any

from aiofeed.core import errors
from aiofeed.core.errors import FeedError, SampleError, WorkerDiedError
from aiofeed.processes.ipc.schema import ErrorMessage, Scalar

_MOST_TEXT = 16_000
_MOST_CAUSES = 8
_OURS = "aiofeed"


def describe(error: BaseException, depth: int = 0) -> ErrorMessage:
    """An error as it crosses; what is longer than anybody reads is cut."""
    kind = type(error)
    cause = error.__cause__
    sample = error if isinstance(error, SampleError) else None
    return ErrorMessage(
        kind=f"{kind.__module__}.{kind.__qualname__}",
        message=_raw(_text_of(error)),
        arguments=_arguments(error),
        key=None if sample is None else _raw(sample.key),
        index=None if sample is None else sample.index,
        stage=None if sample is None else sample.stage,
        notes=[_raw(str(note)) for note in getattr(error, "__notes__", ())[:_MOST_CAUSES]],
        traceback=_raw("".join(traceback.format_tb(error.__traceback__))),
        cause=describe(cause, depth + 1) if cause is not None and depth < _MOST_CAUSES else None,
    )


def rebuild(failure: ErrorMessage) -> Exception:
    """The error on this side: ours and Python's own by their types, any other as a ``FeedError`` that names it.

    The traceback that it had on the other side is in its notes.
    """
    error = _instance(failure)
    for note in failure.notes:
        error.add_note(_told(note))
    if failure.traceback:
        error.add_note(f"in the engine's process:\n{_told(failure.traceback).rstrip()}")
    if failure.cause is not None:
        error.__cause__ = rebuild(failure.cause)
    return error


def _instance(failure: ErrorMessage) -> Exception:
    message = _told(failure.message)
    module, _, name = failure.kind.rpartition(".")
    if module == _OURS:
        kind: Any = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, SampleError) and failure.key is not None:
            return kind(message, key=_told(failure.key), index=failure.index or 0, stage=failure.stage or "")
        if isinstance(kind, type) and issubclass(kind, FeedError) and not issubclass(kind, SampleError):
            if kind is WorkerDiedError:
                return WorkerDiedError(message, _status(failure))
            return kind(message)
    if module == "builtins":
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(*(failure.arguments if failure.arguments is not None else [message]))
            except TypeError:  # one that takes other arguments than texts (UnicodeDecodeError)
                pass
    return FeedError(f"{failure.kind}: {message}" if message else failure.kind)


def _status(failure: ErrorMessage) -> int | None:
    """The exit status that stands behind the message."""
    status = failure.arguments[1] if failure.arguments is not None and len(failure.arguments) == 2 else None
    return status if type(status) is int else None


def _arguments(error: BaseException) -> list[Scalar] | None:
    arguments: tuple[Any, ...] = error.args
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        arguments = (error.errno, error.strerror, error.filename)
    if isinstance(error, WorkerDiedError):
        arguments = (str(error), error.exit_status)
    for value in arguments:
        if type(value) not in (type(None), bool, int, float, str):
            return None
        if isinstance(value, int) and abs(value) >> 63:
            return None
        if isinstance(value, str) and (len(value) > _MOST_TEXT or _raw(value) != value.encode("utf-8", "replace")):
            return None
    return list(arguments)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the user's __str__; the error matters more than its words
        return ""


def _raw(text: str) -> bytes:
    if len(text) > _MOST_TEXT:
        text = f"{text[: _MOST_TEXT // 2]} [...] {text[-_MOST_TEXT // 2 :]}"
    return text.encode("utf-8", "surrogatepass")


def _told(raw: bytes) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace")
