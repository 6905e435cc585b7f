"""Checks for authors of sources, decoders and devices.

Example:
    ```python
    import aiofeed

    photos = aiofeed.ImageFolder("photos")
    aiofeed.testing.check_source(photos, decode=aiofeed.DecodeImage(size=64))
    ```
"""

from aiofeed.testing.copier_check import WrongBytesError, check_copier
from aiofeed.testing.feeder_check import check_feeder
from aiofeed.testing.source_check import WrongSampleError, check_source

__all__ = ["WrongBytesError", "WrongSampleError", "check_copier", "check_feeder", "check_source"]
