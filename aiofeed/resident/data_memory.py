"""Sources of which batches are views of windows, or gathered, where the batches are wanted."""

from __future__ import annotations

from typing import Any

from aiofeed.kernel.engine.memory import Memory
from aiofeed.kernel.sampling.epochs import EpochStream
from aiofeed.resident.pipeline import ResidentData, ResidentPipeline


class DataMemory(Memory):
    """The data of a source."""

    def ready(self, stream: EpochStream) -> bool:
        """Return True."""
        return True

    def new_pipeline(self, config: Any, running: Any) -> ResidentPipeline:
        """Return a pipeline of the data, which shares those of the running one."""
        if isinstance(running, ResidentPipeline) and not running.inherited:
            return running.successor()
        return ResidentPipeline(
            ResidentData(
                self._data(config),
                batch_size=config.batch_size,
                backend=config.backend,
                memory_bytes=config.limits.memory_bytes,
            )
        )

    def _data(self, config: Any) -> Any:
        """Return the object that has the data."""
        return config.source
