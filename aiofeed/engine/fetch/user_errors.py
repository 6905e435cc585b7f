"""Whatever the user's code raised, under a name: which sample, and what was being done with it."""

from __future__ import annotations

from aiofeed.core.errors import DecodeError, ReadError, SampleError

# The rooms through which the user's code is called. Frames of sources and decoders stay: they are where it failed.
_OURS = ("aiofeed.engine.", "aiofeed.cache.", "aiofeed.runtime.")


def read_error(error: BaseException, key: str, index: int, hint: str = "", *, traced: bool = True) -> SampleError:
    """``error`` as that of reading a sample; one of the user's that names this very sample stays as it is.

    With ``traced=False`` it comes without tracebacks: they would keep alive what their frames refer to, the bytes of
    the sample among them, for as long as the error is remembered.
    """
    return _named(ReadError, "read", error, key, index, hint, traced)


def decode_error(error: BaseException, key: str, index: int, *, traced: bool = True) -> SampleError:
    """``error`` as that of decoding a sample; see ``read_error``."""
    return _named(DecodeError, "decode", error, key, index, "", traced)


def _named(
    kind: type[SampleError], stage: str, error: BaseException, key: str, index: int, hint: str, traced: bool
) -> SampleError:
    if isinstance(error, SampleError) and error.index == index:
        named = error
    else:
        named = kind(f"cannot {stage} {key!r}: {format_error(error)}{hint}", key=key, index=index, stage=stage)
        named.__cause__ = without_our_frames(error)
    if not traced:
        untrace(named)
    return named


def format_error(error: BaseException) -> str:
    """An error on one line."""
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - the user's own exception; its type is all there is to say
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def without_our_frames(error: BaseException) -> BaseException:
    """The error with a traceback that begins in the user's code.

    Beside being shorter it refers to none of our frames. They refer to what came of the chunk, and so to the error:
    a cycle that would keep alive whatever the traceback comes to refer to, the trainer's own frames in the end.
    """
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
        traceback = traceback.tb_next
    error.__traceback__ = traceback
    return error


def untrace(error: BaseException) -> None:
    """Take the tracebacks away, of its causes too: their frames refer to the samples and the memory beside it."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            waiting += [one.__cause__, one.__context__]
