"""docs/compatibility.md: each row names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "compatibility.md"
NAME = re.compile(r"`([\w/]*test_\w+)::(test_\w+)`")


def rows() -> list[str]:
    """The rows of the comparisons, without header rows; the table of platforms is none."""
    lines = PAGE.read_text(encoding="utf-8").partition("## Where it differs")[0].splitlines()
    return [
        line
        for number, line in enumerate(lines)
        if line.startswith("| ") and not line.startswith("| ---") and not lines[number + 1].startswith("| ---")
    ]


def names_in(module: str) -> set[str]:
    """The names of the tests of a module."""
    tree = ast.parse((TESTS / f"{module}.py").read_text(encoding="utf-8"))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in tree.body if isinstance(node, kinds) and node.name.startswith("test_")}


def test_every_row_names_a_test_that_exists() -> None:
    """The last cell is the name of a test; a row of five cells, in place of two, has two comparisons before it."""
    assert len(rows()) > 50
    for row in rows():
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) in (2, 5), row
        assert all(re.match(r"\*\*(same|more|differs)\*\*", cell) for cell in cells[2:4]), row
        assert (found := NAME.fullmatch(cells[-1])), row
        assert found[2] in names_in(found[1]), row


@pytest.mark.parametrize("module", ["kernel/feeder/test_stateful_behaviour", "loader/test_dataloader_behaviour"])
def test_every_test_of_behaviour_is_in_the_table(module: str) -> None:
    """Every test of these modules has a row in the table."""
    assert names_in(module) - {name for row in rows() for _, name in NAME.findall(row)} == set()
