"""The tables of what goes with what, and the page that is printed from them; ``tests/test_matrix.py`` holds them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import aiofeed
import aiofeed.mixtures.streamed  # a Mixture imports it for streams only
from aiofeed.kernel.core.faces import Declares, Exclusion
from aiofeed.kernel.feeder.rules import EXCLUDED
from tests.support.calls import PUBLIC, calls_in
from tests.support.paths import ROOT
from tests.support.refusals import MIXED, MIXED_UNKNOWN_BEFORE, REFUSED, UNKNOWN_BEFORE

PAGE = ROOT / "docs" / "options.md"


def excluded() -> list[Exclusion]:
    """The rows of the kernel, and those of the sources, plans and caches of all add-ons, by their names."""
    kinds: dict[str, type[Declares]] = {}
    waiting: list[type[Declares]] = [Declares]
    for name in (*aiofeed._MODULES, *aiofeed._PLUGS):
        aiofeed._load_addon(name, "the page")  # which imports its module
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__.startswith("aiofeed") and isinstance(vars(kind).get("excluded"), tuple):
            kinds[kind.__name__] = kind
    # A class may have the rows of its base class among its own.
    return [*dict.fromkeys([*EXCLUDED, *(row for _, kind in sorted(kinds.items()) for row in kind.excluded)])]


def options_page() -> str:
    """The content of docs/options.md."""
    rows = [f"| {_code(options)} | {_code(others)} | {why} |" for options, others, _, why in excluded()]
    text = [
        "# What goes with what",
        "",
        "Every option of `Feeder` goes with every source and every other option, except for the pairs in this table.",
        "The error of a `Feeder` that is made with such a pair gives the same reason. The page is printed from the",
        "table in `aiofeed/kernel/feeder/rules.py` and from `excluded` in the classes of sources, plans and caches.",
        "",
        "| this | not with | reason, and what to do |",
        "| --- | --- | --- |",
        *(row.replace("{option}", "one of the two") for row in rows),
        "",
        "## Source by source",
        "",
        "Each source is tested with each option. What does not work is refused when the `Feeder` is made:",
        "",
        *_table("not with", REFUSED),
        "",
        "What only a decoded sample tells is an error of the first batch:",
        "",
        *_table("not with", UNKNOWN_BEFORE),
        "",
        "## Mixtures of two sources",
        "",
        "Each source mixes with each other one whose decoded samples are alike, see [Mixtures](mixtures.md). What does",
        "not fit together is refused when the `Mixture` or its `Feeder` is made:",
        "",
        *_table("not mixed with", MIXED),
        "",
        "What only decoded samples tell is an error of the first batch that has both:",
        "",
        *_table("not mixed with", MIXED_UNKNOWN_BEFORE),
    ]
    return "\n".join(text) + "\n"


def _table(relation: str, rows: Sequence[tuple[str, tuple[str, ...], str]]) -> list[str]:
    lines = [f"| {_code([source])} | {_code(others)} | {text} |" for source, others, text in rows]
    return [f"| source | {relation} | the error says |", "| --- | --- | --- |", *lines]


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" if "=" in name and " " not in name else name for name in names)


def test_the_page_is_up_to_date() -> None:
    """`AIOFEED_RECORD_API=1 python -m pytest tests/kernel/feeder/test_options.py` writes docs/options.md again."""
    if os.environ.get("AIOFEED_RECORD_API") == "1":
        PAGE.write_text(options_page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == options_page()


def test_calls_in_the_table_work(tmp_path: Path) -> None:
    """Each call that is written out makes an object; of ``N`` and other names a program has its own values."""
    (tmp_path / "a").write_bytes(b"a")
    names = {"aiofeed": aiofeed, "path": tmp_path / "cache", "paths": [tmp_path / "a"], "max_bytes": 1 << 20}
    calls = [call for *_, why in excluded() for call in calls_in(why)]
    assert {call.name for call in calls} >= {"DiskCache", "EncodedCache", "Files", "DecodeImage", "Stream"}
    for call in calls:
        call.bind()
        if not call.is_open:
            eval(call.code, PUBLIC | names)
