"""The folder of the user in which listings and indexes are cached."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

log: logging.Logger = logging.getLogger("aiofeed.sources")

# At the end of a warning that nothing was cached.
SET_FOLDER = "set AIOFEED_CACHE to a writable folder"


def cache_folder() -> Path | None:
    """The folder for listings and indexes: ``$AIOFEED_CACHE``, or ``aiofeed`` in the cache folder of the platform.

    ``None`` if the user has no home: in a container, ``HOME`` may be unset and the user id may have no account.
    """
    if given := os.environ.get("AIOFEED_CACHE"):
        return Path(given)
    if sys.platform not in ("win32", "darwin") and (given := os.environ.get("XDG_CACHE_HOME")):
        return Path(given) / "aiofeed"
    try:
        home = Path.home()
    except RuntimeError:
        _warn_without_home()
        return None
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "aiofeed" / "Cache"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "aiofeed"
    return home / ".cache" / "aiofeed"


def cache_path(identity: str | None, suffix: str) -> Path | None:
    """Return the file in the cache folder for an identity; ``None`` without an identity, or without such a folder."""
    if identity is None or (folder := cache_folder()) is None:
        return None
    return folder / f"{hashlib.sha256(identity.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}.{suffix}"


@functools.cache  # once per process
def _warn_without_home() -> None:
    log.warning("listings and indexes are not cached, because this user has no home folder: %s", SET_FOLDER)


def write_cached(path: Path, parts: Iterable[bytes | memoryview], failure: str) -> None:
    """Write a file of the cache folder; if that is not possible, log a warning that begins with ``failure``."""
    try:
        write_whole(path, parts)
    except OSError as error:
        log.warning("%s: %s; %s", failure, error, SET_FOLDER)


def write_whole(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file that is complete or not there, also if this process dies; make its folder.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            for part in parts:
                file.write(part)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
