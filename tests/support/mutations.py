"""Mutations of files: seeded, so that a failure can be repeated."""

from __future__ import annotations

import random
import re

_NUMBER = re.compile(rb"-?\d+(\.\d+)?")
_VALUES = (b"-1", b"0", b"1e999", b"99999999999999999999", b"null", b'"x"', b"[]", b"{}", b"true", b"NaN", b"0.5", b"")
_TEXT = re.compile(rb'"[^"]*"')
_TEXTS = (b'""', b'"../x"', b'"\\ud800"', b'"a\\u0000b"', b"3", b"null", b'"/dev/null"', b'"http://"', b'["a"]')


def mutated(data: bytes, seed: int, head: int = 0, *, text: bool = False) -> bytes:
    """Return a file with one to three changes, half of them in the first ``head`` bytes, if given.

    With ``text``, its numbers and quoted texts are changed, too.
    """
    rng = random.Random(seed)
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kinds = ["flip", "set", "cut", "remove", "repeat", "insert", "move", *["number", "text"] * (3 * text)]
        kind, size = rng.choice(kinds), len(found)
        start = rng.randrange((min(head, size) if head and rng.random() < 0.5 else size) + 1)
        stop = min(start + rng.choice((1, 2, 4, 8, 64, 512)), size)
        if kind == "flip" and start < size:
            found[start] ^= 1 << rng.randrange(8)
        elif kind == "set":
            found[start:stop] = rng.choice((b"\0", b"\xff", b"\x7f", b" ")) * (stop - start)
        elif kind == "cut":
            del found[start:]
        elif kind == "remove":
            del found[start:stop]
        elif kind == "repeat":
            found[start:start] = found[start:stop]
        elif kind == "insert":
            found[start:start] = rng.randbytes(stop - start)
        elif kind == "move":
            piece = found[start:stop]
            del found[start:stop]
            at = rng.randrange(len(found) + 1)
            found[at:at] = piece
        elif kind in ("number", "text"):
            pattern, values = (_NUMBER, _VALUES) if kind == "number" else (_TEXT, _TEXTS)
            if matches := list(pattern.finditer(found)):
                match = rng.choice(matches)
                found[match.start() : match.end()] = rng.choice(values)
    return bytes(found)
