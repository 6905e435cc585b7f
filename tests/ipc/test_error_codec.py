"""Exceptions between processes keep their types, arguments, notes and causes; no exception breaks the codec."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from aiofeed.ipc.error_codec import describe, rebuild
from aiofeed.ipc.schema import ErrorMessage, encode
from aiofeed.kernel.core.errors import DecodeError, FeedError, ReadError, WorkerDiedError


def test_errors_are_rebuilt_with_their_causes() -> None:
    """Types of aiofeed and of Python, keys that UTF-8 cannot encode, notes; any other type as a named ``FeedError``."""
    missing = FileNotFoundError(2, "No such file", "/a/b")
    missing.add_note("tried twice")
    error = ReadError("cannot read", key="a\udcff", index=3, stage="read")
    error.__cause__ = missing
    again = rebuild(describe(error))
    assert type(again) is ReadError
    assert (again.key, again.index, again.stage) == ("a\udcff", 3, "read")
    cause = again.__cause__
    assert type(cause) is FileNotFoundError
    assert (cause.errno, cause.filename, cause.__notes__) == (2, "/a/b", ["tried twice"])
    assert type(rebuild(describe(UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")))) is FeedError
    assert type(rebuild(describe(KeyError("x")))) is KeyError
    assert type(rebuild(describe(SystemExit(1)))) is FeedError
    died = rebuild(describe(WorkerDiedError("killed", -9)))
    assert isinstance(died, WorkerDiedError)
    assert died.exit_status == -9


def test_long_messages_are_shortened() -> None:
    """A description fits into a message."""
    error = describe(DecodeError("x" * 100_000, key="k", index=0, stage="decode"))
    assert len(encode(error)) < 20_000


class Hostile(Exception):
    """Raises SystemExit when it is formatted, and has notes that are no list."""

    __notes__ = 3  # type: ignore[assignment]

    def __str__(self) -> str:
        raise SystemExit(3)


class Unreadable(Exception):
    """Raises SystemExit when its arguments or notes are asked for."""

    @property
    def args(self) -> Any:
        raise SystemExit(3)

    __notes__ = args  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Refuses notes."""

    number: int


class WithoutArguments(Exception):
    """Its arguments raise an error."""

    @property
    def args(self) -> tuple[object, ...]:  # type: ignore[override]
        raise RuntimeError("no arguments")


def test_any_exception_can_be_described() -> None:
    """Also one whose ``__str__``, ``args`` or notes raise SystemExit, or that refuses notes."""
    assert "WithoutArguments" in str(rebuild(describe(WithoutArguments())))
    assert str(rebuild(describe(Hostile()))).endswith("test_error_codec.Hostile")
    assert "Unreadable" in str(rebuild(describe(Unreadable())))
    assert "Frozen" in str(rebuild(describe(Frozen(1))))


@pytest.mark.parametrize(
    "kind", ["builtins.ExceptionGroup", "builtins.UnicodeDecodeError", "builtins.StopIteration", "aiofeed.NoSuchError"]
)
def test_an_exception_that_cannot_be_rebuilt_becomes_a_feed_error(kind: str) -> None:
    """Whatever its constructor raises; and never one that ends a ``for`` loop silently."""
    error = rebuild(ErrorMessage(kind, b"message", ["message", "no exceptions"]))
    assert type(error) is FeedError
    assert str(error) == f"{kind}: message"


def test_a_chain_of_causes_is_cut() -> None:
    """However long the chain in a message is."""
    message = ErrorMessage("builtins.ValueError", b"last", ["last"])
    for _ in range(400):
        message = ErrorMessage("builtins.ValueError", b"value", ["value"], cause=message)
    error: BaseException | None = rebuild(message)
    length = 0
    while error is not None:
        error, length = error.__cause__, length + 1
    assert length < 20
