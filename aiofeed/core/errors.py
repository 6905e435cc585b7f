"""Every error of aiofeed. Wrong arguments are ``TypeError`` and ``ValueError``, as everywhere in Python."""

from __future__ import annotations

from typing import Any

from aiofeed.core.types import public


@public
class FeedError(Exception):
    """The root of all errors that a feeder raises while it runs."""


@public
class SampleError(FeedError):
    """One sample failed. The cause is chained (``__cause__``).

    Args:
        message: what happened.
        key: name of the sample, a path or a URL.
        index: its position in the source.
        stage: "read" or "decode".
    """

    def __init__(self, message: str, *, key: str, index: int, stage: str) -> None:
        super().__init__(message)
        self.key = key
        self.index = index
        self.stage = stage

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep key, index and stage across processes."""
        return _rebuild_sample_error, (type(self), str(self), self.key, self.index, self.stage)


def _rebuild_sample_error(kind: type[SampleError], message: str, key: str, index: int, stage: str) -> SampleError:
    return kind(message, key=key, index=index, stage=stage)


@public
class ReadError(SampleError):
    """The bytes of a sample could not be read."""


@public
class DecodeError(SampleError):
    """The bytes of a sample could not be decoded."""


@public
class CollateError(FeedError):
    """The samples of a batch do not fit together: shapes, types or structure differ, or ``collate_fn`` raised."""


@public
class BatchFailedError(FeedError):
    """Every sample of a batch was skipped, so that there is nothing to hand out."""


@public
class TooManyFailures(FeedError):  # noqa: N818 - the name is public
    """More samples failed than ``max_failures`` allows, or all of an epoch did."""


@public
class CacheError(FeedError):
    """A cache cannot be used: it is of other data or another decoder, finds no room, or a sample has no fixed form."""


@public
class DeviceCopyError(FeedError):
    """A batch could not be copied to the device, or ``transform`` raised there. The cause is chained."""


@public
class StateError(FeedError):
    """A state does not fit this feeder; the message says exactly what differs."""


@public
class IteratorClosedError(FeedError):
    """This iterator was stopped: by a newer one of the same feeder, by ``close``, or by a fork."""


@public
class WorkerDiedError(FeedError):
    """A process or thread that feeds this iterator ended without being asked to.

    Args:
        message: what happened.
        exit_status: of the process, negative for a signal; ``None`` where it is not known.
    """

    def __init__(self, message: str, exit_status: int | None = None) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def as_exception(error: BaseException) -> Exception:
    """The error itself, or one of ours around what would end a thread or pass for a cancelled task."""
    if isinstance(error, Exception):
        return error
    wrapped = FeedError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    wrapped.__cause__ = error
    wrapped.__notes__ = list(getattr(error, "__notes__", ()))
    return wrapped
