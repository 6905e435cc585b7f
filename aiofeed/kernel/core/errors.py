"""The exceptions of aiofeed. Wrong arguments raise ``TypeError`` or ``ValueError``."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from aiofeed.kernel.core.formatting import format_error, shown
from aiofeed.kernel.core.types import public, public_in

_PAGE = "causes and fixes: https://aiofeed.github.io/aiofeed/troubleshooting.html#"
# Classes whose cause is often not in the message.
EXPLAINED = ("BatchFailedError", "CacheError", "TooManyFailures", "WorkerDiedError")
# Errors of the user's code or of the list of files: leaving out samples would only hide them.
OF_CODE = (TypeError, NameError, AttributeError, ImportError, NotImplementedError, SyntaxError, IsADirectoryError)
_in_errors = public_in("aiofeed.errors")


@public
class FeedError(Exception):
    """The base class of all errors that a feeder raises while it runs."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*[shown(text) if isinstance(text, str) else text for text in arguments])
        if (name := type(self).__name__) in EXPLAINED:
            self.add_note(f"{_PAGE}{name.lower()}")


@_in_errors
class SampleError(FeedError):
    """A sample failed; the original exception is ``__cause__``.

    Args:
        message: What happened.
        key: The name of the sample, such as its path or URL.
        index: Its index in the source.
        stage: "read" or "decode".
    """

    def __init__(self, message: str, *, key: str, index: int, stage: str) -> None:
        super().__init__(message)
        self.key = key
        self.index: int = int(index)  # the index of a stream's item refers to the item
        self.stage = stage

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with key, index and stage."""
        return partial(type(self), key=self.key, index=self.index, stage=self.stage), (str(self),)


@_in_errors
class ReadError(SampleError):
    """The bytes of a sample could not be read."""


@_in_errors
class DecodeError(SampleError):
    """The bytes of a sample could not be decoded."""


@_in_errors
class CollateError(FeedError):
    """The samples of a batch cannot be collated: shapes, types or structure differ, or ``collate_fn`` raised."""


@_in_errors
class BatchFailedError(FeedError):
    """Every sample of an epoch was skipped, or of a batch for whose step other ranks wait."""


@_in_errors
class TooManyFailures(FeedError):  # noqa: N818 - the name is public
    """More samples of an epoch failed than ``max_failures`` allows."""


@_in_errors
class CacheError(FeedError):
    """A cache cannot be used: it has other data or another decoder's, lacks space, or samples have no fixed layout."""


@_in_errors
class DeviceCopyError(FeedError):
    """A batch could not be copied to the device, or ``transform`` raised there; see ``__cause__``."""


@_in_errors
class StateError(FeedError):
    """A state cannot be loaded; the message lists the differences from this feeder."""


@_in_errors
class IteratorClosedError(FeedError):
    """The iterator was closed by a newer iterator of the same feeder, by ``close`` or by a fork."""


@_in_errors
class WorkerDiedError(FeedError, RuntimeError):
    """A process or thread that feeds this iterator died. A RuntimeError, too, as torch's ``DataLoader`` raises.

    Args:
        message: What happened.
        exit_status: The exit status of the process, negative for a signal; ``None`` if unknown.
    """

    def __init__(self, message: str, exit_status: int | None = None) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def add_note(error: BaseException, text: str) -> None:
    """Add a note to a user's exception; without effect if it refuses notes, as a frozen dataclass does."""
    with contextlib.suppress(Exception, SystemExit):
        error.add_note(text)


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of a user's exception; none if its ``__notes__`` is not a list, or raises."""
    notes: Any = ()
    with contextlib.suppress(Exception, SystemExit):
        notes = getattr(error, "__notes__", ())
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list | tuple) else []


def as_exception(error: BaseException) -> Exception:
    """The error itself; a ``FeedError`` around one that is no ``Exception``, as SystemExit and CancelledError are."""
    if isinstance(error, Exception):
        return error
    wrapped = FeedError(format_error(error))
    wrapped.__cause__ = error
    for note in notes_of(error):
        wrapped.add_note(note)
    return wrapped
