"""Draws the pictures of docs/gallery.md, docs/recipes/, docs/robots.md and docs/arrays.md.

    python docs/pictures.py

Each is an SVG with text that can be read at a width of 400 pixels, and with colours for light and dark pages. The
timelines are computed from the time of a read, of decoding and of a step; the others from aiofeed's own orders and
batches, or from the figures of the page. A test compares the files in docs/ with what this script draws.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import NormalDist

import torch

import aiofeed

WIDTH, MARGIN = 460, 14
STYLE = (
    "text{fill:#1f2328}.small{fill:#59636e;font-size:12px}.card{fill:#fff}.grid{stroke:#d1d9e0;fill:none}"
    ".line{stroke:#59636e;stroke-width:1.5;fill:none}.box{fill:#f3f5f8;stroke:#b7c0ca}.none{fill:#dde2e8}"
    ".a{fill:#4c8ed9}.b{fill:#e6a117}.c{fill:#2da36f}.d{fill:#c774b4}.e{fill:#7cc4ec}.wait{fill:#e2574c}"
    ".step{fill:#aab2bb}.ring{stroke:#d55e00;stroke-width:2;fill:none}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9aa4b0}.card{fill:#161b22}.grid{stroke:#30363d}"
    ".line{stroke:#9aa4b0}.box{fill:#21262d;stroke:#4a535e}.none{fill:#343b44}.a{fill:#3f7fc8}.b{fill:#c98c12}"
    ".c{fill:#27895e}.d{fill:#a85f98}.e{fill:#4d93ba}.wait{fill:#d0483e}.step{fill:#6b747e}.ring{stroke:#f0803c}}"
)
"""Colours that people with any colour vision can tell apart, in a light and a dark scheme."""


# --- shapes -----------------------------------------------------------------------------------------------------------


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A rectangle of a kind, which says its colour."""
    return f'<rect class="{kind}" x="{x:.4g}" y="{y:.4g}" width="{max(width, 0.5):.4g}" height="{height:.4g}"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text; ``kind="small"`` for notes."""
    chosen = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return f'<text{chosen} x="{x:.4g}" y="{y:.4g}">{escape(words)}</text>'


def box(x: float, y: float, width: float, label: str, note: str = "") -> list[str]:
    """A box of a diagram, 40 high, with its name and a note below it."""
    middle = x + width / 2
    frame = f'<rect class="box" x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="40" rx="5"/>'
    words = [text(middle, y + (17 if note else 25), label, anchor="middle")]
    return [frame, *words, *([text(middle, y + 33, note, "small", "middle")] if note else [])]


def arrow(x: float, y: float, right: float, low: float) -> str:
    """An arrow between two boxes."""
    angle = math.atan2(low - y, right - x)
    tips = [(right - 7 * math.cos(angle + turn), low - 7 * math.sin(angle + turn)) for turn in (-0.45, 0.45)]
    ends = "".join(f"M{right:.4g} {low:.4g}L{tip:.4g} {at:.4g}" for tip, at in tips)
    return f'<path class="line" d="M{x:.4g} {y:.4g}L{right:.4g} {low:.4g}{ends}"/>'


def legend(y: float, entries: Sequence[tuple[str, str]], x: float = MARGIN) -> list[str]:
    """Squares of kinds, each with its meaning."""
    shapes = []
    for kind, words in entries:
        shapes += [rect(x, y - 10, 11, 11, kind), text(x + 16, y, words, "small")]
        x += 30 + 6.4 * len(words)
    return shapes


