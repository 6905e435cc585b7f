"""Fixtures for tests of several processes."""

from __future__ import annotations

import time

import pytest

from tests.support.waiting import children


@pytest.fixture(autouse=True)
def no_worker_left_running() -> object:
    """Fail a test after which a worker process still runs."""
    before = {each.pid for each in children()}
    yield
    deadline = time.monotonic() + 30.0
    while left := [each for each in children() if each.pid not in before]:
        assert time.monotonic() < deadline, f"processes still run after the test: {left}"
        time.sleep(0.01)
