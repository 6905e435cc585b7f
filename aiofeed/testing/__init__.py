"""Stand-ins and checkers, for aiofeed's own tests and for yours. Imports torch."""

from aiofeed.testing.copier_check import WrongBytesError, check_copier
from aiofeed.testing.feeder_check import check_feeder
from aiofeed.testing.simulated_device import SimulatedDevice

__all__ = ["SimulatedDevice", "WrongBytesError", "check_copier", "check_feeder"]
