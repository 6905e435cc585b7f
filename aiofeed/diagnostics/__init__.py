"""What the machine has for feeding a training, and what is amiss. Reads only; no network."""

from aiofeed.diagnostics.collecting import device_report
from aiofeed.diagnostics.report import AcceleratorReport, DeviceReport, Surroundings

__all__ = ["AcceleratorReport", "DeviceReport", "Surroundings", "device_report"]
