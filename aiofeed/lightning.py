"""For Lightning: ``FeederMonitor`` logs the statistics of a feeder. Needs lightning or pytorch-lightning."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

__all__ = ["FeederMonitor"]


def _callback_class() -> Any:
    """Return ``Callback`` of the package that the program uses: the two packages have different classes."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    names.sort(key=lambda name: name not in sys.modules)
    for name in names:
        with suppress(ImportError):
            return import_module(name).Callback
    raise ImportError("aiofeed.lightning needs Lightning: pip install lightning")


class FeederMonitor(_callback_class()):  # type: ignore[misc]
    """Log the statistics of a ``Feeder`` to the loggers of a Lightning ``Trainer``.

    Example:
        ```python
        import lightning

        import aiofeed.lightning

        trainer = lightning.Trainer(callbacks=[aiofeed.lightning.FeederMonitor()])
        ```

    Logs ``feeder.scalars()`` every ``log_every_n_steps`` batches of the Trainer and at the end of each epoch.

    Args:
        feeder: The feeder, or the result of ``attach``. Default: the Trainer's ``train_dataloaders``.
        prefix: Comes before each name.

    Raises:
        TypeError: In ``fit``, if there is no feeder.
    """

    def __init__(self, feeder: Any = None, prefix: str = "aiofeed/") -> None:
        super().__init__()
        self._feeder = feeder
        self._prefix = prefix

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the feeder."""
        self._statistics(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log every ``log_every_n_steps`` batches."""
        if trainer.log_every_n_steps and (batch_idx + 1) % trainer.log_every_n_steps == 0:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log at the end of the epoch."""
        self._log(trainer)

    def _log(self, trainer: Any) -> None:
        scalars = self._statistics(trainer).scalars(self._prefix)
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.global_step)

    def _statistics(self, trainer: Any) -> Any:
        feeder = trainer.train_dataloader if self._feeder is None else self._feeder
        if not callable(getattr(feeder, "statistics", None)):
            raise TypeError(f"FeederMonitor logs an aiofeed.Feeder, got {feeder!r}: pass FeederMonitor(feeder)")
        return feeder.statistics()
