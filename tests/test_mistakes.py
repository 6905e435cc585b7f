"""Every mistake in ``tests/mistakes.py`` raises an error whose message shows the way out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mistakes import message_of, mistakes, prepare

pytestmark = pytest.mark.integration
pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
pytest.importorskip("av")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the code of the mistakes may use; the current folder has its files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("mistakes"))
        patch.setenv("AIOFEED_CACHE", str(Path.cwd() / "cache"))
        found = prepare()
        yield found
        found["fed"].close()


@pytest.mark.parametrize(("code", "words"), [(code, words) for _, code, words in mistakes()])
def test_a_mistake_has_a_message_with_the_way_out(
    code: str, words: str, names: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The message has the words that a user needs: the argument, what is allowed, or what to write."""
    with caplog.at_level(logging.CRITICAL):
        message = message_of(code, names)
    assert message is not None, "no error"
    assert words in message


def test_there_are_two_hundred_mistakes() -> None:
    """Each once."""
    found = [code for _, code, _ in mistakes()]
    assert len(set(found)) == len(found) >= 200
