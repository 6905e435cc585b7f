"""The picture of docs/index.md: the file equals what docs/overlap_picture.py draws, and the times in it are right."""

from __future__ import annotations

import runpy
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The names of docs/overlap_picture.py."""
    return runpy.run_path(str(ROOT / "docs" / "overlap_picture.py"))


def test_the_committed_picture_equals_the_drawn_one(script: dict[str, Any]) -> None:
    """`python docs/overlap_picture.py` draws it again; its title is the text for readers who do not see it."""
    drawn = script["picture"]()
    assert (ROOT / "docs" / "overlap.svg").read_text(encoding="utf-8") == drawn
    title = ElementTree.fromstring(drawn).findtext("{http://www.w3.org/2000/svg}title")
    assert f"![{title}](overlap.svg)" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("ahead", "end"), [(False, 12), (True, 7)])
def test_each_step_follows_its_load(script: dict[str, Any], ahead: bool, end: int) -> None:
    """A step starts when its batch is loaded and the step before has ended; only ahead does a load not wait for it."""
    loads, steps = script["schedule"](ahead=ahead)
    assert steps[-1] + 1 == end
    for number in range(1, len(steps)):
        assert steps[number] == max(loads[number], steps[number - 1]) + 1
        assert loads[number] == (loads[number - 1] if ahead else steps[number - 1]) + 1
