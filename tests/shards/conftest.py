"""A cache folder of its own for each test, and what tests of all formats use."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aiofeed.shards import indexing
from aiofeed.shards.index import ShardIndex


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("AIOFEED_CACHE", str(folder))
    return folder


@pytest.fixture
def server(object_server: Any) -> Any:
    """A server without objects."""
    return object_server


@pytest.fixture
def read_all() -> Any:
    """`read_all(source)` reads all samples in one call, with errors as values."""
    return lambda source: asyncio.run(source.read_many(range(len(source))))


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs of the shards over which a pass was made."""
    seen: list[str] = []
    original = indexing.run_scan

    async def counted(shard: Any, *arguments: Any) -> ShardIndex:
        seen.append(shard.url)
        return await original(shard, *arguments)

    monkeypatch.setattr(indexing, "run_scan", counted)
    return seen
