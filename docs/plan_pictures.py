"""Draws the pictures of docs/batches.md and docs/mixtures.md from the batches of real feeders.

    python docs/plan_pictures.py

A test compares the files in docs/ with what this script draws: run it again after a change of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import NormalDist
from textwrap import wrap
from typing import TypeAlias

import torch

import aiofeed

Piece: TypeAlias = "tuple[int, str]"
"""Tokens and their colour."""
Row: TypeAlias = "list[Piece]"
"""A row of a batch: a padded sample is one piece, a packed row has a piece per document."""
Shares: TypeAlias = "dict[str, float]"
"""The share of each source."""

WIDTH, SHOWN, MARGIN = 420, 560, 8
"""Units of a picture, few enough for a telephone; its width in pixels on a larger screen; the space at both sides."""
TOKEN, ROW, BAR = 2, 9, 7
"""Pixels of a token, of a row and of its bar: equal areas in all pictures are equal costs."""
GAP, LABEL = 14, 44
"""Pixels between two batches, and at least for the label of one."""
# Okabe and Ito's colours, which people with any colour vision can tell apart.
COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"]
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f } .title text { font-weight: 600 } .line { stroke: #6e7781 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .line { stroke: #9198a1 } }
"""
CONTEXT = 100
# The quantiles of a log-normal distribution.
LENGTHS = [round(24 * math.exp(0.6 * NormalDist().inv_cdf((number + 0.5) / 32))) for number in range(32)]
SIZES, WEIGHTS = {"web": 400, "books": 120, "code": 60}, {"web": 0.55, "books": 0.3, "code": 0.15}
TOKENS = {"web": 60, "books": 400, "code": 120}
"""The tokens of a middling document of each source."""


def rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    """A filled rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>'


def text(x: float, y: float, words: str) -> str:
    """A line of text that starts at ``x``."""
    return f'<text x="{x:g}" y="{y:g}">{words}</text>'


def svg(title: str, height: float, shapes: Iterable[str]) -> str:
    """A picture with its title in the first two lines; its background is that of the page, light or dark."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="{SHOWN}" height="{height * SHOWN / WIDTH:g}">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        '<pattern id="padding" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f"{rect(0, 0, 5, 5, '#8b949e33')}{rect(0, 0, 2, 5, '#8b949e99')}</pattern>",
        '<g class="title">',
        *(text(MARGIN, 18 + 17 * number, line) for number, line in enumerate(wrap(title, 52))),
        "</g>",
    )
    return "\n".join([*head, *shapes, "</svg>", ""])


def draw_batches(name: str, batches: Sequence[Sequence[Row]], width: int | None = None) -> str:
    """Each batch as a block: a bar per row, as long as its tokens, and hatched padding up to the width of the batch.

    Args:
        name: The kind of batch.
        batches: The rows of each batch.
        width: The tokens of a padded row. Default: those of the longest row of the batch.
    """
    shapes: list[str] = []
    x, top, bottom, tokens, places = MARGIN, 90, 90, 0, 0
    for batch in batches:
        widest = width or max(sum(length for length, _ in row) for row in batch)
        if x + widest * TOKEN > WIDTH - MARGIN:
            x, top = MARGIN, bottom + 32
        shapes.append(text(x, top - 6, f"{len(batch)} x {widest}"))
        for number, row in enumerate(batch):
            at, y = x, top + number * ROW
            for length, colour in row:
                shapes.append(rect(at, y, length * TOKEN - 0.5, BAR, colour))
                at += length * TOKEN
                tokens += length
            if at < x + widest * TOKEN:
                shapes.append(rect(at, y, x + widest * TOKEN - at, BAR, "url(#padding)"))
        places += len(batch) * widest
        bottom = max(bottom, top + len(batch) * ROW)
        x += max(widest * TOKEN, LABEL) + GAP
    share = 1 - tokens / places
    title = f"{name}: {len(batches)} batches, {tokens:,} tokens padded to {places:,} ({share:.0%} padding)"
    legend = [rect(MARGIN, 47, 16, 9, COLOURS[0]), text(MARGIN + 22, 56, "tokens")]
    legend += [rect(MARGIN + 76, 47, 16, 9, "url(#padding)"), text(MARGIN + 98, 56, "padding")]
    return svg(title, bottom + MARGIN, [*legend, *shapes])


def padded(name: str, batch_size: int | aiofeed.Buckets | aiofeed.TokenBudget) -> str:
    """The batches of a feeder over samples of 32 lengths."""
    with aiofeed.Feeder(LENGTHS, batch_size=batch_size, shuffle=True, collate_fn=list, shard=None) as feeder:
        return draw_batches(name, [[[(length, COLOURS[0])] for length in batch] for batch in feeder])


