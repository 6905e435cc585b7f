"""Fixtures of the tests of devices."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Use one torch thread."""
