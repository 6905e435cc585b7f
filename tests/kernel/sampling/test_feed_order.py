"""Orders of more samples than an index list in memory allows."""

from __future__ import annotations

import logging
import textwrap
from typing import TYPE_CHECKING

from aiofeed import Feeder
from tests.support.fork_server import ForkServer
from tests.support.process_parts import Numbers, number

if TYPE_CHECKING:
    import pytest


def test_a_keyed_order_of_a_billion_samples_needs_no_list(fork_server: ForkServer) -> None:
    """The first batch of 1,000,000,000 samples takes no time to plan, and the feeder adds less than 50 MB of memory."""
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
            # ru_maxrss includes the peak of the process that started this one.
            with open("/proc/self/status") as status:
                return int(status.read().split("VmHWM:")[1].split()[0])
        before = peak_kib()
        feeder = Feeder(Many(), decode=lambda data: torch.tensor(int(data)), batch_size=64, shuffle="keyed")
        iterator = iter(feeder)
        batches = [next(iterator).tolist() for _ in range(100)]
        added = (peak_kib() - before) / 1024
        first = feeder.statistics().first_batch_s
        feeder.close()
        assert len({index for batch in batches for index in batch}) == 6400
        again = Feeder(Many(), decode=lambda data: torch.tensor(int(data)), batch_size=64, shuffle="keyed")
        again.skip(50)
        assert next(iter(again)).tolist() == batches[50]
        again.close()
        print(first, added)
    """
    ended = fork_server.run(textwrap.dedent(code))
    assert ended.returncode == 0, ended.stderr
    first_s, added_mb = map(float, ended.stdout.split())
    assert added_mb < 50
    # The target is 50 ms. The bound detects work in proportion to the length.
    assert first_s < 10


def test_a_large_index_list_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above thirty million samples, shuffle=True warns that shuffle="keyed" needs no list."""
    monkeypatch.setattr("aiofeed.kernel.sampling.feed_order.LARGE_EPOCH", 100)
    with caplog.at_level(logging.WARNING, "aiofeed"):
        for shuffle in (True, "keyed", False):
            feeder = Feeder(Numbers(101), decode=number, batch_size=50, shuffle=shuffle)
            list(feeder)
            list(feeder)
            feeder.close()
    assert [record.message for record in caplog.records if "keyed" in record.message] == [
        "shuffle=True makes a list of 101 indices (0 MiB) before each epoch; shuffle='keyed' begins at once"
    ]