def packed() -> str:
    """The same documents in rows of one length; each colour is a document."""
    documents = [torch.zeros(length, dtype=torch.int64) for length in LENGTHS]
    plan = aiofeed.Pack(LENGTHS, CONTEXT, rows=5, split=False)
    with aiofeed.Feeder(documents, batch_size=plan, shuffle=True, shard=None) as feeder:
        batches = []
        for batch in feeder:
            rows = []
            for row in batch["document_ids"]:
                numbers, counts = row.unique_consecutive(return_counts=True)
                pieces = zip(numbers.tolist(), counts.tolist(), strict=True)
                rows.append([(count, COLOURS[number % len(COLOURS)]) for number, count in pieces if number >= 0])
            batches.append(rows)
        return draw_batches("Pack", batches, width=CONTEXT)


def mixture() -> str:
    """The source of each sample of a mixture, and the samples of each source so far beside their shares."""
    sources = {name: range(size) for name, size in SIZES.items()}
    mixed = aiofeed.Mixture(sources, WEIGHTS, until=40, names=True)
    with aiofeed.Feeder(mixed, batch_size=8, shuffle=True, collate_fn=list, shard=None) as feeder:
        batches = [[name for _, name in batch] for batch in feeder]
    samples = [name for batch in batches for name in batch]
    cell, strip, low, high = 7, 70, 252, 112
    end, unit = MARGIN + len(samples) * cell, (low - high) / (len(samples) * max(WEIGHTS.values()))
    shapes, furthest, start = [], 0.0, MARGIN
    for number, batch in enumerate(batches):
        shapes.append(text(start + 2, strip - 6, f"batch {number + 1}"))
        if number:
            shapes.append(f'<path d="M{start - 1} {strip - 16}V{low}" class="line" stroke-dasharray="2 3"/>')
        start += len(batch) * cell
    for (name, weight), colour in zip(WEIGHTS.items(), COLOURS, strict=False):
        count, line = 0, f"M{MARGIN} {low}"
        for number, sample in enumerate(samples):
            count += sample == name
            furthest = max(furthest, abs(count - weight * (number + 1)))
            line += f"H{MARGIN + (number + 1) * cell}" + (f"V{low - count * unit:g}" if sample == name else "")
            if sample == name:
                shapes.append(rect(MARGIN + number * cell, strip, cell - 1, 12, colour))
        ideal = low - weight * len(samples) * unit
        shapes.append(f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        shapes.append(f'<path d="M{MARGIN} {low}L{end} {ideal:g}" class="line" stroke-dasharray="4 3"/>')
        shapes.append(text(end + 10, ideal + 4, f"{name}: {count}, share {weight * len(samples):g}"))
    words = "Bars: the source of each sample. Lines: samples of each source so far. Dashed: its share of them."
    shapes += [text(MARGIN, low + 22 + 17 * number, line) for number, line in enumerate(wrap(words, 62))]
    title = f"Mixture: after each of {len(samples)} samples, every source is within {furthest:.2f} samples of its share"
    return svg(title, low + 52, shapes)


def shares() -> str:
    """The sources' shares so far, of samples and of tokens, in a mixture by samples and in one by tokens."""
    lengths = {name: [round(middle * length / 24) for length in LENGTHS] for name, middle in TOKENS.items()}
    shapes, books, drawn, high, dashes = [], [], 600, 84, 'stroke="#fff" stroke-dasharray="4 3"'
    for number, (name, colour) in enumerate(zip(WEIGHTS, COLOURS, strict=False)):
        shapes += [rect(MARGIN + 70 * number, 47, 16, 9, colour), text(MARGIN + 22 + 70 * number, 56, name)]
    for row, unit in enumerate(("samples", "tokens")):
        mixed = aiofeed.Mixture(lengths, WEIGHTS, until=drawn, names=True, unit=unit, lengths=lengths)
        with aiofeed.Feeder(mixed, batch_size=8, shuffle=True, collate_fn=list, shard=None) as feeder:
            samples = [sample for batch in feeder for sample in batch]
        for column, counted in enumerate(("samples", "tokens")):
            sizes = [(name, length if counted == "tokens" else 1) for length, name in samples]
            place = MARGIN + column * 212, 96 + row * (high + 42), 150, high
            shapes.append(text(place[0], place[1] - 8, f'unit="{unit}": {counted} so far'))
            areas, ends = stacked(sizes, *place)
            shapes += areas
            books.append(ends["books"])
            edge = 0.0
            for weight in [*WEIGHTS.values()][:-1]:
                edge += weight
                shapes.append(f'<path d="M{place[0]} {place[1] + high * edge:g}h150" {dashes}/>')
    words = f"From left to right: {drawn} samples. Dashed: the weights {', '.join(map(str, WEIGHTS.values()))}."
    bottom = 96 + 2 * (high + 42) - 16
    shapes.append(text(MARGIN, bottom, words))
    title = f"Long books with weight 0.3: by samples {books[1]:.0%} of the tokens, by tokens {books[3]:.0%}"
    return svg(title, bottom + MARGIN + 4, shapes)


def stacked(
    sizes: Sequence[tuple[str, int]], x: float, top: float, wide: float, high: float
) -> tuple[list[str], Shares]:
    """Areas of the sums so far of each source as shares of the height, with the shares at the end."""
    sums, lines = dict.fromkeys(WEIGHTS, 0), dict.fromkeys(WEIGHTS, "")
    for number, (name, size) in enumerate(sizes, 1):
        sums[name] += size
        if number < 8 or number % 8 == 0:
            below = 0.0
            for each, amount in sums.items():
                below += amount / sum(sums.values())
                lines[each] += f"L{x + wide * number / len(sizes):.5g} {top + high * below:.4g}"
    # Each area reaches from the upper edge to its line; those above it cover the rest.
    colours = reversed([*zip(WEIGHTS, COLOURS, strict=False)])
    shapes = [f'<path d="M{x} {top}{lines[name]}V{top}z" fill="{colour}"/>' for name, colour in colours]
    ends = {name: amount / sum(sums.values()) for name, amount in sums.items()}
    # The texts from below, so that they do not touch.
    below, last = top + high, top + high + 16
    for share in reversed(ends.values()):
        last = min(below - high * share / 2 + 4, last - 14)
        below -= high * share
        shapes.append(text(x + wide + 4, last, f"{share:.0%}"))
    return shapes, ends


def balanced() -> str:
    """The cost of each of 8 ranks in the first steps of two plans, as a bar from 0."""
    lengths = [round(400 * math.exp(0.7 * NormalDist().inv_cdf((number + 0.5) / 2000))) for number in range(2000)]
    plans = {
        "TokenBudget": aiofeed.TokenBudget(lengths, max_tokens=16_384, window=500),
        "Balanced": aiofeed.Balanced(lengths, 16_384, cost=attention, groups=8),
    }
    shapes, worst = [], {}
    ranks, steps, wide, high = 8, 5, 8, 70
    for row, (name, plan) in enumerate(plans.items()):
        low = 138 + row * (high + 60)
        with aiofeed.Feeder(lengths, batch_size=plan, shuffle=True, collate_fn=list, shard=None) as feeder:
            costs = [sum(map(attention, batch)) for batch in feeder]
            if name == "TokenBudget":
                costs = [len(batch) * attention(max(batch)) for batch in feeder]
        worst[name] = 0.0
        for step in range(steps):
            each, x = costs[step * ranks : (step + 1) * ranks], MARGIN + step * 81
            mean = sum(each) / ranks
            worst[name] = max(worst[name], max(each) / mean)
            for rank, cost in enumerate(each):
                height = cost / mean * high / 1.5
                shapes.append(rect(x + rank * wide, low - height, wide - 2, height, COLOURS[0]))
            top = low - high / 1.5
            shapes.append(f'<path d="M{x - 2} {top:g}h{ranks * wide + 2}" stroke="#d55e00" stroke-dasharray="4 3"/>')
            shapes.append(text(x, low + 16, f"step {step + 1}: {max(each) / mean:.2f}"))
        shapes.append(text(MARGIN, low - high - 8, f"{name}: the cost of each of {ranks} ranks, and the mean (dashed)"))
    title = f"Balanced: the slowest of {ranks} ranks costs up to {worst['Balanced']:.2f} times the mean of a step, "
    return svg(title + f"with TokenBudget {worst['TokenBudget']:.2f}", 138 + high + 60 + 26, shapes)


def attention(length: float) -> float:
    """The cost of a sample with attention, in tokens."""
    return length + length * length / 12_288


def pictures() -> dict[str, str]:
    """The text of each picture by the name of its file."""
    return {
        "batches-plain.svg": padded("Plain batches", 8),
        "batches-buckets.svg": padded("Buckets", aiofeed.Buckets(LENGTHS, [20, 36], [12, 6, 4])),
        "batches-token-budget.svg": padded("TokenBudget", aiofeed.TokenBudget(LENGTHS, max_tokens=256)),
        "batches-balanced.svg": balanced(),
        "batches-packed.svg": packed(),
        "batches-mixture.svg": mixture(),
        "mixtures-shares.svg": shares(),
    }


if __name__ == "__main__":
    for file, drawing in pictures().items():
        Path(__file__).with_name(file).write_text(drawing, encoding="utf-8", newline="\n")
