"""What a run looks like to its user: explanations and timelines, from its statistics.

Example:
    ```python
    import aiofeed

    feeder = aiofeed.Feeder(list(range(100)), batch_size=10)
    list(feeder)
    statistics: aiofeed.reports.FeedStatistics = feeder.statistics()
    print(statistics.batches, feeder.explain())
    ```
"""

from __future__ import annotations

from aiofeed import _namespace

__all__, __getattr__ = _namespace(__name__)
