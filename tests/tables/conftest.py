"""Starts the threads of Lance, which stay, before a test counts threads and files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def started_lance(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Lance has been used once, if it is installed."""
    if importlib.util.find_spec("lance") is not None:
        from tests.support.tables import lance

        folder: Path = tmp_path_factory.mktemp("lance")
        lance(folder).take([0])
