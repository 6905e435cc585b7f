"""Exceptions between processes: the type by name, message and traceback as text. Nothing is unpickled or imported."""

from __future__ import annotations

import builtins
import contextlib
import traceback
from typing import Any

from aiofeed.ipc.schema import ErrorMessage, Scalar
from aiofeed.kernel.core import errors
from aiofeed.kernel.core.errors import FeedError, SampleError, WorkerDiedError

_MAX_TEXT = 16_000
_MAX_CAUSES = 8
_MAX_NOTES = 8
# Every public error of aiofeed reports the package as its module.
_MODULES = ("aiofeed", "aiofeed.errors")


def describe(error: BaseException, depth: int = 0) -> ErrorMessage:
    """Describe an exception and its causes; long texts are shortened."""
    kind = type(error)
    cause = error.__cause__
    sample = error if isinstance(error, SampleError) else None
    return ErrorMessage(
        kind=f"{kind.__module__}.{kind.__qualname__}",
        message=_to_bytes(_text_of(error)),
        arguments=_plain_arguments(error),
        key=None if sample is None else _to_bytes(sample.key),
        index=None if sample is None else sample.index,
        stage=None if sample is None else sample.stage,
        notes=[_to_bytes(note) for note in errors.notes_of(error)[:_MAX_NOTES]],
        traceback=_to_bytes("".join(traceback.format_tb(error.__traceback__))),
        cause=describe(cause, depth + 1) if cause is not None and depth < _MAX_CAUSES else None,
    )


def rebuild(message: ErrorMessage, depth: int = 0) -> Exception:
    """Make the exception of a description. Never raises.

    Errors of aiofeed and of Python keep their types; any other becomes a ``FeedError`` that names its type. The
    traceback of the other process is added as a note.
    """
    error = _instance(message)
    for note in map(_to_text, message.notes):
        if note not in errors.notes_of(error):  # those of its constructor
            error.add_note(note)
    if message.traceback:
        error.add_note(f"in the other process:\n{_to_text(message.traceback).rstrip()}")
    if message.cause is not None and depth < _MAX_CAUSES:
        error.__cause__ = rebuild(message.cause, depth + 1)
    return error


def _instance(message: ErrorMessage) -> Exception:
    text = _to_text(message.message)
    module, _, name = message.kind.rpartition(".")
    if module in _MODULES:
        kind: Any = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, SampleError) and message.key is not None:
            return kind(text, key=_to_text(message.key), index=message.index or 0, stage=message.stage or "")
        if isinstance(kind, type) and issubclass(kind, FeedError) and not issubclass(kind, SampleError):
            if kind is WorkerDiedError:
                status = message.arguments[-1] if message.arguments else None  # see `_plain_arguments`
                return WorkerDiedError(text, status if type(status) is int else None)
            return kind(text)
    if module == "builtins":
        kind = getattr(builtins, name, None)
        # Raised in an iterator, these two would end the consumer's loop silently.
        if isinstance(kind, type) and issubclass(kind, Exception) and kind not in (StopIteration, StopAsyncIteration):
            # The constructors of some want other arguments: UnicodeDecodeError, ExceptionGroup.
            with contextlib.suppress(TypeError, ValueError):
                error: Exception = kind(*(message.arguments if message.arguments is not None else [text]))
                return error
    return FeedError(f"{message.kind}: {text}" if text else message.kind)


def _plain_arguments(error: BaseException) -> list[Scalar] | None:
    try:
        arguments: tuple[Any, ...] = error.args
    except BaseException:  # noqa: BLE001 - as in `_text_of`
        return None
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        arguments = (error.errno, error.strerror, error.filename)
    if isinstance(error, WorkerDiedError):
        arguments = (str(error), error.exit_status)
    for value in arguments:
        if type(value) not in (type(None), bool, int, float, str):
            return None
        if isinstance(value, int) and abs(value) >> 63:
            return None
        if isinstance(value, str) and (len(value) > _MAX_TEXT or _to_bytes(value) != value.encode("utf-8", "replace")):
            return None
    return list(arguments)


def _text_of(error: object) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - a user's __str__ may raise anything, SystemExit included
        return ""


def _to_bytes(text: str) -> bytes:
    if len(text) > _MAX_TEXT:
        text = f"{text[: _MAX_TEXT // 2]} [...] {text[-_MAX_TEXT // 2 :]}"
    return text.encode("utf-8", "surrogatepass")


def _to_text(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace")
