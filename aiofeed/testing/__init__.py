"""A simulated device and checks of copiers and feeders, for tests of aiofeed and of programs that use it."""

from aiofeed.testing.copier_check import WrongBytesError, check_copier
from aiofeed.testing.feeder_check import check_feeder
from aiofeed.testing.simulated_device import SimulatedDevice

__all__ = ["SimulatedDevice", "WrongBytesError", "check_copier", "check_feeder"]
