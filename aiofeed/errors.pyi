"""The public names of `aiofeed.errors`, for type checkers."""

from aiofeed.core.errors import BatchFailedError as BatchFailedError
from aiofeed.core.errors import CacheError as CacheError
from aiofeed.core.errors import CollateError as CollateError
from aiofeed.core.errors import DecodeError as DecodeError
from aiofeed.core.errors import DeviceCopyError as DeviceCopyError
from aiofeed.core.errors import IteratorClosedError as IteratorClosedError
from aiofeed.core.errors import ReadError as ReadError
from aiofeed.core.errors import SampleError as SampleError
from aiofeed.core.errors import StateError as StateError
from aiofeed.core.errors import TooManyFailures as TooManyFailures
from aiofeed.core.errors import WorkerDiedError as WorkerDiedError