def svg(title: str, height: float, shapes: Iterable[str]) -> str:
    """A picture on a background of its own, with its title in the first line."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.4g}" width="600" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" width="{WIDTH}" height="{height:.4g}" rx="6"/>',
        f'<text x="{MARGIN}" y="23" font-weight="bold">{escape(title)}</text>',
    )
    return "\n".join([*head, *shapes, "</svg>", ""])


# --- timelines --------------------------------------------------------------------------------------------------------


def timeline(title: str, read_ms: float, reads: int, decode_ms: float, threads: int, step_ms: float) -> str:
    """The lanes of a training whose every batch takes these times, with two batches ahead of the step.

    Args:
        title: Names the limit.
        read_ms: The time of one of the four reads of a batch.
        reads: Reads in flight.
        decode_ms: The time of decoding one of four samples.
        threads: Decode threads.
        step_ms: The time of a step.
    """
    shown_ms, batches, samples = 200.0, 60, 4
    read_lanes, decode_lanes = [0.0] * reads, [0.0] * threads
    events: list[tuple[str, int, float, float]] = []
    begun, free = [], 0.0
    for batch in range(batches):
        allowed = begun[batch - 3] if batch >= 3 else 0.0  # two finished batches may wait
        ready = 0.0
        for _ in range(samples):
            lane = min(range(reads), key=read_lanes.__getitem__)
            start = max(read_lanes[lane], allowed)
            read_lanes[lane] = start + read_ms
            events.append(("a", lane, start, read_lanes[lane]))
            thread = min(range(threads), key=decode_lanes.__getitem__)
            start = max(decode_lanes[thread], read_lanes[lane])
            decode_lanes[thread] = start + decode_ms
            events.append(("b", reads + thread, start, decode_lanes[thread]))
            ready = max(ready, decode_lanes[thread])
        begin = max(free, ready)
        if begin > free:
            events.append(("wait", reads + threads, free, begin))
        free = begin + step_ms
        begun.append(begin)
        events.append(("step", reads + threads, begin, free))
    left, top, row = 74, 40, 17
    first = begun[8]  # the pipeline is in its rhythm
    scale = (WIDTH - left - MARGIN) / shown_ms
    names = [*(f"read {number + 1}" for number in range(reads)), *(f"decode {number + 1}" for number in range(threads))]
    shapes = [
        text(left - 8, top + row * lane + 12, name, "small", "end") for lane, name in enumerate([*names, "training"])
    ]
    waits = 0.0
    for kind, lane, begin, end in events:
        begin, end = max(begin, first), min(end, first + shown_ms)
        if begin < end:
            shapes.append(rect(left + (begin - first) * scale, top + row * lane, (end - begin) * scale - 0.6, 14, kind))
            waits += (end - begin) * (kind == "wait")
    low = top + row * (reads + threads + 1)
    entries = [("a", "read"), ("b", "decode"), ("wait", "training waits"), ("step", "step")]
    return svg(
        f"{title}: training waits {waits / shown_ms:.0%} of the time", low + 26, [*shapes, *legend(low + 15, entries)]
    )


def timelines() -> dict[str, str]:
    """Four bottlenecks; everything but the named time is the same."""
    return {
        "gallery-storage.svg": timeline("Storage latency", 22, 4, 2, 2, 8),
        "gallery-cores.svg": timeline("Cores", 6, 4, 9, 2, 8),
        "gallery-one-thread.svg": timeline("One thread", 6, 4, 5, 1, 8),
        "gallery-step.svg": timeline("The step", 6, 4, 3, 2, 24),
    }


# --- caches and the way of a batch ------------------------------------------------------------------------------------


def levels() -> str:
    """What each cache keeps, and so what later epochs leave out."""
    stages = ("storage", "read", "decode", "augment", "copy")
    kept = {"no cache": 0, "EncodedCache": 1, "DiskCache, host": 3, 'cache="device"': 5, "Tensors": 5}
    left, top, cell = 122, 62, 64
    shapes = [text(left + cell * (at + 0.5), top - 8, name, "small", "middle") for at, name in enumerate(stages)]
    for row, (name, count) in enumerate(kept.items()):
        y = top + row * 28
        shapes.append(text(left - 8, y + 16, name, anchor="end"))
        kinds = ["none" if at < count else kind for at, kind in enumerate("aabcd")]
        shapes += [rect(left + cell * at + 1, y + 3, cell - 2, 18, kind) for at, kind in enumerate(kinds)]
    low = top + 28 * len(kept)
    words = "Colour: happens in each epoch. Grey: only in the first one, or never."
    return svg("What happens from the second epoch on", low + 26, [*shapes, text(MARGIN, low + 14, words, "small")])


def hits() -> str:
    """The hits of a cache with room for a part of the samples: those stored first stay, or the least recent leave."""
    count, epochs = 2000, 6
    shares = (0.25, 0.5, 0.75)
    found: dict[str, list[float]] = {"first stay": [], "least recently used": []}
    for share in shares:
        room, order, recent, hit = int(count * share), random.Random(0), OrderedDict[int, None](), 0
        for epoch in range(epochs):
            for sample in order.sample(range(count), count):
                hit += sample in recent and epoch > 0
                recent.pop(sample, None)
                recent[sample] = None
                if len(recent) > room:
                    recent.popitem(last=False)
        found["first stay"].append(share)  # an epoch reads each sample once, and the same ones are there
        found["least recently used"].append(hit / (count * (epochs - 1)))
    shapes, left, high, low = [], 60, 56, 186
    for tick in (0, 0.25, 0.5, 0.75):
        y = low - tick * (low - high) / 0.8
        shapes += [f'<path class="grid" d="M{left} {y:.4g}H{WIDTH - MARGIN}"/>']
        shapes += [text(left - 6, y + 4, f"{tick:.0%}", "small", "end")]
    for at, share in enumerate(shares):
        for number, (kind, values) in enumerate(zip("ab", found.values(), strict=True)):
            height, x = values[at] * (low - high) / 0.8, left + 24 + at * 124 + number * 42
            shapes.append(rect(x, low - height, 38, height, kind))
            shapes.append(text(x + 19, low - height - 4, f"{values[at]:.0%}", "small", "middle"))
        shapes.append(text(left + 64 + at * 124, low + 16, f"room for {share:.0%}", "small", "middle"))
    entries = [("a", "EncodedCache: the first stay"), ("b", "least recently used")]
    return svg("Reads that a full cache answers", low + 46, [*shapes, *legend(low + 36, entries)])


def way() -> str:
    """The stages that a batch passes, from the storage to the step."""
    stages = (
        ("Plan", "which samples are in which batch", "order by seed and epoch"),
        ("Read", "event loop: up to 512 reads at a time", "bytes"),
        ("Decode", "threads, or processes", "tensors, into the memory of the batch"),
        ("Collate", "the last sample of a batch fills it", "a finished batch"),
        ("Copy", "pinned memory, a stream of its own", "a batch on the device"),
        ("next", "for images, labels in feeder:", "your step"),
    )
    shapes, y = [], 40
    for number, (name, where, result) in enumerate(stages):
        shapes += [f'<rect class="box" x="{MARGIN}" y="{y}" width="276" height="40" rx="5"/>']
        shapes += [text(MARGIN + 10, y + 17, name), text(MARGIN + 10, y + 33, where, "small")]
        shapes.append(text(302, y + 25, result if len(result) < 26 else result.split(",")[0], "small"))
        if number + 1 < len(stages):
            shapes.append(arrow(152, y + 40, 152, y + 54))
        y += 54
    return svg("The way of a batch", y + 4, shapes)


# --- recipes ----------------------------------------------------------------------------------------------------------


def bars(title: str, groups: Sequence[tuple[str, Sequence[float]]], names: Sequence[tuple[str, str]]) -> str:
    """A group of bars for each label."""
    most, left, high, low = max(max(values) for _, values in groups), MARGIN + 10, 52, 170
    shapes, wide = [f'<path class="line" d="M{MARGIN} {low}H{WIDTH - MARGIN}"/>'], (WIDTH - 2 * left) / len(groups)
    for at, (label, values) in enumerate(groups):
        bar = (wide - 14) / len(values)
        for number, value in enumerate(values):
            height, x = value / most * (low - high), left + at * wide + number * bar
            shapes.append(rect(x, low - height, bar - 3, height, names[number][0]))
            if len(groups) < 8:
                shapes.append(text(x + bar / 2, low - height - 4, f"{value:g}", "small", "middle"))
        shapes.append(text(left + at * wide + (wide - 14) / 2, low + 16, label, "small", "middle"))
    return svg(title, low + 48, [*shapes, *legend(low + 36, names)])


def normalise() -> str:
    """How often each value occurs in a picture, before and after."""
    values = [max(0, min(255, round(124 + 58 * NormalDist().inv_cdf((number + 0.5) / 4000)))) for number in range(4000)]
    counts = [sum(1 for value in values if value // 16 == part) for part in range(16)]
    shapes, top = [], 50
    for row, label in enumerate(("bytes", "floats")):
        x, y = 74, top + row * 92
        shapes.append(text(x - 8, y + 40, label, anchor="end"))
        for part, count in enumerate(counts):
            height = 60 * count / max(counts)
            shapes.append(rect(x + part * 22, y + 60 - height, 20, height, "ac"[row]))
        marks = (
            [0, 64, 128, 192, 255] if row == 0 else [(mark / 255 - 0.485) / 0.229 for mark in (0, 64, 128, 192, 255)]
        )
        for mark, at in zip(marks, (0, 64, 128, 192, 255), strict=True):
            words = f"{mark:.1f}" if row else f"{mark:g}"
            shapes.append(text(x + at / 256 * 352, y + 74, words, "small", "middle"))
    return svg("The same pixels: (x / 255 - mean) / std", top + 182, shapes)


def split() -> str:
    """The parts that 100 samples belong to, by the order of a feeder's seed."""
    with aiofeed.Feeder(aiofeed.Tensors(torch.arange(100)), batch_size=100, shuffle=True, seed=0, shard=None) as feeder:
        [[order]] = feeder
    held = set(order[:10].tolist())
    shapes = []
    for index in range(100):
        x, y = MARGIN + index % 25 * 17.3, 40 + index // 25 * 18
        shapes.append(rect(x, y, 15, 15, "b" if index in held else "a"))
    return svg(
        "Each sample is in one part", 148, [*shapes, *legend(132, [("a", "train: 90"), ("b", "validation: 10")])]
    )


