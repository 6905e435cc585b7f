"""A cache folder of its own for each test; zarr's event loop, which stays, has been started."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.fault_server import FaultServer


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("AIOFEED_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True, scope="session")
def started_zarr() -> None:
    """Zarr has been used once."""
    zarr = pytest.importorskip("zarr", minversion="3")
    zarr.create_array({}, shape=(1,), dtype="i4")[:] = np.zeros(1, "i4")


@pytest.fixture
def server(object_server: FaultServer) -> FaultServer:
    """A server without objects."""
    return object_server
