"""Orders over more samples than fit in memory."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import torch

from aiofeed import Feeder

if TYPE_CHECKING:
    import pytest


class Many:
    """A source that claims to be large."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def key(self, index: int) -> str:
        return str(index)

    async def read(self, index: int) -> bytes:
        return b"%d" % index


def number(data: bytes) -> torch.Tensor:
    return torch.tensor(int(data))


def test_a_keyed_order_of_a_billion_stores_nothing() -> None:
    """The first batch of 1,000,000,000 samples comes at once, and memory stays under 50 MB above the import."""
    code = """
        import resource, sys
        import torch, numpy
        from aiofeed import Feeder
        class Many:
            def __len__(self): return 1_000_000_000
            def key(self, index): return str(index)
            async def read(self, index): return b"%d" % index
        warm = Feeder([1, 2], batch_size=1); list(warm); warm.close()
        def peak_kib():
            if sys.platform != "linux":
                return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            # A new program's ru_maxrss begins with that of the one that started it.
            with open("/proc/self/status") as status:
                return int(status.read().split("VmHWM:")[1].split()[0])
        before = peak_kib()
        feeder = Feeder(Many(), decode=lambda data: torch.tensor(int(data)), batch_size=64, shuffle="keyed")
        iterator = iter(feeder)
        batches = [next(iterator).tolist() for _ in range(100)]
        added = (peak_kib() - before) / 1024
        state = feeder.state_dict()
        first = feeder.statistics().first_batch_s
        feeder.close()
        assert len({index for batch in batches for index in batch}) == 6400
        again = Feeder(Many(), decode=lambda data: torch.tensor(int(data)), batch_size=64, shuffle="keyed")
        again.load_state_dict({**state, "position": 64 * 50})
        assert next(iter(again)).tolist() == batches[50]
        again.close()
        print(first, added)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=True
    )
    first_s, added_mb = map(float, ended.stdout.split())
    assert added_mb < 50
    # The target is 50 ms; the bound shows that nothing of the size of the data is made.
    assert first_s < 10


def test_a_large_list_is_mentioned_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above ten million samples shuffle=True suggests shuffle="keyed" in a log line."""
    monkeypatch.setattr("aiofeed.sampling.feed_order.LISTED_MOST", 100)
    with caplog.at_level(logging.INFO, "aiofeed"):
        for shuffle in (True, "keyed", False):
            feeder = Feeder(Many(101), decode=number, batch_size=50, shuffle=shuffle)  # type: ignore[arg-type]
            list(feeder)
            list(feeder)
            feeder.close()
    assert [record.message for record in caplog.records if "keyed" in record.message] == [
        "shuffle=True keeps a list of 101 indices, 0 MiB, made anew each epoch; shuffle='keyed' stores nothing"
    ]
