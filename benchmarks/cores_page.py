"""The picture and the tables of docs/performance.md, from the results of ``cores`` and ``gil``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from benchmarks import cores, gil, report
from benchmarks.simulated import BARE, DEFAULT, OURS, ideal

PAGE, PICTURE = "docs/performance.md", "docs/cores.svg"
Medians = Mapping[str, float]
NONE = ""


def fill(project: Path, results: Mapping[str, report.Result]) -> Iterator[Path]:
    """Write the page's tables and the picture, as far as there are results."""
    page = project / PAGE
    if not page.exists():
        return
    text = page.read_text(encoding="utf-8")
    for name, tables in (("cores", core_tables), ("gil", gil_tables)):
        if name in results:
            medians = {figure.what: figure.median for figure in results[name].figures}
            for marker, table in tables(medians).items():
                text = report.replace_between(text, marker, table)
            if name == "cores":
                (project / PICTURE).write_text(picture(medians), encoding="utf-8", newline="\n")
    page.write_text(text, encoding="utf-8")
    yield from (page, project / PICTURE)


def cell(medians: Medians, what: str, unit: str = "") -> str:
    return report.number(medians[what], unit).removesuffix(unit).strip() if what in medians else NONE


def core_tables(medians: Medians) -> dict[str, str]:
    others = [name for name in (*cores.OTHERS, "DataLoader") if f"chunks, batch 64, 2 threads: {name}" in medians]
    header = ["threads", "images/s", "of the bare pool", "by default", "batch 32", "batch 256", "CPU, us", *others]
    rows = []
    for threads in cores.THREADS:
        of = f"chunks, batch {{}}, {threads} threads: {{}} / {BARE}".format
        name = f"chunks, batch 64, {threads} threads"
        rows.append(
            [
                f"{threads}",
                cell(medians, f"{name}: {OURS}", "/s"),
                *(cell(medians, of(64, each)) for each in (OURS, DEFAULT)),
                *(cell(medians, of(batch, DEFAULT)) for batch in (32, 256)),
                cell(medians, f"{name}: CPU, {OURS}", "us"),
                *(cell(medians, of(64, each)) for each in others),
            ]
        )
    kinds = {"items": 64, "Pillow-like": 16, "pure Python": 16, "slow reads": 64}
    work = [
        [
            kind,
            f"{threads}",
            *(cell(medians, f"{kind}, batch {batch}, {threads} threads: {each}", "/s") for each in columns),
        ]
        for columns in [(DEFAULT, OURS, BARE, *cores.PROCESSES[1:])]
        for kind, batch in kinds.items()
        for threads in (16, 64)
        if f"{kind}, batch {batch}, {threads} threads: {BARE}" in medians
    ]
    name, files = f"chunks, batch 64, {cores.READING} threads", f"files of 2 KB, {cores.READING} threads"
    parts = [
        ["a feeder, for comparison", *pair(medians, name, OURS)],
        ["with the copy thread (a simulated device)", *pair(medians, name, cores.ALONE[0])],
        ["`serve`, each of 8 consumers", *pair(medians, name, cores.ALONE[1])],
        ['epochs after the first of `cache="host"`', *pair(medians, name, cores.ALONE[2])],
        [f"`aiofeed.DataLoader`, {cores.READING} workers", *pair(medians, name, "aiofeed.DataLoader")],
        [f"torch's `DataLoader`, {cores.READING} workers", *pair(medians, name, "DataLoader")],
        ["files of 2 KB in the page cache", cell(medians, f"{files}: files, {OURS}", "/s"),
         cell(medians, f"{files}: CPU, {OURS}", "us")],
        ["the same, by the bare pool", cell(medians, f"{files}: files, {BARE}", "/s"),
         cell(medians, f"{files}: CPU, {BARE}", "us")],
        *[
            [f"2 threads: aiofeed itself, beside {words}", cell(medians, f"images, {of}", "/s"),
             cell(medians, f"framework, {of}", "us")]
            for of, words in (
                ("JPEGs of 64x64, real", "a decoder of 64x64 JPEGs"), ("JPEGs of 64x64, sleeping", "sleeping as long")
            )
        ],
    ]  # fmt: skip
    return {
        "cores": report.markdown_table(header, rows),
        "cores-work": report.markdown_table(
            ["work", "threads", "by default", "`decode_threads=N`", "bare pool", "`process:4`", "`process:8`"], work
        ),
        "cores-parts": report.markdown_table(["64 threads", "samples/s", "CPU, us"], parts),
    }


