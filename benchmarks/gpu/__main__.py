"""``python -m benchmarks.gpu [names...] [--device cuda:1] [--rounds N] [--quick] [--save FILE] [--write]``.

``--load FILE`` adds results of earlier runs. Without names nothing is measured then, and ``--write`` writes the page
from them, also on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import torch

from aiofeed.kernel.devices.resolve import explain_no_accelerator
from benchmarks.command_line import LEAST_ROUNDS, add_arguments, parsed, print_progress, warn_if_quick
from benchmarks.gpu import MODULES
from benchmarks.gpu.runner import PAGE, Part, from_json, merged, plain, run_all, tally, to_json, write
from benchmarks.harness import PROJECT

LIMIT_S = 480.0


def main(arguments: list[str] | None = None) -> int:
    """Run the selected benchmarks. Returns 1 if one failed, 0 otherwise, also if there is no GPU."""
    options = parse(arguments)
    on_cuda = options.device.startswith("cuda")
    if options.names and on_cuda and (reason := missing_cuda()):
        print(f"The GPU benchmarks were not run: {reason}.")
        print("If another Python has a CUDA build of torch: make bench-gpu GPU_PYTHON=python3")
        return 0
    parts: list[Part] = options.loaded
    machine = ""

    def show(part: Part) -> None:
        nonlocal machine
        if part.machine and part.machine != machine:
            machine = part.machine
            print(f"\n{machine}")
        print_progress("")
        print(f"\n{plain(part)}\n  {part.duration_s:.0f} s", flush=True)

    for part in parts:
        show(part)
    setup = {name: getattr(options, name) for name in ("device", "rounds", "quick")} | {"data": str(options.data)}
    # Saved after each part, so that an interrupted run loses nothing.
    for part in run_all(options.names, setup, options.limit_s):
        show(part)
        parts = merged(parts, [part])
        save(parts, options)
    save(parts, options)
    print("\n" + tally(parts))
    warn_if_quick(options)
    if options.write:
        print(f"wrote {PROJECT / PAGE}")
    return 1 if any(part.failed for part in parts) else 0


def save(parts: list[Part], options: argparse.Namespace) -> None:
    """Write the file of ``--save`` and the page of ``--write``."""
    if options.save is not None:
        options.save.write_text(to_json(parts))
    if options.write:
        write(parts, PROJECT)


def missing_cuda() -> str:
    """Why there is no CUDA device; empty if there is one."""
    return "" if torch.cuda.is_available() else explain_no_accelerator()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Measures aiofeed on a GPU.")
    add_arguments(parser, "benchmark", MODULES)
    parser.add_argument("--device", default="cuda", help="default: %(default)s; 'cpu' checks that everything runs")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of all parts together (default: %(default).0f)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the results to FILE, as JSON, after each part")
    parser.add_argument("--load", type=Path, metavar="FILE", nargs="+", help="add results that were saved")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}, after each part")
    options = parsed(parser, arguments, "benchmark", MODULES)
    if not options.limit_s > 0:
        parser.error(f"--limit-s must be more than 0, got {options.limit_s:g}")
    selected = options.names or (() if options.load else MODULES)
    options.names = [name for name in MODULES if name in selected]
    try:
        options.loaded = merged([], [part for path in options.load or () for part in from_json(path.read_text())])
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--load: {error}")
    if options.write:
        # Refuse to write an incomplete page.
        available = {*options.names, *(part.name for part in options.loaded if part.real)}
        unreal = options.names and (options.quick or options.rounds < LEAST_ROUNDS or options.device == "cpu")
        if unreal or available != set(MODULES):
            parser.error(
                f"--write needs a GPU, all benchmarks (measured or loaded), real inputs, {LEAST_ROUNDS} rounds or more"
            )
    return options


if __name__ == "__main__":
    # Exit as on Ctrl-C, which ends the process of the running part.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise SystemExit(main())
