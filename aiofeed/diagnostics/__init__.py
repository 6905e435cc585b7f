"""What the machine has for feeding a training, and what is amiss. Reads only; no network."""

from aiofeed.core.types import public
from aiofeed.devices.resolve import explain_no_accelerator
from aiofeed.diagnostics.accelerators import find_accelerators
from aiofeed.diagnostics.advice import advise
from aiofeed.diagnostics.environment import inspect_environment
from aiofeed.diagnostics.report import AcceleratorReport, DeviceReport, Environment

__all__ = ["AcceleratorReport", "DeviceReport", "Environment", "device_report"]


@public
def device_report(*, measure: bool = True) -> DeviceReport:
    """What the machine has for feeding a training, and what is amiss: ``print(aiofeed.device_report())``.

    Changes nothing and needs no network. Looking at accelerators starts them: the process can no longer fork.

    Args:
        measure: whether to measure how fast each accelerator copies, less than 0.5 s for each.
    """
    found = inspect_environment()
    seen = find_accelerators(measure=measure) if not found.forked else ()
    absent = None if seen else explain_no_accelerator()
    return DeviceReport(seen, absent, found, advise(seen, absent, found))
