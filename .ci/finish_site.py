"""Writes site/llms.txt, and checks what Zensical accepts: `make docs` runs it after the build.

Zensical fails on links to pages and headings that do not exist. It builds a site with a page that is not in `nav`, an
entry of `nav` without a page, or an image that does not exist.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml

from aiofeed.kernel.core import errors

ROOT = Path(__file__).parents[1]
# What a user may paste into the search box, and the page that one section of which has all these words.
SEARCHES = {
    "WorkerDiedError": "api/errors.html",
    "too many open files": "troubleshooting.html",
    "was filled from other data": "troubleshooting.html",
    "there is no such object": "troubleshooting.html",
}


def entries(nav: list[dict[str, Any]], section: str = "") -> Iterator[tuple[str, str, str]]:
    """Section, title and file of each page of ``nav``."""
    for entry in nav:
        for title, value in entry.items():
            if isinstance(value, list):
                yield from entries(value, title)
            elif "://" not in value:
                yield section, title, value


def description(markdown: str) -> str:
    """``description`` of the front matter of a page, or else its first sentence without links."""
    if found := re.match(r"---\n(?:.*\n)*?description: (.+)\n", markdown):
        return found[1]
    text = re.sub(r"\A---\n.*?\n---\n|^```.*?^```$|<[^>]*>", "", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|^[#:].*$", "", text, flags=re.MULTILINE)
    sentence = re.split(r"(?<=[^.\s][^.\s]\.)\s", " ".join(text.strip().partition("\n\n")[0].split()))[0]
    return re.sub(r"\[([^\]]+)\](\([^)]*\)|\[[^\]]*\])", r"\1", sentence)


def llms_txt(config: dict[str, Any], docs: Path) -> str:
    """The list of pages in the form of llmstxt.org: a title, a link and a sentence for each."""
    text, current = f"# {config['site_name']}\n\n> {config['site_description']}\n", None
    for section, title, file in entries(config["nav"]):
        if section != current:
            text += f"\n## {section or 'More'}\n\n" if current is not None else "\n"
            current = section
        page = config["site_url"] + file.removesuffix(".md") + ".html"
        text += f"- [{title}]({page}): {description((docs / file).read_text(encoding='utf-8'))}\n"
    return text


def addresses(site_url: str) -> Iterator[tuple[str, str]]:
    """Each address of the site in README.md, pyproject.toml, the package and what its errors add, and where it is."""
    for path in [ROOT / "README.md", ROOT / "pyproject.toml", *sorted((ROOT / "aiofeed").rglob("*.py"))]:
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        # An address that ends with # gets the name of an error.
        yield from ((found, name) for found in re.findall(rf"{re.escape(site_url)}[\w./#-]*", text) if found[-1] != "#")
    explained = [getattr(errors, name)("what happened") for name in errors.EXPLAINED]
    yield from ((note.split()[-1], type(error).__name__) for error in explained for note in error.__notes__)


def problems(config: dict[str, Any], docs: Path, site: Path, llms: str) -> Iterator[str]:
    """What is wrong with the site, one line each."""
    files = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    named = [file for _, _, file in entries(config["nav"])]
    yield from (f"docs/{file} is not in the nav of mkdocs.yml" for file in sorted(files.difference(named)))
    yield from (f"docs/{file} is in the nav of mkdocs.yml twice" for file in {*named} if named.count(file) > 1)
    yield from (f"llms.txt has no sentence: {line}" for line in llms.splitlines() if line.endswith("): "))
    for page in site.rglob("*.html"):
        name, html = page.relative_to(site).as_posix(), page.read_text(encoding="utf-8")
        if name != "404.html" and f"({config['site_url']}{name})" not in llms:
            yield f"llms.txt does not list {name}"
        for link in re.findall(r'<(?:img|script)[^>]*\ssrc="([^"]+)"', html):
            # Those of 404.html are absolute.
            if name != "404.html" and not (page.parent / unquote(link.partition("?")[0])).is_file():
                yield f"{name} shows {link}, which is not in the site"
    items = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    for address, at in addresses(config["site_url"]):
        page, _, anchor = address.removeprefix(config["site_url"]).partition("#")
        file = site / (page or "index.html")
        if not file.is_file() or (anchor and f'id="{anchor}"' not in file.read_text(encoding="utf-8")):
            yield f"{at} has {address}, which is not in the site"
    for words, place in SEARCHES.items():
        texts = [f"{item['title']} {item['text']}".lower() for item in items if item["location"].startswith(place)]
        if (site / place).exists() and not any(all(word in text for word in words.lower().split()) for text in texts):
            yield f"A search for {words!r} does not find {place}"


if __name__ == "__main__":
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    sources, built = ROOT / settings["docs_dir"], ROOT / settings["site_dir"]
    listed = llms_txt(settings, sources)
    (built / "llms.txt").write_text(listed, encoding="utf-8")
    sys.exit("\n".join(problems(settings, sources, built, listed)) or None)
