"""Fixtures and helpers that the tests of the benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for generated inputs; skips the test if the packages with photographs are missing."""
    pytest.importorskip("skimage")
    pytest.importorskip("sklearn")
    return tmp_path_factory.mktemp("inputs")


@pytest.fixture(scope="module", autouse=True)
def tracked() -> None:
    """Start multiprocessing's resource tracker, whose pipe stays open until the process ends."""
    resource_tracker.ensure_running()


def check_refused(
    parse: Callable[[list[str]], object], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that parsing the arguments exits with an error that contains ``message``."""
    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err