def pair(medians: Medians, name: str, loader: str) -> tuple[str, str]:
    return cell(medians, f"{name}: {loader}", "/s"), cell(medians, f"{name}: CPU, {loader}", "us")


def gil_tables(medians: Medians) -> dict[str, str]:
    ours = medians[f"GIL: {gil.ITSELF}"]
    rows = []
    for what, us in medians.items():
        kind, _, label = what.partition(": ")
        if kind == "GIL":
            own = label == gil.ITSELF
            most = report.number(float(f"{1e6 / (us + ours * (not own)):.2g}"), "/s").removesuffix("/s")
            rows.append([label, cell(medians, f"CPU: {label}", "us"), cell(medians, what, "us"), most])
    header = ["decoder", "CPU, us", "holds the GIL, us", "a process at most, samples/s"]
    return {"gil": report.markdown_table(header, rows)}


# --- the picture ------------------------------------------------------------------------------------------------------

LINES = {
    BARE: ("bare", "a bare pool of whole batches"),
    "SPDL": ("c", "SPDL"),
    "torchdata.nodes": ("d", "torchdata.nodes"),
    "Grain": ("e", "Grain"),
    "DataLoader": ("b", "DataLoader, N workers"),
    DEFAULT: ("f", "aiofeed, default limits"),
    OURS: ("a", "aiofeed"),
}
STYLE = (
    "text{fill:#1f2328}.small{fill:#59636e;font-size:12px}.card{fill:#fff}.grid{stroke:#d1d9e0}path{fill:none}"
    ".line{stroke-width:2}.bare{stroke:#aab2bb;stroke-width:7}.a{stroke:#1f6fd0}.b{stroke:#e6a117}.c{stroke:#2da36f}"
    ".d{stroke:#c774b4;stroke-dasharray:2 5}.e{stroke:#d55e00;stroke-dasharray:7 7}.f{stroke:#7cc4ec}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9aa4b0}.card{fill:#161b22}.grid{stroke:#30363d}"
    ".bare{stroke:#5a636d}.a{stroke:#4c8ed9}.b{stroke:#c98c12}.c{stroke:#27895e}.d{stroke:#a85f98}.e{stroke:#f0803c}"
    ".f{stroke:#4d93ba}}"
)


def picture(medians: Medians) -> str:
    """One line for each loader, threads to images a second, on logarithmic scales, in both colour schemes."""
    left, right, top, bottom = 62, 446, 52, 262
    least, most = math.log(1000), math.log(ideal("chunks", cores.THREADS[-1]))

    def x(threads: float) -> float:
        return round(left + (right - left) * math.log(threads / 2) / math.log(cores.THREADS[-1] / 2), 1)

    def y(rate: float) -> float:
        return round(bottom - (bottom - top) * (math.log(max(rate, 1000)) - least) / (most - least), 1)

    shapes: list[str] = []
    for rate in (1_000, 3_000, 10_000, 30_000, 100_000):
        shapes.append(f'<path class="grid" d="M{left} {y(rate):g}H{right}"/>')
        shapes.append(f'<text class="small" x="{left - 6}" y="{y(rate) + 4:g}" text-anchor="end">{rate:,}</text>')
    shapes += [
        f'<text class="small" x="{x(threads):g}" y="{bottom + 18}" text-anchor="middle">{threads}</text>'
        for threads in cores.THREADS
    ]
    shown = 0
    for loader, (kind, words) in LINES.items():
        points = [
            (x(threads), y(medians[what]))
            for threads in cores.THREADS
            if (what := f"chunks, batch 64, {threads} threads: {loader}") in medians
        ]
        if not points:
            continue
        shapes.append(f'<path class="line {kind}" d="M{"L".join(f"{across:g} {up:g}" for across, up in points)}"/>')
        at, row = MARGIN + shown % 2 * 224, bottom + 42 + shown // 2 * 19
        shapes.append(f'<path class="line {kind}" d="M{at} {row - 4}h26"/>')
        shapes.append(f'<text class="small" x="{at + 34}" y="{row}">{escape(words)}</text>')
        shown += 1
    height = bottom + 42 + (shown + 1) // 2 * 19
    return svg("Images a second by decode threads, simulated", height, shapes)


MARGIN = 14


def svg(title: str, height: int, shapes: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 460 {height}" width="600" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" width="460" height="{height}" rx="6"/>',
        f'<text x="{MARGIN}" y="22" font-weight="bold">{title}</text>',
        f'<text class="small" x="{MARGIN}" y="40">1.28 ms of decoding an image, without the GIL; batches of 64</text>',
    )
    return "\n".join([*head, *shapes, "</svg>", ""])
