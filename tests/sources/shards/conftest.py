"""A cache folder of its own for each test."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def obstore_started() -> None:
    """Start obstore's threads, which keep their descriptors."""
    if importlib.util.find_spec("obstore") is not None:
        from tests.support.fault_server import start_obstore

        start_obstore()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("AIOFEED_CACHE", str(folder))
    return folder


@pytest.fixture
def server() -> Iterator[Any]:
    """An S3 server with a bucket named "bucket"."""
    pytest.importorskip("obstore")
    from tests.support.fault_server import FaultServer

    with FaultServer() as server:
        yield server


@pytest.fixture
def read_all() -> Any:
    """`read_all(source)` reads all samples in one call, with errors as values."""
    return lambda source: asyncio.run(source.read_many(range(len(source))))
