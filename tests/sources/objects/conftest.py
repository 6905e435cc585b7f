"""A server of objects for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fault_server import FaultServer, start_obstore


@pytest.fixture(scope="session", autouse=True)
def obstore_started() -> None:
    """Start obstore's threads, which keep their descriptors."""
    start_obstore()


@pytest.fixture
def server() -> Iterator[FaultServer]:
    """A server without objects, with the client's ``options``."""
    with FaultServer() as running:
        yield running