def class_weights() -> str:
    """The draws of an epoch of a feeder, without and with weights."""
    counts = {"cat": 60, "dog": 30, "fox": 6}
    targets = torch.cat([torch.full((count,), number) for number, count in enumerate(counts.values())])
    source = aiofeed.Tensors(targets)
    with aiofeed.Feeder(source, batch_size=96, weights=1 / targets.bincount()[targets], seed=0, shard=None) as feeder:
        drawn = torch.cat([batch for (batch,) in feeder]).bincount().tolist()
    groups = [(name, (count, draws)) for (name, count), draws in zip(counts.items(), drawn, strict=True)]
    return bars("Draws of an epoch", groups, [("step", "as in the data"), ("a", "weights=1 / counts[targets]")])


def coco() -> str:
    """A picture with three boxes, and a crop with what is left of them."""
    boxes = [(20, 30, 70, 95, "a"), (84, 20, 130, 62, "b"), (140, 70, 176, 112, "c")]
    left, upper, right, lower = 44, 24, 140, 108
    shapes, x, y = [], MARGIN, 58
    shapes += [text(x, y - 8, "the file, 180 x 120", "small"), rect(x, y, 180, 120, "none")]
    for one, two, three, four, kind in boxes:
        shapes.append(rect(x + one, y + two, three - one, four - two, kind))
    shapes.append(rect(x + left, y + upper, right - left, lower - upper, "ring"))
    shapes.append(arrow(x + 186, y + 60, x + 226, y + 60))
    x, scale = 246, 128 / (right - left)
    shapes += [text(x, y - 8, "the sample, 128 x 128", "small"), rect(x, y, 128, 128, "none")]
    tall = 128 / (lower - upper)
    for one, two, three, four, kind in boxes:
        one, three = (min(max(each, left), right) for each in (one, three))
        two, four = (min(max(each, upper), lower) for each in (two, four))
        if three - one >= 1 and four - two >= 1:
            place = (x + (one - left) * scale, y + (two - upper) * tall, (three - one) * scale, (four - two) * tall)
            shapes.append(rect(*place, kind))
    words = "Boxes are clipped to the crop; the green one is outside and dropped."
    return svg("A random crop moves the boxes", 218, [*shapes, text(MARGIN, 204, words, "small")])


