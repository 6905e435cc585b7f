"""The pictures of docs/gallery.md, docs/recipes/, docs/robots.md and docs/arrays.md, as docs/pictures.py draws them."""

from __future__ import annotations

import re
import runpy
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support.paths import ROOT

DOCS = ROOT / "docs"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The names of docs/pictures.py."""
    return runpy.run_path(str(DOCS / "pictures.py"))


@pytest.fixture(scope="module")
def pictures(script: dict[str, Any]) -> dict[str, str]:
    """What the script draws, by file."""
    drawn: dict[str, str] = script["pictures"]()
    return drawn


def test_committed_pictures_equal_the_drawn_ones(pictures: dict[str, str]) -> None:
    """`python docs/pictures.py` draws them again."""
    committed = [*DOCS.glob("gallery-*.svg"), *DOCS.glob("recipes/*.svg"), *DOCS.glob("robots-*.svg")]
    committed += DOCS.glob("arrays-*.svg")
    assert sorted(pictures) == sorted(path.relative_to(DOCS).as_posix() for path in committed)
    for file, drawn in pictures.items():
        assert (DOCS / file).read_text(encoding="utf-8") == drawn, file


def test_pictures_are_small_and_follow_the_scheme(pictures: dict[str, str]) -> None:
    """Below 60 KB, with colours for dark pages and without references to other files; each kind has both colours."""
    for file, drawn in pictures.items():
        assert len(drawn.encode()) < 60_000
        assert "href" not in drawn
        light, dark = (
            ElementTree.fromstring(drawn).findtext(SVG + "style", "").split("@media (prefers-color-scheme:dark)")
        )
        for kind in set(re.findall(r'class="(\w+)"', drawn)):
            assert f".{kind}{{" in light, (file, kind)
            assert f".{kind}{{" in dark, (file, kind)


def test_shapes_are_within_the_picture(pictures: dict[str, str]) -> None:
    """No bar or box leaves the picture; texts begin within it."""
    for file, drawn in pictures.items():
        root = ElementTree.fromstring(drawn)
        _, _, width, height = map(float, root.get("viewBox", "").split())
        for shape in root.iter(SVG + "rect"):
            x, y, wide, high = (float(shape.get(name, "0")) for name in ("x", "y", "width", "height"))
            assert x >= 0, file
            assert y >= 0, file
            assert x + wide <= width + 0.1, file
            assert y + high <= height + 0.1, file
        for words in root.iter(SVG + "text"):
            assert 0 <= float(words.get("x", "-1")) <= width, file


def test_every_picture_is_shown(pictures: dict[str, str]) -> None:
    """Each picture stands in a page, with a text for readers who do not see it."""
    shown = set()
    for path in DOCS.rglob("*.md"):
        for words, link in re.findall(r"!\[([^]]*)\]\(([^)]+\.svg)\)", path.read_text(encoding="utf-8")):
            shown.add((path.parent / link).resolve())
            assert len(words) > 10, (path, link)
    assert {file for file in pictures if (DOCS / file).resolve() not in shown} == set()


def test_a_longer_step_makes_training_wait_less(script: dict[str, Any]) -> None:
    """The share of waiting in a timeline follows from the times: none if the step takes longer than loading."""
    waits = [
        int(re.search(r"waits (\d+)%", script["timeline"]("x", 6, 4, 9, 2, step))[1])  # type: ignore[index]
        for step in (6, 12, 18, 24)
    ]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 50
    assert waits[-1] == 0
