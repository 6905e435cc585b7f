"""The public names of `aiofeed.reports`, for type checkers."""

from aiofeed.kernel.core.failures import Failure as Failure
from aiofeed.kernel.core.statistics import FeedStatistics as FeedStatistics
from aiofeed.kernel.core.statistics import StorageStatistics as StorageStatistics
from aiofeed.reports.explanation import Explanation as Explanation
from aiofeed.reports.headroom import Headroom as Headroom
from aiofeed.reports.machine import DeviceReport as DeviceReport
from aiofeed.reports.step_samples import StepSample as StepSample
from aiofeed.reports.timeline import Timeline as Timeline
