"""Fixtures of the tests of servers and their consumers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import serve_parts
from tests.support.waiting import no_worker_left_running  # noqa: F401


@pytest.fixture(scope="session")
def forking() -> Iterator[None]:
    """Run a fork server that has imported torch, from which consumers are forked, until all tests have ended."""
    yield from serve_parts.forking()


@pytest.fixture
def address(tmp_path: Path) -> str:
    """Return the path of a socket."""
    return str(tmp_path / "feed.sock")
