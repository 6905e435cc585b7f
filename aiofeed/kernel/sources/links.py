"""Paths that must stay below a root, and files that must not be reached by a symbolic link."""

from __future__ import annotations

import errno
import os

_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
# O_PATH needs search permission for a folder only.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_HAS_DIR_FD = bool(_NOFOLLOW) and os.open in os.supports_dir_fd


def beneath(root: str, path: str) -> str:
    """``path`` joined to ``root``; ``ValueError`` if it leads out of ``root``. Does not check links."""
    check_beneath(root, path)
    return os.path.join(root, path)


def check_beneath(root: str, path: str) -> None:
    """``ValueError`` if ``path`` leads out of ``root``."""
    if ".." not in path and path[:1] not in ("", "/", "\\") and path[1:2] != ":":
        return  # a third of the time of the checks below, for lists of millions of paths
    parts = path.replace(os.altsep, os.sep).split(os.sep) if os.altsep else path.split(os.sep)
    if os.path.isabs(path) or os.path.splitdrive(path)[0] or not parts[0]:
        raise ValueError(f"{path!r} is not relative to root={root!r}; with a root, all paths must be")
    if os.pardir in parts:
        raise ValueError(f"{path!r} may lead out of root={root!r}: with a root, {os.pardir!r} is not allowed")


def refuse_links(root: str, path: str, known: dict[str, bool]) -> None:
    """``ValueError`` if ``path`` leads through a link below ``root``; ``known`` caches which folders are links."""
    if (link := _first_link(root, path, known)) is not None:
        raise ValueError(f"{path!r} leads through the symbolic link {link!r}, and follow_symlinks=False")


def _first_link(root: str, path: str, known: dict[str, bool]) -> str | None:
    """The first component of ``path`` below ``root`` that is a link. ``known`` caches folders, not the file itself."""
    at = len(os.path.join(root, ""))
    while (at := path.find(os.sep, at)) >= 0:
        folder = path[:at]
        if folder not in known:
            known[folder] = os.path.islink(folder)
        if known[folder]:
            return folder
        at += 1
    return path if os.path.islink(path) else None


def open_unlinked(path: str, root: str | None, flags: int) -> int:
    """Open ``path`` without following links in its last component, or in all components below ``root``.

    The constructor of the source has checked for links. Here the calls that open the file check again, so a link that
    was created since is not followed either.
    """
    if root is None:
        root, name = os.path.split(path)
        parts = []
    else:
        prefix = os.path.join(root, "")
        if not path.startswith(prefix):
            raise OSError(errno.EPERM, f"not below root={root!r}", path)
        folders, name = os.path.split(path[len(prefix) :])
        parts = [part for part in folders.split(os.sep) if part not in ("", os.curdir)]
    parts.append(name or os.curdir)  # a separator at the end names a folder
    if not _HAS_DIR_FD:  # Windows; a link created between these two lines is not noticed
        if (link := _first_link(root, path, {})) is not None:
            raise _is_link(path, link)
        return os.open(path, flags)
    try:
        return open_below(root or os.curdir, parts, flags)
    except OSError as error:
        # The system reports a link in place of a folder as ENOTDIR.
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and (link := _first_link(root, path, {})) is not None:
            raise _is_link(path, link) from None
        raise OSError(error.errno, error.strerror, path) from None


def open_below(root: str, parts: list[str], flags: int) -> int:
    """Open a file by the folders that lead to it from a root; an error if one of them, or the file, is a link."""
    folder = os.open(root, _FOLDER)
    try:
        for part in parts[:-1]:
            if part == os.pardir:
                raise OSError(errno.EPERM, f"{os.pardir!r} leads out of the root")
            inner = os.open(part, _FOLDER | _NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(parts[-1], flags | _NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)


def _is_link(path: str, link: str) -> OSError:
    what = "it is a symbolic link" if link == path else f"it leads through the symbolic link {link!r}"
    return OSError(errno.ELOOP, f"{what}, and follow_symlinks=False", path)
