"""The errors of a feeder while it runs; ``aiofeed.FeedError`` is the base class of all.

Example:
    ```python
    import aiofeed

    files = aiofeed.Files(["photos.csv"])  # no image
    feeder = aiofeed.Feeder(files, decode=aiofeed.DecodeImage(size=224), batch_size=1)
    try:
        next(iter(feeder))
    except aiofeed.errors.DecodeError as error:
        print(error)
    ```
"""

from __future__ import annotations

from aiofeed import _namespace

__all__, __getattr__ = _namespace(__name__)
