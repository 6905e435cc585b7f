"""Reports the machine's accelerators, packages and limits, with advice for problems. Reads only; uses no network."""

from aiofeed.kernel.core.types import public
from aiofeed.kernel.devices.resolve import explain_no_accelerator
from aiofeed.reports.machine.environment import find_accelerators, inspect_environment
from aiofeed.reports.machine.report import AcceleratorReport, DeviceReport, Environment, advise

__all__ = ["AcceleratorReport", "DeviceReport", "Environment", "device_report"]


@public
def device_report(*, measure: bool = True) -> DeviceReport:
    """Report accelerators, packages and limits, with advice for problems: ``print(aiofeed.device_report())``.

    Example:
        ```python
        import aiofeed

        print(aiofeed.device_report())
        ```

    Changes nothing and uses no network. Initializes the accelerators, so the process can no longer fork.

    Args:
        measure: measure the copy rates of each accelerator, which takes less than 0.5 s for each.
    """
    environment = inspect_environment()
    accelerators = () if environment.forked else find_accelerators(measure=measure)
    absent = None if accelerators else explain_no_accelerator()
    return DeviceReport(accelerators, absent, environment, advise(accelerators, absent, environment))
