"""The public names of `aiofeed.errors`, for type checkers."""

from aiofeed.kernel.core.errors import BatchFailedError as BatchFailedError
from aiofeed.kernel.core.errors import CacheError as CacheError
from aiofeed.kernel.core.errors import CollateError as CollateError
from aiofeed.kernel.core.errors import DecodeError as DecodeError
from aiofeed.kernel.core.errors import DeviceCopyError as DeviceCopyError
from aiofeed.kernel.core.errors import IteratorClosedError as IteratorClosedError
from aiofeed.kernel.core.errors import ReadError as ReadError
from aiofeed.kernel.core.errors import SampleError as SampleError
from aiofeed.kernel.core.errors import StateError as StateError
from aiofeed.kernel.core.errors import TooManyFailures as TooManyFailures
from aiofeed.kernel.core.errors import WorkerDiedError as WorkerDiedError
