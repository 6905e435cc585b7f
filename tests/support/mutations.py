"""Seeded damage to a file's bytes, as disks, crashes and other programs cause it."""

from __future__ import annotations

import random


def mutated(data: bytes, seed: int, head: int = 0) -> bytes:
    """Return the bytes with some damage; half of it is in the first ``head`` bytes, if given."""
    numbers, found = random.Random(seed), bytearray(data)
    for _ in range(numbers.choice((1, 1, 2, 5))):
        most = head if head and numbers.random() < 0.5 else len(found)
        at, length = numbers.randrange(max(min(most, len(found)), 1)), 1 << numbers.randrange(13)
        kind = numbers.randrange(7)
        if kind == 0:
            found[at : at + 1] = bytes([found[at] ^ 1 << numbers.randrange(8)]) if found else b""
        elif kind == 1:
            found[at : at + 8] = numbers.choice((b"\xff" * 8, bytes(8), numbers.randbytes(8)))
        elif kind == 2:
            found[at : at + length] = numbers.randbytes(len(found[at : at + length]))
        elif kind == 3:
            found[at : at + length] = bytes(len(found[at : at + length]))
        elif kind == 4:
            del found[at:]
        elif kind == 5:
            del found[at : at + length]
        else:
            other = numbers.randrange(max(len(found), 1))
            found[at : at + length] = found[other : other + length]
    return bytes(found)
