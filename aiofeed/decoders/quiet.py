"""Pillow without its warnings and log lines, for a thread that decodes and for no other.

What a damaged file makes Pillow warn and log about is told once, by the error or by the picture: thousands of lines,
each with numbers of its own, are of no use to a training run. ``warnings.catch_warnings`` changes the filters of all
threads. So the name ``warnings`` in Pillow's modules is made to stand for an object that drops what comes from a
decoding thread and hands everything else to the real module; loggers get a filter that does the same.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from typing import Any


class _Decoding(threading.local):
    now = False


decoding = _Decoding()
"""``now``: whether the calling thread is decoding. Set and reset by who decodes."""


class _Warnings:
    """Stands for the module ``warnings``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    def warn(
        self, message: Any, category: type[Warning] | None = None, stacklevel: int = 1, *args: Any, **options: Any
    ) -> None:
        if not decoding.now:
            warnings.warn(message, category, stacklevel + 1, *args, **options)


class _Filter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not decoding.now


_warnings = _Warnings()
_filter = _Filter()


def hush_plugins() -> None:
    """See to the modules of Pillow that are loaded by now; those that were seen to stay as they are."""
    for name, module in list(sys.modules.items()):
        if name.startswith("PIL."):
            if getattr(module, "warnings", None) is warnings:
                module.warnings = _warnings  # type: ignore[attr-defined]
            if isinstance(logger := getattr(module, "logger", None), logging.Logger):
                logger.addFilter(_filter)
