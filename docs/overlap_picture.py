"""Draws the picture of the first page: loads and steps one after the other, and side by side.

    python docs/overlap_picture.py

A test compares docs/overlap.svg with what this script draws.
"""

from __future__ import annotations

from pathlib import Path

BATCHES = 6
# Units of the picture; the width of a telephone, so that the text stays as large as that of the page.
WIDTH, HEIGHT, LEFT, BOX, LANE = 420, 188, 48, 30, 26
# Okabe and Ito's blue and orange, which people with any colour vision can tell apart.
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 14px }
.load { fill: #0072b2 } .step { fill: #e69f00 } .idle { fill: #8b949e33 }
.in-load { fill: #fff; text-anchor: middle } .in-step { fill: #24292f; text-anchor: middle }
.saved { text-anchor: middle } .line { stroke: #6e7781; fill: none }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .line { stroke: #9198a1 } }
"""


def schedule(*, ahead: bool) -> tuple[list[int], list[int]]:
    """When each load and each step starts, if both take one unit of time.

    Args:
        ahead: Whether the next batch is loaded during the step, or after it.
    """
    loads, steps = [0], [1]
    for _ in range(BATCHES - 1):
        loads.append(loads[-1] + 1 if ahead else steps[-1] + 1)
        steps.append(max(loads[-1], steps[-1]) + 1)
    return loads, steps


def lane(name: str, starts: list[int], end: int, y: int) -> list[str]:
    """A box per batch with its number, and behind them the time in which nothing happens."""
    shapes = [f'<text x="0" y="{y + 17}">{name}</text>']
    shapes.append(f'<rect class="idle" x="{LEFT}" y="{y}" width="{end * BOX}" height="{LANE - 4}" rx="3"/>')
    for number, start in enumerate(starts, 1):
        x = LEFT + start * BOX
        shapes.append(f'<rect class="{name}" x="{x + 1}" y="{y}" width="{BOX - 2}" height="{LANE - 4}" rx="3"/>')
        shapes.append(f'<text class="in-{name}" x="{x + BOX // 2}" y="{y + 16}">{number}</text>')
    return shapes


def picture() -> str:
    """The text of docs/overlap.svg."""
    shapes, ends = [], []
    for top, ahead, title in (
        (0, False, "One after the other: the GPU waits for each batch"),
        (104, True, "aiofeed: the next batch is loaded during the step"),
    ):
        loads, steps = schedule(ahead=ahead)
        ends.append(steps[-1] + 1)
        shapes.append(f'<text class="title" x="0" y="{top + 16}">{title}</text>')
        shapes += lane("load", loads, ends[-1], top + 26) + lane("step", steps, ends[-1], top + 26 + LANE)
    x, far = LEFT + ends[1] * BOX, LEFT + ends[0] * BOX
    shapes.append(f'<path class="line" stroke-dasharray="3 3" d="M{far} 26V182M{x} 130V182"/>')
    shapes.append(f'<path class="line" d="M{x + 4} 155H{far - 4}m-6 -4l6 4l-6 4M{x + 4} 155m6 -4l-6 4l6 4"/>')
    shapes.append(f'<text class="saved" x="{(x + far) // 2}" y="146">time saved</text>')
    words = f"{BATCHES} loads and steps: {ends[0]} units of time one after the other, {ends[1]} side by side."
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    return "\n".join([head, f"<title>{words}</title>", f"<style>{STYLE}</style>", *shapes, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("overlap.svg").write_text(picture(), encoding="utf-8", newline="\n")
