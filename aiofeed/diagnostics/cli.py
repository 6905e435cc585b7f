"""The command line: ``python -m aiofeed``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import version

from aiofeed.diagnostics import device_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand in ``arguments`` (default: those of the command line); returns the exit code."""
    parser = argparse.ArgumentParser(prog="aiofeed", description="Feeds PyTorch training.")
    parser.add_argument("--version", action="version", version=f"aiofeed {version('aiofeed')}")
    commands = parser.add_subparsers(metavar="command")
    doctor = commands.add_parser("doctor", help="report accelerators, packages and limits, with advice for problems")
    doctor.add_argument("--quick", action="store_true", help="do not measure copy rates")
    index = commands.add_parser("index", help="write the indexes of tar and TFRecord shards")
    index.add_argument("urls", nargs="+", metavar="URL", help="a URL or path, with braces {000..099} or a glob")
    index.add_argument("--target", help="the field of targets, which the index then contains")
    index.add_argument("--output", help="a folder (default: beside files; for objects, the cache folder)")
    bench = commands.add_parser("bench", help="measure a data set with several settings and with torch's DataLoader")
    bench.add_argument("paths", nargs="+", metavar="PATH", help="a folder of images, a manifest, or URLs of shards")
    bench.add_argument("--size", type=int, default=224, help="the size of decoded images (default: 224)")
    bench.add_argument("--batch-size", type=int, default=64, help="samples per batch (default: 64)")
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if hasattr(options, "paths"):
        from aiofeed.diagnostics.bench_command import bench as run_bench

        return run_bench(options.paths, size=options.size, batch_size=options.batch_size, as_json=options.json)
    if hasattr(options, "urls"):
        from aiofeed.diagnostics.index_command import write_indexes

        return write_indexes(options.urls, target=options.target, output=options.output)
    if not hasattr(options, "quick"):
        parser.print_help()
        return 0
    print(device_report(measure=not options.quick))
    return 0