def mixed_sizes() -> str:
    """Four images of three shapes in a batch, in each of the four ways."""
    images, wide = [(36, 24), (24, 36), (30, 30), (44, 22)], 0
    shapes = []
    for column, name in enumerate(("crop", "buckets", "pad", "list")):
        x = MARGIN + column * 110
        shapes.append(text(x, 48, name))
        for number, (width, height) in enumerate(images):
            y = 58 + number * 42
            if name == "crop":
                shapes.append(rect(x, y, 30, 30, "a"))
            elif name == "buckets":
                shapes.append(rect(x + 46, 58, 24, 36, "b") if number == 1 else rect(x, 58 + wide * 32, 36, 24, "a"))
                wide += number != 1
            elif name == "pad":
                shapes += [rect(x, y, 44, 36, "none"), rect(x, y, width, height, "a")]
            else:
                shapes.append(rect(x, y, width, height, "a"))
    return svg("One batch of four images", 240, [*shapes, *legend(230, [("a", "pixels"), ("none", "padding")])])


def packed() -> str:
    """The rows of a feeder with Pack; each colour is a document."""
    lengths = [round(24 * math.exp(0.6 * NormalDist().inv_cdf((number + 0.5) / 32))) for number in range(32)]
    documents = [torch.zeros(length, dtype=torch.int64) for length in lengths]
    plan = aiofeed.Pack(lengths, 100, rows=9, split=True)
    shapes: list[str] = []
    with aiofeed.Feeder(documents, batch_size=plan, shuffle=True, shard=None) as feeder:
        for batch in feeder:
            for number, row in enumerate(batch["document_ids"]):
                x, y = float(MARGIN), 40 + number * 15
                numbers, counts = row.unique_consecutive(return_counts=True)
                for document, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                    kind = "abcde"[document % 5] if document >= 0 else "none"
                    shapes.append(rect(x, y, count * 4.3 - 1, 12, kind))
                    x += count * 4.3
            break
    total = sum(lengths)
    return svg(f"{len(lengths)} documents, {total} tokens, in rows of 100", 40 + 9 * 15 + 10, shapes)


