"""Whatever the user's code raised, under a name: which sample, and what was being done with it."""

from __future__ import annotations

import os

from aiofeed.errors import DecodeError, ReadError, SampleError

# Our own modules through which the user's code is called.
_HERE = os.path.dirname(__file__)
_OURS = frozenset(os.path.join(_HERE, f"{name}.py") for name in ("fetch", "fetch_items", "reading", "guard", "retries"))


def read_error(error: BaseException, key: str, index: int, hint: str = "") -> SampleError:
    """``error`` as that of reading a sample; one that has a name already keeps it."""
    if isinstance(error, SampleError):
        return error
    named = ReadError(f"cannot read {key!r}: {told(error)}{hint}", key=key, index=index, stage="read")
    named.__cause__ = without_our_frames(error)
    return named


def decode_error(error: BaseException, key: str, index: int) -> SampleError:
    """``error`` as that of decoding a sample; one that has a name already keeps it."""
    if isinstance(error, SampleError):
        return error
    named = DecodeError(f"cannot decode {key!r}: {told(error)}", key=key, index=index, stage="decode")
    named.__cause__ = without_our_frames(error)
    return named


def told(error: BaseException) -> str:
    """An error on one line."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def without_our_frames(error: BaseException) -> BaseException:
    """The error with a traceback that begins in the user's code.

    Beside being shorter it refers to none of our frames. They refer to what came of the chunk, and so to the error:
    a cycle that would keep alive whatever the traceback comes to refer to, the trainer's own frames in the end.
    """
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename in _OURS:
        traceback = traceback.tb_next
    return error.with_traceback(traceback)
