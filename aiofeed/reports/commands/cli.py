"""The command line: ``aiofeed``, also as ``python -m aiofeed``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version

from aiofeed.kernel.core.errors import FeedError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand in ``arguments`` (default: those of the command line); returns the exit code."""
    parser = argparse.ArgumentParser(prog="aiofeed", description="Feeds PyTorch training.")
    parser.add_argument("--version", action="version", version=f"aiofeed {version('aiofeed')}")
    _add_commands(parser.add_subparsers(metavar="command", dest="command"))
    options = vars(parser.parse_args(arguments))
    if "script" in options:
        options["script"], *options["arguments"] = options["script"][options["script"][0] == "--" :]
    if (command := options.pop("command")) is None:
        parser.print_help()
        return 0
    # The function of a module of this folder, which gets the options by their names.
    module, function = options.pop("calls").split(".")
    call = partial(getattr(import_module(f".{module}", __package__), function), **options)
    return (_printing_errors(command, call) if command in ("bench", "replay") else call()) or 0


def _printing_errors(command: str, call: Callable[[], int]) -> int:
    """Print an error of the data as one line; returns the exit code."""
    try:
        return call()
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError, TypeError, ImportError, RuntimeError, FeedError) as error:
        print(f"aiofeed {command}: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 1


_RUN = """\
Runs an unchanged script in which each DataLoader of torch, and of subclasses, makes its batches as aiofeed.DataLoader
does, also in processes that the script starts. Batches are the same, bit for bit. At the end, one line per loader."""
_RUN_THREADS = """N threads in place of workers call a dataset with indices, which must be thread-safe. Order and data
stay the same, but not random numbers that it draws. Not for loaders with a worker_init_fn"""


def _add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("run", help="run an unchanged script with aiofeed's DataLoader", description=_RUN)
    command.add_argument("--device", help="copy batches to it, for scripts that do not need them on the host, or auto")
    command.add_argument("--threads", type=int, metavar="N", help=_RUN_THREADS)
    command.add_argument("--explain", action="store_true", help="tell at the end what limits each loader, with advice")
    command.add_argument("-m", action="store_true", dest="module", help="SCRIPT is a module")
    _add_script(command, "a Python file, or a command such as torchrun, and its arguments")
    command.set_defaults(calls="run.run")

    command = commands.add_parser("doctor", help="report accelerators, packages and limits, with advice for problems")
    command.add_argument("--quick", action="store_false", dest="measure", help="do not measure copy rates")
    command.set_defaults(calls="cli.doctor")

    command = commands.add_parser("bench", help="measure a data set with several settings and with torch's DataLoader")
    command.add_argument("paths", nargs="+", metavar="PATH", help="a folder of images, a manifest, or URLs of shards")
    command.add_argument("--size", type=int, default=224, help="the size of decoded images (default: %(default)s)")
    command.add_argument("--batch-size", type=int, default=64, help="samples per batch (default: %(default)s)")
    command.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")
    command.set_defaults(calls="bench.bench")

    command = commands.add_parser("profile", help="run a script, then explain where the time of its feeders went")
    command.add_argument("--output", metavar="PATH", help="write the timeline: .html, .png or .json for Perfetto")
    _add_script(command, "a Python script, and its arguments")
    command.set_defaults(calls="profile.profile")

    command = commands.add_parser("index", help="write the indexes of tar and TFRecord shards")
    command.add_argument("urls", nargs="+", metavar="URL", help="a URL or path, with braces {000..099} or a glob")
    command.add_argument("--target", help="the field of targets, which the index then contains")
    command.add_argument("--output", help="a folder (default: beside files; for objects, the cache folder)")
    command.set_defaults(calls="prepare.write_indexes")

    command = commands.add_parser("replay", help="print the samples of any step of a training, from a saved state")
    command.add_argument("path", metavar="STATE", help="a feeder's state or a checkpoint with one: JSON or torch.save")
    command.add_argument("--at", metavar="PLACE", help="the place of the state among several, as in feeders.train")
    command.add_argument("--step", type=int, required=True, help="the batch of a rank, from 0")
    command.add_argument("--epoch", type=int, default=0, help="the epoch from which on steps count (default: 0)")
    command.add_argument("--rank", type=int, help="the rank (default: that of the state, 0 if it is the same on all)")
    command.add_argument("--data", nargs="+", default=(), metavar="PATH", help="the data, for keys: as for bench")
    command.set_defaults(calls="replay.replay")


def _add_script(command: argparse.ArgumentParser, help: str) -> None:
    # One argument: with one for the script and one for the rest, argparse drops a "--" between them.
    command.add_argument("script", nargs=argparse.PARSER, metavar="SCRIPT", help=help)


def doctor(*, measure: bool) -> None:
    """Print the report of this machine; ``measure``: with the copy rates of its devices."""
    from aiofeed.reports.machine import device_report

    print(device_report(measure=measure))
