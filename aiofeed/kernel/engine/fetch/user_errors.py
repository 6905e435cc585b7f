"""Turns exceptions of the user's code into errors that name the sample and what was done with it."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import Any

from aiofeed.kernel.core.errors import OF_CODE, DecodeError, FeedError, ReadError, SampleError, add_note, notes_of
from aiofeed.kernel.core.formatting import format_error

# Modules that call the user's code. Frames of sources and decoders stay in a traceback: they show where it failed.
_OURS = ("aiofeed.kernel.engine.", "aiofeed.kernel.runtime.")
_BYTES = " (the decoder gets the bytes of a file, not its path: Image.open(io.BytesIO(data)))"
# What Python, Pillow, NumPy, torch and OpenCV say about them.
_OPENED = re.compile(r"embedded null|(not|got|type) (<class )?['\"]bytes|'bytes' object has|and bytes in|'filename'")
_POINTER = b"version https://git-lfs.github.com/spec/"
_NAMED = (ReadError, DecodeError)
_WAY = 'Feeder(on_error="skip") leaves out samples that fail, "replace" takes others instead'


def sample_error(
    kind: type[SampleError], error: BaseException, key: str, index: int, hint: str = "", *, traced: bool = True
) -> SampleError:
    """Return a sample's ``ReadError`` or ``DecodeError``. One that names this sample already is returned unchanged.

    An error of a user's subclass becomes the cause of one: its constructor may need other arguments, so that it cannot
    be copied or sent to another process. ``traced=False`` removes the tracebacks: for as long as the error is
    remembered, they would keep what their frames refer to alive, such as the bytes of the sample.
    """
    if isinstance(error, SampleError) and type(error) in _NAMED and (error.key, error.index) == (key, index):
        named = error
    else:
        stage = "read" if kind is ReadError else "decode"
        named = kind(f"cannot {stage} {key!r}: {format_error(error)}{hint}", key=key, index=index, stage=stage)
        named.__cause__ = without_our_frames(error)
    if not traced:
        untrace(named)
    return named


def bytes_hint(error: BaseException) -> str:
    """Return advice for a function that was given the bytes of a file for its path, or for an open file."""
    named = isinstance(getattr(error, "filename", None), bytes)  # the error of the system, such as "file name too long"
    return _BYTES if named or _OPENED.search(format_error(error)) else ""


def pointer_hint(path: str) -> str:
    """Return what to do about a file that is a pointer of Git LFS; empty for other files, and for no file."""
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            return " (the file is a pointer of Git LFS: `git lfs pull` fetches its contents)"
    return ""


def suggest_policy(error: FeedError) -> FeedError:
    """Return the error; that of a sample's data with a note on what else may be done with samples that fail."""
    of_code = isinstance(error.__cause__, OF_CODE) or _BYTES in str(error)
    if isinstance(error, SampleError) and not of_code and _WAY not in notes_of(error):
        add_note(error, _WAY)
    return error


def without_our_frames(error: BaseException) -> BaseException:
    """Return the error with a traceback that begins in the user's code.

    It is shorter, and does not refer to our frames. They refer to the chunk's outcome, and so to the error: a reference
    cycle, which would keep all frames of the traceback alive, in the end those of the trainer.
    """
    traceback = error.__traceback__
    while traceback is not None and _is_ours(traceback.tb_frame.f_globals):
        traceback = traceback.tb_next
    # Not by assignment, which a frozen dataclass refuses.
    return BaseException.with_traceback(error, traceback)


def _is_ours(module: dict[str, Any]) -> bool:
    """Return whether a module calls the user's code: the engine, or an add-on whose package says ``hides_frames``."""
    package = sys.modules.get(str(module.get("__package__")))
    return str(module.get("__name__")).startswith(_OURS) or "hides_frames" in vars(package or re)


def untrace(error: BaseException) -> None:
    """Remove the tracebacks of an error and its causes: their frames refer to samples and their memory."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            BaseException.with_traceback(one, None)
            waiting += [one.__cause__, one.__context__]
