"""``python -m benchmarks.gpu [names...] [--device cuda:1] [--rounds N] [--quick] [--save FILE] [--write]``.

``--load FILE`` takes parts of earlier runs along. Without names nothing is measured then, and ``--write`` makes the
page of them, on a machine without a GPU too.
"""

from __future__ import annotations

import argparse
import signal
import sys
from functools import partial
from pathlib import Path

from benchmarks.command_line import LEAST_ROUNDS, add_arguments, check_arguments, say, tell_of_quick
from benchmarks.gpu import MODULES
from benchmarks.gpu.apart import PROJECT, each
from benchmarks.gpu.part import Task
from benchmarks.gpu.results import PAGE, Part, from_json, merged, plain, tally, to_json, write

LIMIT_S = 480.0


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for. Without a GPU say so, and give 0; give 1 where a part failed."""
    given = parse(arguments)
    on_cuda = given.device is None or given.device.startswith("cuda")
    if given.names and on_cuda and (reason := why_not()):
        print(f"The GPU benchmarks were not run: {reason}.")
        print("Where another Python has a CUDA build of torch: make bench-gpu GPU_PYTHON=python3")
        return 0
    parts: list[Part] = given.loaded
    machine = ""

    def show(part: Part) -> None:
        nonlocal machine
        if part.machine and part.machine != machine:
            machine = part.machine
            print(f"\n{machine}")
        say("")
        print(f"\n{plain(part)}\n  {part.took_s:.0f} s", flush=True)

    for part in parts:
        show(part)
    # Kept as they come: what ends this run in the middle takes nothing along.
    for part in each(given.names, partial(task_of, given), given.limit_s):
        show(part)
        parts = merged(parts, [part])
        keep(parts, given)
    keep(parts, given)
    print("\n" + tally(parts))
    tell_of_quick(given)
    if given.write:
        print(f"wrote {PROJECT / PAGE}")
    return 1 if any(part.failed for part in parts) else 0


def task_of(given: argparse.Namespace, name: str, limit_s: float, result: str) -> Task:
    device = given.device or "cuda"
    return Task(name, device, given.rounds, given.quick, str(given.data), result, limit_s)


def keep(parts: list[Part], given: argparse.Namespace) -> None:
    """Write what was asked for."""
    if given.save is not None:
        given.save.write_text(to_json(parts))
    if given.write:
        write(parts, PROJECT)


def why_not() -> str:
    """Why there is no CUDA device; empty where there is one."""
    import torch

    from aiofeed.devices.resolve import explain_no_accelerator

    return "" if torch.cuda.is_available() else explain_no_accelerator()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Measures aiofeed on a GPU.")
    add_arguments(parser, "benchmark", MODULES)
    parser.add_argument("--device", help="another one than the current CUDA device; 'cpu' shows that everything runs")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of all parts together (default: %(default).0f)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the results there, as JSON, as they come")
    parser.add_argument("--load", type=Path, metavar="FILE", nargs="+", help="take results that were saved along")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}, as results come")
    given = parser.parse_args(arguments)
    check_arguments(parser, given, "benchmark", MODULES)
    if not given.limit_s > 0:
        parser.error(f"--limit-s must be more than 0, got {given.limit_s:g}")
    wanted = given.names or (() if given.load else MODULES)
    given.names = [name for name in MODULES if name in wanted]
    try:
        given.loaded = merged([], [part for path in given.load or () for part in from_json(path.read_text())])
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--load: {error}")
    check_write(parser, given)
    return given


def check_write(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Refuse to write a page that would not hold what it promises."""
    if not given.write:
        return
    there = {*given.names, *(part.name for part in given.loaded if part.real)}
    unreal = given.names and (given.quick or given.rounds < LEAST_ROUNDS or given.device == "cpu")
    if unreal or there != set(MODULES):
        parser.error(
            f"--write takes a GPU, all benchmarks (measured, or loaded), real inputs and {LEAST_ROUNDS} rounds or more"
        )


if __name__ == "__main__":
    # As Ctrl-C: the process of the part that runs is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise SystemExit(main())
