"""Draws docs/robots-window.svg, the picture of a window of `Episodes`.

    python docs/robots_picture.py

A test compares the file with what this script draws.
"""

from __future__ import annotations

import runpy
from pathlib import Path

ROWS, NOW, LAST = 14, 5, 9
"""Columns of the picture; the moment; the last row of the episode."""
FIELDS = {"top camera": (-3, 0), "wrist camera": (-3, 0), "state": (-1, 0), "action": tuple(range(8))}
CELL, TALL, LEFT = 23, 20, 92


def picture() -> str:
    """The text of the picture."""
    tools = runpy.run_path(str(Path(__file__).with_name("plan_pictures.py")))
    rect, text, colours = tools["rect"], tools["text"], tools["COLOURS"]
    shapes = [text(8, 18, "rows of an episode, one after the other")]
    for number, (name, steps) in enumerate(FIELDS.items()):
        top = 30 + number * (TALL + 8)
        shapes.append(text(8, top + 14, name))
        shapes += [rect(LEFT + at * CELL, top, CELL - 3, TALL, "#d0d7de") for at in range(LAST + 1)]
        for step in steps:
            inside = NOW + step <= LAST
            colour = colours[number] if inside else colours[5]
            shapes.append(rect(LEFT + (NOW + step) * CELL, top, CELL - 3, TALL if inside else TALL / 2, colour))
    low = 30 + len(FIELDS) * (TALL + 8)
    shapes.append(f'<path class="line" d="M{LEFT + NOW * CELL + 10} 24V{low}" stroke-dasharray="4 3"/>')
    shapes.append(text(LEFT + NOW * CELL - 24, low + 16, "the moment"))
    shapes.append(text(LEFT + (LAST + 1) * CELL, low + 16, "padding"))
    title = "A window around a moment: two frames of each camera, up to the moment, and the actions from there on; "
    return str(
        tools["svg"](
            title + "the rows beyond the end of the episode repeat its last row and are marked as padding",
            low + 26,
            shapes,
        )
    )


if __name__ == "__main__":
    Path(__file__).with_name("robots-window.svg").write_text(picture(), encoding="utf-8", newline="\n")
