"""Checks of device copiers and feeders, for authors of devices, sources and decoders."""

from aiofeed.testing.copier_check import WrongBytesError, check_copier
from aiofeed.testing.feeder_check import check_feeder

__all__ = ["WrongBytesError", "check_copier", "check_feeder"]