def diagram(title: str, height: float, boxes: Sequence[tuple[float, float, float, str, str]], arrows: str) -> str:
    """Boxes, and arrows between those whose numbers a text such as "0>1 1>2" names."""
    shapes: list[str] = []
    for each in boxes:
        shapes += box(*each)
    for pair in arrows.split():
        one, other = (boxes[int(number)] for number in pair.split(">"))
        if other[0] >= one[0] + one[2]:
            shapes.append(arrow(one[0] + one[2] + 2, one[1] + 20, other[0] - 3, other[1] + 20))
        elif other[1] == one[1]:
            shapes.append(arrow(one[0] - 2, one[1] + 20, other[0] + other[2] + 3, other[1] + 20))
        else:
            shapes.append(arrow(one[0] + one[2] / 2, one[1] + 42, other[0] + other[2] / 2, other[1] - 3))
    return svg(title, height, shapes)


def resume() -> str:
    """Steps 1 to 50 of two starts, with checkpoints every 10 and a crash after 37."""
    shapes, cell, left = [], 7.2, 88
    for row, (name, steps) in enumerate((("first start", range(1, 38)), ("second", range(31, 51)))):
        y = 44 + row * 34
        shapes.append(text(left - 8, y + 14, name, "small", "end"))
        for step in steps:
            kind = "wait" if row == 0 and step > 30 else "a" if row == 0 else "c"
            shapes.append(rect(left + (step - 1) * cell, y, cell - 1.4, 18, kind))
    for step in (10, 20, 30, 40, 50):
        x = left + step * cell - 0.7
        shapes += [f'<path class="line" d="M{x:.4g} 40V100"/>', text(x, 114, str(step), "small", "middle")]
    entries = [("a", "kept"), ("wait", "lost"), ("c", "after the crash")]
    note = text(WIDTH - MARGIN, 134, "lines: checkpoints", "small", "end")
    return svg("A crash after step 37", 144, [*shapes, *legend(134, entries), note])


