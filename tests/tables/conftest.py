"""Starts the threads of Lance, which stay, before a test counts threads and files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.fault_server import FaultServer


@pytest.fixture(autouse=True, scope="session")
def started_lance(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Lance has been used once, if it is installed."""
    if importlib.util.find_spec("lance") is not None:
        from tests.support.tables import lance

        folder: Path = tmp_path_factory.mktemp("lance")
        lance(folder).take([0])


@pytest.fixture
def server(object_server: FaultServer) -> FaultServer:
    """A server without objects."""
    return object_server


@pytest.fixture(autouse=True, scope="session")
def started_parsers() -> None:
    """Arrow's parser has been used once: it opens a pipe for signals, which stays."""
    if importlib.util.find_spec("pyarrow") is not None:
        import pyarrow.csv

        pyarrow.csv.read_csv(pyarrow.py_buffer(b"a\n1\n"))
