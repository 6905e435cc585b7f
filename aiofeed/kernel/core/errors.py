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
    """The base class of all errors that a feeder raises while it runs.

    Example:
        ```python
        import aiofeed

        photos = aiofeed.ImageFolder("photos")
        feeder = aiofeed.Feeder(photos, decode=aiofeed.DecodeImage(size=224), batch_size=4)
        try:
            for images, labels in feeder:
                print(images.shape)
        except aiofeed.FeedError as error:
            print("the data, not the training, failed:", error)
        ```
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*[shown(text) if isinstance(text, str) else text for text in arguments])
        if (name := type(self).__name__) in EXPLAINED:
            self.add_note(f"{_PAGE}{name.lower()}")


@_in_errors
class SampleError(FeedError):
    """A sample failed; the original exception is ``__cause__``.

    Example:
        ```python
        import aiofeed

        files = aiofeed.Files(["photos.csv"])  # no image
        feeder = aiofeed.Feeder(files, decode=aiofeed.DecodeImage(size=224), batch_size=1)
        try:
            next(iter(feeder))
        except aiofeed.errors.SampleError as error:
            print(error.stage, error.key, repr(error.__cause__))
        ```

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
    """The bytes of a sample could not be read.

    Example:
        ```python
        import aiofeed

        files = aiofeed.Files(["missing.jpg"])
        feeder = aiofeed.Feeder(files, decode=aiofeed.DecodeImage(size=224), batch_size=1)
        try:
            next(iter(feeder))
        except aiofeed.errors.ReadError as error:
            print(error.key, repr(error.__cause__))
        ```
    """


@_in_errors
class DecodeError(SampleError):
    """The bytes of a sample could not be decoded.

    Example:
        ```python
        import aiofeed

        files = aiofeed.Files(["photos.csv"])  # no image
        feeder = aiofeed.Feeder(files, decode=aiofeed.DecodeImage(size=224), batch_size=1)
        try:
            next(iter(feeder))
        except aiofeed.errors.DecodeError as error:
            print(error.key, repr(error.__cause__))
        ```
    """


@_in_errors
class CollateError(FeedError):
    """The samples of a batch cannot be collated: shapes, types or structure differ, or ``collate_fn`` raised.

    Example:
        ```python
        import torch

        import aiofeed

        feeder = aiofeed.Feeder([torch.zeros(2), torch.zeros(3)], batch_size=2)
        try:
            next(iter(feeder))
        except aiofeed.errors.CollateError as error:
            print(error)  # sizes differ: pass collate_fn=aiofeed.pad_collate()
        ```
    """


@_in_errors
class BatchFailedError(FeedError):
    """Every sample of an epoch was skipped, or of a batch for whose step other ranks wait.

    Example:
        ```python
        import aiofeed

        missing = aiofeed.Files(["missing.jpg"])
        policy = aiofeed.FailurePolicy("skip", max_failures=10)
        decode = aiofeed.DecodeImage(size=224)
        try:
            list(aiofeed.Feeder(missing, decode=decode, batch_size=1, on_error=policy))
        except aiofeed.errors.BatchFailedError as error:
            print(error)
        ```
    """


@_in_errors
class TooManyFailures(FeedError):  # noqa: N818 - the name is public
    """More samples of an epoch failed than ``max_failures`` allows.

    Example:
        ```python
        import aiofeed

        policy = aiofeed.FailurePolicy("skip", max_failures=1)
        missing = aiofeed.Files(["photos/cat/0.jpg", "missing-1.jpg", "missing-2.jpg"])
        decode = aiofeed.DecodeImage(size=224)
        try:
            list(aiofeed.Feeder(missing, decode=decode, batch_size=1, on_error=policy))
        except aiofeed.errors.TooManyFailures as error:
            print(error)
        ```
    """


@_in_errors
class CacheError(FeedError):
    """A cache cannot be used: it has other data or another decoder's, lacks space, or samples have no fixed layout.

    Example:
        ```python
        import aiofeed

        photos, cache = aiofeed.ImageFolder("photos"), aiofeed.DiskCache("train.cache")
        list(aiofeed.Feeder(photos, decode=aiofeed.DecodeImage(size=224), batch_size=4, cache=cache))
        try:
            list(aiofeed.Feeder(photos, decode=aiofeed.DecodeImage(size=96), batch_size=4, cache=cache))
        except aiofeed.errors.CacheError as error:
            print(error)  # the file has images of another size
        ```
    """


@_in_errors
class DeviceCopyError(FeedError):
    """A batch could not be copied to the device, or ``transform`` raised there; see ``__cause__``.

    Example:
        ```python
        import torch

        import aiofeed

        feeder = aiofeed.Feeder([torch.zeros(2)], batch_size=1, device="auto", transform=torch.linalg.inv)
        try:
            next(iter(feeder))
        except aiofeed.errors.DeviceCopyError as error:
            print(error)
        except RuntimeError as error:  # without an accelerator
            print(error)
        ```
    """


@_in_errors
class StateError(FeedError):
    """A state cannot be loaded; the message lists the differences from this feeder.

    Example:
        ```python
        import aiofeed

        state = aiofeed.Feeder(list(range(100)), batch_size=10).state_dict()
        try:
            aiofeed.Feeder(list(range(99)), batch_size=10).load_state_dict(state)
        except aiofeed.errors.StateError as error:
            print(error)  # the lengths differ
        ```
    """


@_in_errors
class IteratorClosedError(FeedError):
    """The iterator was closed by a newer iterator of the same feeder, by ``close`` or by a fork.

    Example:
        ```python
        import aiofeed

        feeder = aiofeed.Feeder(list(range(100)), batch_size=10)
        first, second = iter(feeder), iter(feeder)  # the second closes the first
        try:
            next(first)
        except aiofeed.errors.IteratorClosedError as error:
            print(error)
        ```
    """


@_in_errors
class WorkerDiedError(FeedError, RuntimeError):
    """A process or thread that feeds this iterator died. A RuntimeError, too, as torch's ``DataLoader`` raises.

    Example:
        ```python
        import aiofeed

        photos = aiofeed.ImageFolder("photos")
        decode = aiofeed.DecodeImage(size=224)
        with aiofeed.Feeder(photos, decode=decode, batch_size=4, engine="process:2") as feeder:
            try:
                list(feeder)
            except aiofeed.errors.WorkerDiedError as error:
                print(error, error.exit_status)  # -9: perhaps there was too little memory
        ```

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