def graphs() -> str:
    """The launches of a step, with and without a graph."""
    shapes, left = [], 92
    for row, (name, starts) in enumerate((("launched", range(12)), ("replayed", None))):
        y = 46 + row * 62
        shapes += [text(left - 8, y + 12, name, anchor="end"), text(left - 8, y + 34, "GPU", "small", "end")]
        for number in starts or range(1):
            shapes.append(rect(left + number * 28, y, 24 if starts else 28, 14, "b"))
        for number in range(12):
            x = left + 16 + number * 28 if starts else left + 22 + number * 11
            shapes.append(rect(x, y + 22, 10, 14, "a"))
    entries = [("b", "the CPU launches"), ("a", "kernels")]
    return svg("A step of 12 small kernels", 178, [*shapes, *legend(168, entries)])


def recipes() -> dict[str, str]:
    """The pictures of docs/recipes/."""
    return {
        "recipes/normalise.svg": normalise(),
        "recipes/transforms.svg": diagram(
            "Two places for transforms",
            166,
            [
                (14, 44, 84, "bytes", ""),
                (118, 44, 104, "DecodeImage", "crop, flip"),
                (242, 44, 84, "augment=", "per sample"),
                (346, 44, 100, "batch", "uint8"),
                (346, 112, 100, "transform=", "per batch"),
                (118, 112, 104, "step", "floats"),
            ],
            "0>1 1>2 2>3 3>4 4>5",
        ),
        "recipes/split.svg": split(),
        "recipes/class-weights.svg": class_weights(),
        "recipes/coco.svg": coco(),
        "recipes/mixed-sizes.svg": mixed_sizes(),
        "recipes/language-model.svg": packed(),
        "recipes/buckets.svg": diagram(
            "Where bytes come from",
            172,
            [
                (14, 44, 120, "bucket", "tar shards"),
                (170, 44, 120, "feeder", "first epoch"),
                (326, 44, 120, "step", ""),
                (14, 118, 120, "train.cache", "local disk"),
                (170, 118, 120, "feeder", "later epochs"),
                (326, 118, 120, "step", ""),
            ],
            "0>1 1>2 1>3 3>4 4>5",
        ),
        "recipes/resume.svg": resume(),
        "recipes/frameworks.svg": diagram(
            "A feeder per rank",
            176,
            [
                (14, 82, 116, "data", "files, bucket"),
                (166, 44, 126, "feeder, rank 0", "samples 0, 2, 4 ..."),
                (166, 120, 126, "feeder, rank 1", "samples 1, 3, 5 ..."),
                (328, 44, 118, "trainer", "GPU 0"),
                (328, 120, 118, "trainer", "GPU 1"),
            ],
            "0>1 0>2 1>3 2>4",
        ),
        "recipes/cuda-graphs.svg": graphs(),
        "recipes/one-feed.svg": diagram(
            "Decoded once",
            196,
            [
                (14, 86, 100, "files", ""),
                (146, 86, 128, "serve(feeder)", "decodes each once"),
                (316, 38, 130, "training 1", "attach, rate 1e-4"),
                (316, 86, 130, "training 2", "attach, rate 1e-3"),
                (316, 134, 130, "training 3", "attach, rate 1e-2"),
            ],
            "0>1 1>2 1>3 1>4",
        ),
        "recipes/http-service.svg": diagram(
            "One message per batch",
            148,
            [
                (14, 62, 90, "files", ""),
                (134, 62, 130, "aiohttp handler", "async for ... feeder"),
                (300, 38, 146, "client", "GET /batches?seed=1"),
                (300, 90, 146, "client", "GET /batches?seed=2"),
            ],
            "0>1 1>2 1>3",
        ),
    }


# --- episodes of robots -----------------------------------------------------------------------------------------------


