"""Rules for the texts of all ``raise`` statements of the package, read from its source."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import aiofeed

_PACKAGE = Path(aiofeed.__file__).parent
_NOUNS = "samples|shards|files|classes|paths|targets|weights|sources|lengths|batches|bools|items"
# Counts of more than one, and those of a source or target that breaks its protocol.
_ALLOWED = ("media/pairs.py", "cache/encoded_source.py", "kernel/engine/fetch/source.py", "media/boxes.py")


@functools.cache
def messages() -> dict[str, list[str]]:
    """The texts of the ``raise`` statements of each file, with the code of values in braces."""
    found: dict[str, list[str]] = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        texts = found.setdefault(path.relative_to(_PACKAGE).as_posix(), [])
        for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for node in ast.walk(statement) if isinstance(statement, ast.Raise) else ():
                if isinstance(node, ast.JoinedStr):
                    texts.append("".join(map(_text, node.values)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return found


def _text(part: ast.expr) -> str:
    return f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else ast.literal_eval(part)


def wrong(pattern: str, texts: dict[str, list[str]]) -> list[tuple[str, str]]:
    """The places in which a pattern occurs."""
    return [(file, text) for file, each in texts.items() for text in each if re.search(pattern, text)]


def test_the_texts_are_found() -> None:
    """The rules below would hold without texts, too."""
    assert sum(map(len, messages().values())) > 1000


def test_counts_of_one_are_singular() -> None:
    """The length of a list is followed by a noun in plural only where it cannot be one: see ``counted``."""
    texts = {file: each for file, each in messages().items() if file not in _ALLOWED}
    assert wrong(rf"\{{len\([^}}]*\)\}} ({_NOUNS})\b", texts) == []


def test_articles() -> None:
    """No "a image", and no "an picture"."""
    assert wrong(r"(?<![\w.])[Aa] [aeioAEIO][a-z]", messages()) == []
    assert wrong(r"\b[Aa]n [bcdfgjklmnpqrstvwxyz][a-z]", messages()) == []
    assert wrong(r"\ba \{type\((item|tensor|values?|batch)\b", messages()) == []


def test_names_of_the_package_exist() -> None:
    """Each `aiofeed.name` of a text."""
    found = [re.findall(r"(?<![/\w])aiofeed\.(\w+)", text) for each in messages().values() for text in each]
    names = {name for each in found for name in each} - {path.stem for path in _PACKAGE.iterdir()}
    assert len(names) > 10
    assert [name for name in sorted(names) if not hasattr(aiofeed, name)] == []
