"""A cache folder of its own for each test; the event loops of zarr and obstore, which stay, have been started."""

from __future__ import annotations

import asyncio
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
def started() -> None:
    """Zarr and obstore have been used once."""
    zarr = pytest.importorskip("zarr", minversion="3")
    zarr.create_array({}, shape=(1,), dtype="i4")[:] = np.zeros(1, "i4")
    store = pytest.importorskip("obstore.store").MemoryStore()
    store.put("a", b"")
    asyncio.run(store.get_async("a"))


@pytest.fixture
def server(object_server: FaultServer) -> FaultServer:
    """A server without objects."""
    return object_server
