"""Feeds the lines of this package's own files."""

from pathlib import Path

import aiofeed
from aiofeed.testing import check_source
from own_addon import CacheOfReads, Lines, SimilarLengths

lines = Lines(Path(__file__).with_name("plan.py"))
check_source(lines)
lengths = [lines.nbytes(index) for index in range(len(lines))]
options = {"decode": bytes.decode, "collate_fn": list, "cache": CacheOfReads(), "shuffle": True}
with aiofeed.Feeder(lines, batch_size=SimilarLengths(lengths, 8), **options) as feeder:
    for _ in feeder.epochs(2):
        for batch in feeder:
            print(f"{len(batch)} lines of {min(map(len, batch))} to {max(map(len, batch))} bytes")
