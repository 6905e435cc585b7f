"""pyarrow is imported when it is needed."""

import contextlib
import signal
from typing import Any

import pytest

from aiofeed.shards import arrow as arrow_module


def test_ctrl_c_during_the_import_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow swallows it; it is raised when the import is over, and handlers are as before."""
    handler = signal.getsignal(signal.SIGINT)

    def swallow(name: str) -> Any:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return name

    monkeypatch.setattr(arrow_module.importlib, "import_module", swallow)
    with pytest.raises(KeyboardInterrupt):
        arrow_module.arrow.__wrapped__("pyarrow")
    assert signal.getsignal(signal.SIGINT) is handler
