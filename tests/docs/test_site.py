"""The site that `make docs` builds, in a browser: tables on a telephone, dark pages, and the search."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.browser import Browser, new_browser
from tests.support.paths import ROOT

SITE = ROOT / "site"
PHONE, DESK = 390, 1400


def is_built() -> bool:
    """Whether the site is there, and no page was changed since."""
    built, pages = SITE / "search.json", [ROOT / "mkdocs.yml", *(ROOT / "docs").rglob("*.*")]
    return built.exists() and built.stat().st_mtime > max(page.stat().st_mtime for page in pages)


pytestmark = pytest.mark.skipif(not is_built(), reason="needs the site that `make docs` builds")

# Of each table the edges, the width of what it shows and of all that is in it.
TABLES = """return [...document.querySelectorAll(".md-typeset table")].map(table => {
    const box = table.getBoundingClientRect();
    return [box.left, box.right, table.clientWidth, table.scrollWidth, getComputedStyle(table).overflowX];
});"""
LIGHTNESS = """const [red, green, blue] = getComputedStyle(document.body)[arguments[0]].match(/[0-9]+/g).map(Number);
return (red + green + blue) / 765;"""
# The search is drawn in a shadow root.
SEARCH = "const root = [...document.body.children].find(child => child.shadowRoot)?.shadowRoot;"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the site is served, on loopback, by a process of its own: browsers keep connections open."""
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(SITE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().partition(" port ")[2].split()[0]
        yield f"http://127.0.0.1:{port}/"
        server.terminate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with new_browser() as found:
        yield found


@pytest.mark.parametrize("page", ["choose.html", "options.html", "mixtures.html", "api/feeding.html"])
def test_tables_scroll_inside_themselves(browser: Browser, address: str, page: str) -> None:
    """On a telephone no table is wider than the page, and what does not fit is reached by scrolling the table."""
    browser.open(address + page, width=PHONE)
    assert browser.run("return document.documentElement.scrollWidth") == PHONE
    tables = browser.run(TABLES)
    assert tables or page.startswith("api/")
    for left, right, shown, whole, overflow in tables:
        assert 0 <= left < right <= PHONE
        assert overflow == "auto" or shown == whole
    if page == "options.html":
        assert any(shown < whole for _, _, shown, whole, _ in tables)


def test_the_mode_follows_the_system(browser: Browser, address: str) -> None:
    """Pages are dark for a visitor whose system is, and light again when it is, whatever it was at the first visit."""
    for dark in (True, False, True):
        browser.open(address + "choose.html", width=DESK, dark=dark)
        ground, text = (browser.run(LIGHTNESS, name) for name in ("backgroundColor", "color"))
        assert (ground < 0.2 < 0.7 < text) if dark else (text < 0.2 < 0.8 < ground)


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_the_search_finds_a_page(browser: Browser, address: str, width: int) -> None:
    """Words of a message, typed into the search, lead to the section about it."""
    browser.open(address + "index.html", width=width)
    opener = ".md-search__button" if width == DESK else "label[for=__search]"
    browser.run("document.querySelector(arguments[0]).click()", opener)
    browser.wait_for(f"{SEARCH} return root?.activeElement?.tagName === 'INPUT'")
    browser.type("too many open files")
    first = browser.wait_for(f"{SEARCH} return root.querySelector('a[href*=html]')?.href")
    assert first == address + "troubleshooting.html#too-many-open-files"
