"""Second requests in place of late ones, and bodies that come too slowly."""

import asyncio

import pytest

from aiofeed.objects import reader as reader_module
from aiofeed.objects import requests as requests_module
from aiofeed.objects.clients import open_requests
from aiofeed.objects.reader import ObjectReader, statistics_of
from tests.support.fault_server import Fault
from tests.support.waiting import until

DATA = bytes(range(256)) * 16


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(reader_module, "backoff_s", lambda attempt, jitter: 0.001)


@pytest.fixture
def reader(server):
    server.objects["bucket/a"] = DATA
    return ObjectReader("s3://bucket", options=server.options)


async def test_a_late_request_is_sent_a_second_time(reader, server):
    """A request that takes far longer than 95 % of the others is sent again, and the first answer counts."""
    for _ in range(80):
        assert await reader.read("a") == DATA
    server.schedule = lambda request: Fault(stall=True) if request.number == 80 else None
    late = asyncio.create_task(reader.read("a"))
    await asyncio.to_thread(until, lambda: server.count > 80)
    others = 0
    while not late.done():
        assert await reader.read("a") == DATA
        others += 1
    assert await late == DATA
    found = statistics_of([reader])
    assert found.hedges >= 1
    assert (found.requests, found.retries) == (81 + others + found.hedges, 0)


async def test_second_requests_are_few(reader, server):
    """At most 5 % of the requests are sent a second time, however many are late."""
    server.schedule = lambda request: Fault(delay_s=0.1 if request.number > 100 and request.number % 8 == 0 else 0.0)

    async def read(times):
        for _ in range(times):
            await reader.read("a")

    await asyncio.gather(*[read(40) for _ in range(16)])
    found = statistics_of([reader])
    assert 0 < found.hedges <= 0.05 * found.requests


async def test_a_body_that_trickles(reader, server, monkeypatch):
    """A body that comes too slowly is a transient fault, although some bytes arrive all the time."""
    monkeypatch.setattr(requests_module, "BODY_S", 0.05)
    server.schedule = lambda request: Fault(trickle_s=0.01) if request.number < 2 else None
    assert await reader.read("a") == DATA
    assert (statistics_of([reader]).retries, server.count) == (2, 3)
    monkeypatch.setattr(reader_module, "RETRY_S", 0.1)
    server.schedule = lambda request: Fault(trickle_s=0.01)
    with pytest.raises(OSError, match=r"a part of 4096 bytes did not arrive within 0 s: s3://bucket/a"):
        await reader.read("a")
    await asyncio.to_thread(until, lambda: not open_requests)


async def test_slow_bodies_use_up_no_second_requests(reader, server, monkeypatch):
    """A late body is requested anew in place of the slow one, even if no second request is allowed."""
    monkeypatch.setattr(requests_module, "HEDGE_SHARE", 0.0)
    monkeypatch.setattr(requests_module, "BODY_LEAST_S", 0.05)
    for _ in range(80):
        assert await reader.read("a") == DATA
    server.schedule = lambda request: Fault(trickle_s=0.01) if 80 <= request.number < 90 else None
    late = [asyncio.create_task(reader.read("a")) for _ in range(10)]
    await asyncio.to_thread(until, lambda: server.count >= 90)
    others = 0
    while not all(task.done() for task in late):
        assert await reader.read("a") == DATA
        others += 1
    assert await asyncio.gather(*late) == [DATA] * 10
    found = statistics_of([reader])
    assert (found.hedges, found.requests) == (0, 90 + others + found.retries)
    assert found.retries >= 10


async def test_no_second_requests_in_an_outage(reader, server):
    """If all requests are late, or some have failed, none is sent a second time."""
    for _ in range(200):
        await reader.read("a")
    server.schedule = lambda request: Fault(delay_s=0.2)
    await asyncio.gather(*[reader.read("a") for _ in range(16)])
    assert statistics_of([reader]).hedges == 0
    server.schedule = lambda request: Fault(status=503) if request.number % 2 else Fault(delay_s=0.1)
    await reader.read("a")
    await reader.read("a")
    assert statistics_of([reader]).hedges == 0


async def test_stores_that_are_given(tmp_path):
    """Small objects of a store in memory, or of a folder, are read alike."""
    from obstore.store import LocalStore, MemoryStore

    for store in (MemoryStore(), LocalStore(tmp_path)):
        await store.put_async("a", DATA)
        reader = ObjectReader("", store=store)
        for _ in range(80):
            assert await reader.read("a") == DATA