def window() -> str:
    """The rows and frames of a moment: those of its windows, what is decoded for them, and what is padding."""
    rows, now, key_frames = 12, 6, 4
    fields = {"top camera": ("a", (-1, 0)), "wrist": ("a", (0,)), "state": ("c", (-1, 0)), "action": ("c", range(8))}
    shapes, left, top, cell, row = [], 94, 62, 25, 30
    x, low = left + now * cell, top + row * len(fields)
    shapes.append(text(x + 11, top - 20, "the moment", anchor="middle"))
    shapes += [text(left + at * cell + 11, top - 4, str(at), "small", "middle") for at in range(rows)]
    for at, (name, (kind, steps)) in enumerate(fields.items()):
        y = top + at * row
        shapes.append(text(left - 8, y + 17, name, anchor="end"))
        used = {now + step for step in steps}
        first = min(used) // key_frames * key_frames if kind == "a" else rows
        for number in range(max(rows, *(number + 1 for number in used))):
            outside, decoded = number >= rows, first <= number <= max(used)
            chosen = "b" if outside else kind if number in used else "e" if decoded else "none"
            shapes.append(rect(left + number * cell, y + 3, cell - 3, 20, chosen))
            if kind == "a" and number % key_frames == 0 and not outside:
                shapes.append(text(left + number * cell + 11, y + 17, "K", "small", "middle"))
    shapes.append(rect(x - 2, top, cell + 1, row * len(fields) - 4, "ring"))
    end = left + rows * cell - 1.5
    shapes.append(f'<path class="line" d="M{end:.4g} {top - 14}V{low}"/>')
    shapes.append(text(end + 4, top - 4, "end", "small"))
    first_line = legend(low + 20, [("a", "frames"), ("e", "decoded on the way"), ("c", "rows")])
    second_line = legend(low + 40, [("b", "padding: the last row again"), ("none", "not used")])
    note = text(WIDTH - MARGIN, low + 20, "K: key frame", "small", "end")
    return svg("The windows around row 6 of an episode", low + 50, [*shapes, *first_line, *second_line, note])


# --- arrays -----------------------------------------------------------------------------------------------------------


def windows_in_chunks() -> str:
    """Chunks of an array, the windows of two samples, the chunks that these need, and the batch of them."""
    times, rows, long, high = 24, 4, 8, 2
    samples = {(13, 0): "sample 1", (16, 3): "sample 2"}
    left, top, cell, row = 62, 66, 16, 22
    used = {(row, now + step): "b" if step == 1 else "a" for now, row in samples for step in range(-3, 2)}
    needed = {(row // high, time // long) for row, time in used}
    shapes = [text(left, top - 18, "time"), text(left - 8, top + 16, "tiles", anchor="end")]
    shapes += [text(left + at * cell + 7, top - 4, str(at), "small", "middle") for at in range(0, times, 4)]
    for at in range(rows):
        for time in range(times):
            kind = used.get((at, time), "e" if (at // high, time // long) in needed else "none")
            shapes.append(rect(left + time * cell, top + at * row, cell - 2, row - 2, kind))
    for down in range(rows // high):
        for across in range(times // long):
            x, y = left + across * long * cell - 1, top + down * high * row - 1
            shapes.append(f'<path class="line" d="M{x} {y}h{long * cell}v{high * row}h{-long * cell}z"/>')
    low = top + rows * row
    for (now, at), name in samples.items():
        shapes.append(rect(left + (now - 3) * cell - 2, top + at * row - 2, 5 * cell + 2, row + 2, "ring"))
        shapes.append(text(left + (now + 2) * cell + 4, top + at * row + 14, name))
    for x, size, label, note in ((left, 170, "x: [2, 4, 16, 16]", "range(-3, 1)"), (270, 150, "y: [2, 16, 16]", "1")):
        shapes += [*box(x, low + 36, size, label, note), arrow(x + size / 2, low + 6, x + size / 2, low + 33)]
    first = legend(low + 98, [("a", "window of x"), ("b", "window of y"), ("e", "chunks of the batch")])
    return svg("A batch of two samples, made of three chunks", low + 112, [*shapes, *first])


def pictures() -> dict[str, str]:
    """The text of each picture by the name of its file."""
    return {
        **timelines(),
        "gallery-cache-levels.svg": levels(),
        "gallery-cache-hits.svg": hits(),
        "gallery-way.svg": way(),
        **recipes(),
        "robots-window.svg": window(),
        "arrays-picture.svg": windows_in_chunks(),
    }


if __name__ == "__main__":
    for file, drawing in pictures().items():
        Path(__file__).parent.joinpath(file).write_text(drawing, encoding="utf-8", newline="\n")
