"""Names of files in indexes, lists and descriptions that may be of somebody else."""

from __future__ import annotations

from urllib.parse import unquote

from aiofeed.kernel.core.formatting import shown
from aiofeed.kernel.sources.links import check_beneath


def check_foreign_name(by: str, name: object, base: str) -> str:
    """Return the name of a file in an index, list or description ``by``, which may be of somebody else.

    Every reader of such names calls this. The name is a relative path that stays in its folder ``base``. In URLs
    names are unquoted later.

    Raises:
        ValueError: The name is no text, or may lead to a file elsewhere; it names ``by``.
    """
    try:
        if not isinstance(name, str) or not name or "://" in name:
            raise ValueError
        name.encode("utf-8", "surrogateescape")
        for each in (name, unquote(name)) if "://" in base else (name,):
            if "\0" in each:
                raise ValueError
            check_beneath("", each)
    except ValueError:
        text = repr(shown(name) if isinstance(name, str) else name)[:200]
        raise ValueError(f"{by}: it names the file {text}; only relative paths in its folder are allowed") from None
    return name
