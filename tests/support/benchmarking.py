"""What the tests of the benchmarks share: their inputs, and how a command line refuses."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for generated inputs, where they can be generated."""
    pytest.importorskip("skimage")
    pytest.importorskip("sklearn")
    return tmp_path_factory.mktemp("inputs")


@pytest.fixture(scope="module", autouse=True)
def tracked() -> None:
    """Have multiprocessing start its tracker, whose pipe stays open for the life of the process."""
    resource_tracker.ensure_running()


def check_refused(
    parse: Callable[[list[str]], object], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The arguments end the program, and the message is in what it says."""
    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err
