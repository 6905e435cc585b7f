"""A server of objects for each test."""

from __future__ import annotations

import pytest

from tests.support.fault_server import FaultServer


@pytest.fixture
def server(object_server: FaultServer) -> FaultServer:
    """A server without objects."""
    return object_server
