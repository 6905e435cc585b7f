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
    listing = commands.add_parser("ls", help="show what is in folders, buckets, shards and manifests")
    listing.add_argument(
        "listed", nargs="+", metavar="URL", help="a URL or path; shards with braces {000..099} or a glob"
    )
    listing.add_argument("--json", action="store_true", help="print a JSON object per line")
    cache = commands.add_parser("cache", help="describe or verify the file of an EncodedCache")
    actions = cache.add_subparsers(metavar="action", required=True)
    info = actions.add_parser("info", help="print the number of entries, their bytes and the budget")
    verify = actions.add_parser("verify", help="verify all checksums; the exit code is 1 if an entry is damaged")
    for action in (info, verify):
        action.add_argument("path", metavar="PATH", help="the file")
        action.set_defaults(verify=action is verify)
    verify.add_argument("--repair", action="store_true", help="delete damaged entries")
    options = parser.parse_args(arguments)
    if hasattr(options, "listed"):
        from aiofeed.diagnostics.ls_command import list_urls

        return list_urls(options.listed, as_json=options.json)
    if hasattr(options, "verify"):
        from aiofeed.diagnostics.cache_command import show_cache

        return show_cache(options.path, verify=options.verify, repair=getattr(options, "repair", False))
    if hasattr(options, "urls"):
        from aiofeed.diagnostics.index_command import write_indexes

        return write_indexes(options.urls, target=options.target, output=options.output)
    if not hasattr(options, "quick"):
        parser.print_help()
        return 0
    print(device_report(measure=not options.quick))
    return 0
