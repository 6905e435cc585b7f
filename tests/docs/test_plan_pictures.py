"""The pictures of docs/batches.md and docs/mixtures.md are what docs/plan_pictures.py draws, and have descriptions."""

from __future__ import annotations

import re
import runpy
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = ("batches", "mixtures")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The names of docs/plan_pictures.py."""
    return runpy.run_path(str(DOCS / "plan_pictures.py"))


@pytest.fixture(scope="module")
def pictures(script: dict[str, Any]) -> dict[str, str]:
    """What the script draws, by file."""
    drawn: dict[str, str] = script["pictures"]()
    return drawn


def test_committed_pictures_equal_the_drawn_ones(pictures: dict[str, str]) -> None:
    """After a change of a plan, `python docs/plan_pictures.py` draws them again."""
    assert sorted(pictures) == sorted(path.name for page in PAGES for path in DOCS.glob(f"{page}-*.svg"))
    for file, drawn in pictures.items():
        assert (DOCS / file).read_text(encoding="utf-8") == drawn, file


def test_pictures_are_small_and_load_nothing(pictures: dict[str, str]) -> None:
    """Well-formed, below 30 KB, without scripts and without references to other files."""
    for drawn in pictures.values():
        assert len(drawn.encode()) < 30_000
        root = ElementTree.fromstring(drawn)
        assert {element.tag for element in root.iter()} <= {
            SVG + tag for tag in ("svg", "title", "style", "pattern", "rect", "g", "text", "path")
        }
        assert "href" not in drawn
        assert set(re.findall(r"url\(([^)]*)\)", drawn)) <= {"#padding"}


def test_alt_texts_are_the_titles(pictures: dict[str, str]) -> None:
    """The pages show each picture once, with the figures of its title as the text for readers who do not see it."""
    pages = "".join((DOCS / f"{page}.md").read_text(encoding="utf-8") for page in PAGES)
    images = re.findall(r"!\[([^]]*)\]\(((?:batches|mixtures)-[\w-]+\.svg)\)", pages)
    titles = {file: ElementTree.fromstring(drawn).findtext(SVG + "title") for file, drawn in pictures.items()}
    assert {file: alt for alt, file in images} == titles
    assert len(images) == len(titles)


def test_areas_are_the_shares_so_far(script: dict[str, Any]) -> None:
    """The lower edge of each source's area is the sum of the shares down to it, at each of the first samples."""
    sizes = [("web", 1), ("books", 3), ("code", 4)]
    areas, ends = script["stacked"](sizes, 10, 20, 30, 80)
    assert ends == {"web": 1 / 8, "books": 3 / 8, "code": 4 / 8}
    edges = [re.findall(r"L([\d.]+) ([\d.]+)", area) for area in areas[:3]]
    expected = {
        "code": [("20", "100"), ("30", "100"), ("40", "100")],
        "books": [("20", "100"), ("30", "100"), ("40", "60")],
        "web": [("20", "100"), ("30", "40"), ("40", "30")],
    }
    assert edges == [*expected.values()]
    assert [re.sub("<.*?>", "", text) for text in areas[3:]] == ["50%", "38%", "12%"]


def test_a_block_shows_its_tokens_and_padding(script: dict[str, Any]) -> None:
    """A bar per piece, hatched padding up to the widest row, a label with the shape, the share in the title."""
    drawn = script["draw_batches"]("Rows", [[[(30, "red"), (20, "green")], [(10, "blue")]], [[(60, "red")]]])
    root, token = ElementTree.fromstring(drawn), script["TOKEN"]
    bars = [bar for bar in root.iter(SVG + "rect") if bar.get("height") == str(script["BAR"])]
    widths = [(bar.get("fill"), round((float(bar.get("width", "0")) + 0.25) / token)) for bar in bars]
    assert widths == [("red", 30), ("green", 20), ("blue", 10), ("url(#padding)", 40), ("red", 60)]
    labels = [label.text for label in root.iter(SVG + "text")]
    assert {"2 x 50", "1 x 60"} <= set(labels)
    assert root.findtext(SVG + "title") == "Rows: 2 batches, 120 tokens padded to 160 (25% padding)"


def test_rows_of_a_fixed_width_are_filled_up(script: dict[str, Any]) -> None:
    """As those of packed documents, also an empty row; batches beyond the width go into the next line."""
    drawn = script["draw_batches"]("Rows", [[[(60, "red")], []]] * 4, 75)
    root = ElementTree.fromstring(drawn)
    assert root.findtext(SVG + "title") == "Rows: 4 batches, 240 tokens padded to 600 (60% padding)"
    labels = [(label.get("x"), label.get("y")) for label in root.iter(SVG + "text") if label.text == "2 x 75"]
    assert [x for x, _ in labels] == ["8", "172", "8", "172"]
    assert len({y for _, y in labels}) == 2
    assert all(
        float(bar.get("x", "0")) + float(bar.get("width", "0")) <= script["WIDTH"] for bar in root.iter(SVG + "rect")
    )
