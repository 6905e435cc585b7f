"""What the machine has for feeding a training, and what is amiss. Reads only; no network."""

from aiofeed.diagnosis.collecting import device_report
from aiofeed.diagnosis.report import AcceleratorReport, DeviceReport, Surroundings

__all__ = ["AcceleratorReport", "DeviceReport", "Surroundings", "device_report"]
