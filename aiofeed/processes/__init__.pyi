"""The public names of `aiofeed.processes`, for type checkers."""

from aiofeed.processes.actors.cluster import RayEngine as RayEngine
from aiofeed.processes.shared_tensors.api import SharedTensors as SharedTensors
from aiofeed.processes.shared_tensors.api import attach_tensors as attach_tensors
from aiofeed.processes.shared_tensors.api import share as share
