"""Stand-ins and checkers, for aiofeed's own tests and for yours. Imports torch."""

from aiofeed.testing.copying import WrongBytesError, check_copier
from aiofeed.testing.feeding import check_feeder
from aiofeed.testing.simulated import SimulatedDevice

__all__ = ["SimulatedDevice", "WrongBytesError", "check_copier", "check_feeder"]
