"""Damages files by seeds: bytes of any file, and values of JSON."""

from __future__ import annotations

import json
import random
from typing import Any

VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1 << 70,
    1.5,
    float("nan"),
    "",
    "x",
    "../x",
    "{0.__class__}",
    [],
    [[0]],
    {},
)
"""What stands in the place of a value of JSON."""


def damage_bytes(data: bytes, seed: int, start: int = 0, end: int | None = None) -> bytes:
    """Change some bytes between ``start`` and ``end``; or cut, remove, or repeat a part."""
    draw, changed = random.Random(seed), bytearray(data)
    end = len(data) if end is None else end
    at = draw.randrange(start, end)
    match draw.randrange(6):
        case 0:
            del changed[at:]
        case 1:
            del changed[at : at + draw.choice((1, 4, 8, 100))]
        case 2:
            changed[at:at] = changed[at : at + draw.choice((1, 4, 8, 100))]
        case 3:
            changed[at : at + 4] = draw.choice((bytes(4), b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x00\x00\x00\x01"))
        case _:
            for _ in range(draw.choice((1, 1, 3, 20))):
                changed[draw.randrange(start, end)] = draw.randrange(256)
    return bytes(changed)


def damage_json(data: bytes, seed: int) -> bytes:
    """Replace, remove or rename one value of a JSON text; or damage its bytes."""
    draw = random.Random(seed)
    if draw.random() < 0.2:
        return damage_bytes(data, seed)
    root = json.loads(data)
    places = list(_places(root))
    inside, key = draw.choice(places)
    match draw.randrange(6):
        case 0:
            del inside[key]
        case 1 if isinstance(inside, dict):
            inside[f"{key}x"] = inside.pop(key)
        case 2 if isinstance(inside[key], int):
            inside[key] = inside[key] * draw.choice((-1, 2, 1000)) + draw.choice((-1, 0, 1))
        case _:
            inside[key] = draw.choice(VALUES)
    return json.dumps(root).encode()


def _places(value: Any) -> Any:
    """Each dict or list, with each of its keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield value, key
        yield from _places(inner)
