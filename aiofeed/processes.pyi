"""The public names of `aiofeed.processes`, for type checkers."""

from aiofeed.serving.shared_tensors.api import SharedTensors as SharedTensors
from aiofeed.serving.shared_tensors.api import attach_tensors as attach_tensors
from aiofeed.serving.shared_tensors.api import share as share
from aiofeed.workers.ray.cluster import RayEngine as RayEngine
